//! `cfq doctor`

pub mod commands;
pub mod endpoints;

use std::path::Path;

use cfq_deploy::Paths;
use cfq_deploy::doctor::{self, Check, CheckStatus};
use cfq_inference_node::gpu::{self, DeviceProblem};
use cfq_inference_node::models::Presence;
use cfq_inference_node::models::default_model::DefaultModel;
use cfq_link::LinkError;
use cfq_proto::node::{Device, DeviceKind};
use cfq_sandbox::{LaunchError, SandboxAccount, SandboxLauncher, SandboxSupport};

use crate::commands::models::default_model;
use crate::commands::serve::sandbox_launcher;
use crate::config::Config;
use crate::exit::Code;
use crate::membership::Membership;
use crate::output::{self, Line, Output, Tone, View};
use crate::rights;

/// Width of a terminal from which the texts stand beside the names of the checks.
const MIN_COLUMNS_BESIDE_NAMES: usize = 60;

/// Width of the verdict before the name of a check.
const MARK_COLUMNS: usize = 6;

pub async fn run(out: Output, paths: &Paths, config: &Config, file: Option<&Path>) -> anyhow::Result<Code> {
    let mut checks = vec![configuration_file(paths, file)];
    checks.extend(doctor::checks(paths, &config.services).await);
    checks.push(check_sandbox());
    checks.push(check_programs(config));
    checks.extend(check_devices());
    checks.extend(check_models(config, paths));
    checks.extend(endpoints::check(config).await);
    checks.extend(commands::check(config).await);
    checks.extend(check_membership(paths).await);
    out.print_list("checks", &checks, |checks| render(checks, output::terminal_columns()))?;
    let worst = checks.iter().map(|c| c.status).max();
    Ok(if worst == Some(CheckStatus::Fail) { Code::Failed } else { Code::Done })
}

pub(super) fn render(checks: &[Check], terminal: Option<usize>) -> Vec<Line> {
    // On a narrow terminal, the texts begin below the names.
    let is_narrow = terminal.is_some_and(|columns| columns < MIN_COLUMNS_BESIDE_NAMES);
    let longest = checks.iter().map(|c| c.name.len()).max().unwrap_or(0);
    let width = if is_narrow { 0 } else { longest };
    let mut view = View::default();
    for Check { name, status, what, next_step } in checks {
        let (mark, tone) = match status {
            CheckStatus::Ok => ("ok  ", Tone::Plain),
            CheckStatus::Warn => ("warn", Tone::NeedsUser),
            CheckStatus::Fail => ("FAIL", Tone::Bad),
        };
        let separator = if is_narrow { ": " } else { "  " };
        let start = if is_narrow { MARK_COLUMNS } else { MARK_COLUMNS + width + separator.len() };
        view.push_hanging(tone, start, format!("{mark}  {name:width$}{separator}{what}"));
        if let Some(step) = next_step {
            view.push_hanging(Tone::Plain, start + 3, format!("{:start$}-> {step}", ""));
        }
    }
    view.lines
}

/// The file that was read.
fn configuration_file(paths: &Paths, file: Option<&Path>) -> Check {
    let path = file.map_or_else(|| paths.config.join("cfq.toml"), Path::to_path_buf);
    let what = match path.exists() {
        true => path.display().to_string(),
        false => format!("{} does not exist, so the defaults are used", path.display()),
    };
    Check { name: "configuration".to_owned(), status: CheckStatus::Ok, what, next_step: None }
}

fn check_sandbox() -> Check {
    let name = "sandbox".to_owned();
    match rights::missing_sandbox_limits() {
        None => {
            Check { name, status: CheckStatus::Ok, what: "model files are parsed in it".to_owned(), next_step: None }
        }
        Some(what) => Check {
            name,
            status: CheckStatus::Warn,
            what,
            next_step: Some(
                "use a kernel and a container that offer them, or only model files that you trust".to_owned(),
            ),
        },
    }
}

/// Whether the server that this machine joined can be reached, and accepts it.
async fn check_membership(paths: &Paths) -> Option<Check> {
    let check = |status, what: String, next: Option<&str>| {
        Some(Check { name: "server".to_owned(), status, what, next_step: next.map(str::to_owned) })
    };
    let membership = match Membership::load(&paths.data) {
        Ok(membership) => membership?,
        Err(error) => return check(CheckStatus::Fail, format!("{error:#}"), None),
    };
    let what = format!("{} as {}", membership.url, membership.name);
    match membership.connect(paths).await {
        Ok(_) => check(CheckStatus::Ok, format!("joined {what}, which accepts this machine"), None),
        Err(LinkError::AuthRejected { .. }) => {
            let next = "create a new token there with `cfq token create`, and join again";
            check(CheckStatus::Fail, format!("joined {what}, but its access was revoked"), Some(next))
        }
        Err(error) => {
            let next = match &error {
                LinkError::Connect { source, .. } if cfq_link::tls::certificate_problem(source).is_some() => {
                    "if that server has lost its data, create a token there with `cfq token create` and join again"
                }
                _ => {
                    "start `cfq up --lan` there and let its ports through the firewall; if its address changed: cfq join URL"
                }
            };
            check(CheckStatus::Fail, format!("joined {what}, but {:#}", anyhow::Error::from(error)), Some(next))
        }
    }
}

/// Whether the checks that projects declare can run.
fn check_programs(config: &Config) -> Check {
    let check = |status, what: String, next_step| Check { name: "project checks".to_owned(), status, what, next_step };
    let account = config.checks.account.map(|account| SandboxAccount { uid: account.uid, gid: account.gid });
    match (SandboxLauncher { account, ..sandbox_launcher() }).probe() {
        Ok(SandboxSupport { level: Some(level), missing }) => {
            let status = if missing.is_empty() { CheckStatus::Ok } else { CheckStatus::Warn };
            let reasons = missing.first().map_or_else(String::new, |m| format!("; {}: {}", m.level, m.reason));
            let remedy = missing.into_iter().next().map(|missing| missing.remedy);
            check(status, format!("run in a sandbox ({level}){reasons}"), remedy)
        }
        Ok(SandboxSupport { level: None, missing }) => {
            let reasons: Vec<String> = missing.iter().map(|m| format!("{}: {}", m.level, m.reason)).collect();
            let remedy = missing.into_iter().next().map(|missing| missing.remedy);
            check(CheckStatus::Warn, format!("cannot run without a sandbox: {}", reasons.join("; ")), remedy)
        }
        Err(LaunchError::Root) => check(
            CheckStatus::Warn,
            "do not run as root".to_owned(),
            Some("run cfq as an ordinary user if your projects declare checks in .cfq/checks.toml".to_owned()),
        ),
        Err(error) => check(CheckStatus::Warn, format!("cannot run: {:#}", anyhow::Error::from(error)), None),
    }
}

fn check_devices() -> Vec<Check> {
    let inventory = gpu::inventory();
    let device = |d: &Device| {
        let what = match d.kind {
            DeviceKind::Cpu => format!("{}, {:.1} GiB", d.name, d.memory_total as f64 / (1u64 << 30) as f64),
            DeviceKind::Cuda => format!("{}, {}", d.name, gpu::describe_gpu(d)),
        };
        let (status, next_step) = if d.throttled.is_empty() {
            (CheckStatus::Ok, None)
        } else {
            (CheckStatus::Warn, Some("the GPU runs below full speed: check its cooling and its power limit".to_owned()))
        };
        Check { name: d.id.clone(), status, what, next_step }
    };
    let problem = |p: &DeviceProblem| Check {
        name: p.device.clone(),
        status: CheckStatus::Warn,
        what: p.problem.clone(),
        next_step: Some(p.next_step.clone()),
    };
    let mut checks: Vec<Check> = inventory.devices.iter().map(device).collect();
    checks.extend(inventory.problems.iter().map(problem));
    let driver = inventory.driver_version.map_or_else(String::new, |version| format!("; NVIDIA driver {version}"));
    let summary = if inventory.devices.len() > 1 { gpu::gpu_support_text() } else { &inventory.summary };
    checks.push(Check {
        name: "gpu".to_owned(),
        status: CheckStatus::Ok,
        what: format!("{summary}{driver}"),
        next_step: None,
    });
    checks
}

fn check_models(config: &Config, paths: &Paths) -> Vec<Check> {
    // The default model that `cfq up` would choose.
    let default_model = match default_model::choose(config) {
        DefaultModel::Curated { entry, .. } => entry.id(),
        DefaultModel::NoCandidate | DefaultModel::UnusedGpu { .. } => None,
    };
    let config = Config { default_model, ..config.clone() };
    let store = config.store(paths);
    config
        .models()
        .into_iter()
        .map(|model| {
            let (status, what, next_step) = match store.presence(&model) {
                _ if model.endpoint().is_some() => (CheckStatus::Ok, "behind an endpoint".to_owned(), None),
                _ if model.command().is_some() => (CheckStatus::Ok, "behind a program".to_owned(), None),
                Ok(Presence::Present) => (CheckStatus::Ok, "fetched".to_owned(), None),
                Ok(Presence::Missing { bytes }) => {
                    let size = bytes.map_or_else(String::new, |bytes| format!(", {:.0} MB", bytes as f64 / 1e6));
                    let what = format!("not fetched yet{size}");
                    let next_step = format!("cfq models pull {model} (`cfq up` does this automatically)");
                    (CheckStatus::Warn, what, Some(next_step))
                }
                Err(error) => (CheckStatus::Fail, error.to_string(), Some("change [agents] in cfq.toml".to_owned())),
            };
            Check { name: "model".to_owned(), status, what: format!("{model}: {what}"), next_step }
        })
        .collect()
}
