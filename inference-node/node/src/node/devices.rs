//! Monitoring of the machine's devices.

use cfq_proto::node::Device;
use cfq_proto::timing::Timing;
use tokio::sync::watch;

use crate::gpu::{self, DeviceProblem, Inventory};

/// Reads the state of the devices every five heartbeat intervals. That is often enough because temperatures and the
/// memory of other programs change slowly; drivers are also slow to answer.
pub(super) async fn run(devices: watch::Sender<Vec<Device>>, mut problems: Vec<DeviceProblem>, timing: Timing) {
    loop {
        tokio::time::sleep(timing.heartbeat() * 5).await;
        if let Ok(inventory) = tokio::task::spawn_blocking(gpu::inventory).await {
            problems = log_changes(&problems, &inventory);
            devices.send_replace(inventory.devices);
        }
    }
}

/// Logs once when a device stops responding and once when it responds again. Returns the problems of the devices that
/// do not respond. While the driver itself does not respond, its GPUs are not logged as recovered.
pub(super) fn log_changes(before: &[DeviceProblem], now: &Inventory) -> Vec<DeviceProblem> {
    for problem in now.problems.iter().filter(|problem| !before.contains(problem)) {
        let DeviceProblem { device, problem, next_step } = problem;
        tracing::error!(device, next_step, "{device}: {problem}");
    }
    let mut unresponsive = now.problems.clone();
    for old in before.iter().filter(|problem| !now.problems.iter().any(|other| other.device == problem.device)) {
        let is_listed = now.devices.iter().any(|device| device.id == old.device);
        if now.driver_version.is_some() && (old.device == gpu::DRIVER_PROBLEM_DEVICE || is_listed) {
            tracing::info!(device = old.device, "{} answers again", old.device);
        } else {
            unresponsive.push(old.clone());
        }
    }
    unresponsive
}
