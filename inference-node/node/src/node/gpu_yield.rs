//! Yields the GPUs to programs of the machine's owner: while a game, a renderer or a training run uses much of a GPU,
//! jobs of this node would slow it down or take memory that it needs.
//!
//! Such a program claims the GPU. The jobs on models that yield are released; their tokens are in the journal, so they
//! resume on another node, or later on this one. Models on a claimed GPU are unloaded. Models on other GPUs continue to
//! serve. Models on the CPU stay in memory but take no jobs, and no model is loaded, because the program needs the CPU
//! as well. Models behind endpoints are not affected.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use cfq_proto::model::ModelId;
use cfq_proto::node::{Device, DeviceKind, DeviceProcess};
use tokio::sync::watch;
use tokio::time::Instant;

use super::context::NodeContext;
use super::model_registry::ModelRegistry;
use super::model_registry::yielding::{GpuClaim, GpuClaims};
use crate::config::Config;
use crate::gpu;
use crate::gpu::DeviceChoice;

/// Name of the node's own program. Models do not yield to it: it is this node, or another node that uses the same GPU.
const OWN_PROGRAM: &str = "cfq";

/// Default of `yield_bytes`: more GPU memory than most desktops and browsers use, less than a game, a renderer or a
/// training run.
const DEFAULT_YIELD_BYTES: u64 = 1_500_000_000;

/// Rules that decide to which programs the machine yields.
pub(super) struct YieldPolicy {
    /// Minimum memory of a GPU that a process must use to claim the GPU, in bytes.
    min_bytes: u64,
    /// Name prefixes of ignored programs, in lower case.
    ignored: Vec<String>,
    /// Time without claims after which models are loaded again. It is not zero because games free their memory between
    /// two levels, and programs are restarted.
    reclaim_delay: Duration,
}

impl YieldPolicy {
    /// Creates the policy of a configuration. `None` if this machine never yields, which is the default if models run
    /// on the CPU: a program that uses a GPU would stop them even if it left the CPU idle.
    pub(super) fn from_config(config: &Config) -> Option<Self> {
        let uses_gpus = gpu::supports_gpus() && config.device != DeviceChoice::Cpu;
        let min_bytes = config.yield_bytes.unwrap_or(if uses_gpus { DEFAULT_YIELD_BYTES } else { 0 });
        let ignored = config.yield_ignores.iter().map(|name| name.to_lowercase()).collect();
        (min_bytes > 0).then(|| Self { min_bytes, ignored, reclaim_delay: config.timing.heartbeat() * 15 })
    }

    /// The claims on the GPUs by other programs. If several programs claim one GPU, the one with the lowest pid is
    /// named. (The program with the most memory would change often, and every change is logged.)
    fn claims(&self, devices: &[Device]) -> GpuClaims {
        let claim = |device: &Device| {
            let claimants = device.processes.iter().filter(|process| self.is_claimant(process));
            let name = claimants.min_by_key(|process| process.pid)?.name.as_deref()?;
            Some((device.id.clone(), GpuClaim { program: name.to_owned(), gpu: device.id.clone() }))
        };
        devices.iter().filter(|device| device.kind == DeviceKind::Cuda).filter_map(claim).collect()
    }

    /// Whether the machine yields to this process. Processes without a name are ignored: they are in another PID
    /// namespace, and in a container the node itself has no name.
    fn is_claimant(&self, process: &DeviceProcess) -> bool {
        let Some(name) = process.name.as_deref().filter(|name| !process.own && *name != OWN_PROGRAM) else {
            return false;
        };
        let name = name.to_lowercase();
        let is_ignored = self.ignored.iter().any(|beginning| name.starts_with(beginning.as_str()));
        !is_ignored && process.memory.is_some_and(|bytes| bytes >= self.min_bytes)
    }
}

/// Yields the GPUs according to a policy, and reclaims them afterwards.
struct GpuYield {
    policy: YieldPolicy,
    /// Models that were unloaded for other programs and have to be loaded again.
    unloaded: BTreeSet<ModelId>,
    free_since: Option<Instant>,
}

impl GpuYield {
    fn new(policy: YieldPolicy) -> Self {
        Self { policy, unloaded: BTreeSet::new(), free_since: None }
    }

    /// Updates the claims from the current list of devices. Returns whether the jobs on models that yield have to be
    /// released.
    fn update(&mut self, registry: &ModelRegistry, devices: &[Device], now: Instant) -> bool {
        let claims = self.policy.claims(devices);
        if !claims.is_empty() {
            self.free_since = None;
            if let Some(programs) = registry.set_gpu_claims(claims) {
                tracing::info!(programs, "yielding GPUs to other programs");
            }
            // Repeated on every update, because a model that was being loaded may have become ready.
            for model in registry.models_on_claimed_gpus() {
                registry.unload(&model);
                self.unloaded.insert(model);
            }
            return true;
        }
        if registry.is_yielding() {
            let since = *self.free_since.get_or_insert(now);
            if now.duration_since(since) >= self.policy.reclaim_delay {
                registry.set_gpu_claims(GpuClaims::new());
                tracing::info!("GPU yield ended");
                registry.reclaim(&std::mem::take(&mut self.unloaded));
                self.free_since = None;
            }
        }
        false
    }
}

/// Updates the claims whenever the devices are read, until the node stops.
pub(super) async fn run(context: Arc<NodeContext>, policy: YieldPolicy, mut devices: watch::Receiver<Vec<Device>>) {
    let mut gpu_yield = GpuYield::new(policy);
    loop {
        let current = devices.borrow_and_update().clone();
        if gpu_yield.update(&context.registry, &current, Instant::now()) {
            context.release_jobs();
        }
        if devices.changed().await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use cfq_proto::node::Residency;
    use tokio::sync::mpsc::Receiver;

    use super::*;
    use crate::node::model_registry::yielding::tests::{claim, registry_on};
    use crate::node::model_registry::{LoaderCommand, ModelStatus, model_state};

    const RECLAIM_DELAY: Duration = Duration::from_secs(30);

    fn policy() -> YieldPolicy {
        YieldPolicy { min_bytes: 1000, ignored: vec!["ollama".to_owned()], reclaim_delay: RECLAIM_DELAY }
    }

    fn process(name: Option<&str>, memory: Option<u64>) -> DeviceProcess {
        DeviceProcess { pid: 7, memory, name: name.map(str::to_owned), own: false }
    }

    fn gpu_device(id: &str, processes: Vec<DeviceProcess>) -> Device {
        let cpu = gpu::inventory().devices.remove(0);
        Device { id: id.to_owned(), kind: DeviceKind::Cuda, processes, ..cpu }
    }

    fn received(commands: &mut Receiver<LoaderCommand>) -> Vec<LoaderCommand> {
        std::iter::from_fn(|| commands.try_recv().ok()).collect()
    }

    #[test]
    fn large_foreign_program_claims_a_gpu_and_desktops_and_servers_do_not() {
        let claims = |processes: Vec<DeviceProcess>| policy().claims(&[gpu_device("cuda:1", processes)]);
        let game = GpuClaims::from([("cuda:1".to_owned(), claim("game", "cuda:1"))]);
        assert_eq!(claims(vec![process(Some("game"), Some(1000))]), game);
        let own = DeviceProcess { own: true, ..process(Some("game"), Some(5000)) };
        for other in [
            process(Some("Xorg"), Some(999)),
            process(Some("Ollama-runner"), Some(5000)),
            process(Some("cfq"), Some(5000)),
            process(None, Some(5000)),
            process(Some("game"), None),
            own,
        ] {
            assert_eq!(claims(vec![other.clone()]), GpuClaims::new(), "{other:?}");
        }
        let recorder = DeviceProcess { pid: 8, ..process(Some("recorder"), Some(9000)) };
        assert_eq!(claims(vec![recorder, process(Some("game"), Some(2000))]), game, "the oldest is named");
        let both = [gpu_device("cuda:0", vec![process(Some("game"), Some(2000))]), gpu_device("cuda:1", Vec::new())];
        assert_eq!(policy().claims(&both).keys().collect::<Vec<_>>(), ["cuda:0"]);
    }

    #[test]
    fn models_are_unloaded_and_reclaimed_once_the_program_is_gone_for_a_while() {
        let (registry, mut commands, [cpu, first, second]) = registry_on(["cpu", "cuda:0", "cuda:1"]);
        let mut gpu_yield = GpuYield::new(policy());
        let start = Instant::now();
        let busy = [gpu_device("cuda:0", vec![process(Some("game"), Some(2000))]), gpu_device("cuda:1", Vec::new())];
        let free = [gpu_device("cuda:0", Vec::new()), gpu_device("cuda:1", Vec::new())];
        assert!(!gpu_yield.update(&registry, &free, start) && !registry.is_yielding());
        assert!(gpu_yield.update(&registry, &busy, start));
        assert_eq!(received(&mut commands), [LoaderCommand::Unload(first.clone())]);
        assert!(registry.yields_to(&cpu).is_some() && registry.yields_to(&second).is_none());
        // The test sets the status that the loader would set.
        registry.set_status(&first, ModelStatus::OnDisk(model_state(&first, Residency::Available)));
        assert!(gpu_yield.update(&registry, &busy, start + RECLAIM_DELAY * 9), "for hours");
        assert_eq!(received(&mut commands), []);
        for (seconds, reclaims) in [(10, false), (20, false), (39, false), (40, true)] {
            let now = start + RECLAIM_DELAY * 9 + Duration::from_secs(seconds);
            assert!(!gpu_yield.update(&registry, &free, now));
            assert_eq!(registry.is_yielding(), !reclaims, "{seconds} s");
            if seconds == 20 {
                assert!(gpu_yield.update(&registry, &busy, start), "it was only between two levels");
                gpu_yield.free_since = Some(start + RECLAIM_DELAY * 9 + Duration::from_secs(10));
            }
        }
        assert_eq!(received(&mut commands), [LoaderCommand::LoadPending]);
        assert_eq!(registry.pending_loads(), [first]);
        assert_eq!(registry.yields_to(&cpu), None);
    }

    #[test]
    fn machine_with_models_on_the_cpu_yields_only_if_configured() {
        let config = |yield_bytes: Option<u64>| -> Config {
            serde_json::from_value(serde_json::json!({
                "node": "den", "nats": { "url": "nats://127.0.0.1:1" }, "model_dir": "/m", "device": "cpu",
                "yield_bytes": yield_bytes,
            }))
            .unwrap()
        };
        assert!(YieldPolicy::from_config(&config(None)).is_none());
        assert!(YieldPolicy::from_config(&config(Some(0))).is_none());
        assert!(YieldPolicy::from_config(&config(Some(5))).is_some_and(|policy| policy.min_bytes == 5));
    }
}
