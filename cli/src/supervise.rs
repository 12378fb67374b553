//! Keeping a service process running: started again when it ends by itself, ever more slowly if it keeps ending, stopped in
//! good order when asked. The services hold nothing that their death could lose; that is what makes this enough.

use std::ffi::OsString;
use std::time::{Duration, Instant};

use anyhow::Context;
use cfq_deploy::{Paths, files};
use cfq_link::child::{self, Spec};
use cfq_link::stop::{Stop, Stopper};
use serde::Serialize;
use tokio::task::JoinHandle;

/// First wait before a service that ended is started again; it doubles up to [`SLOWEST`].
const FIRST_WAIT: Duration = Duration::from_millis(200);
const SLOWEST: Duration = Duration::from_secs(10);
/// A service that ran this long was healthy: the next restart is quick again.
const HEALTHY: Duration = Duration::from_secs(30);

/// One supervised service.
pub struct Service {
    name: &'static str,
    stopper: Stopper,
    task: JoinHandle<()>,
}

/// Writes the service's configuration (0600: it names where secrets lie) and starts it.
pub fn start<C: Serialize>(
    name: &'static str,
    config: &C,
    paths: &Paths,
    level: &str,
    grace: Duration,
    environment: &[(&'static str, String)],
) -> anyhow::Result<Service> {
    let path = paths.run().join(format!("{name}.toml"));
    let text = toml::to_string(config).with_context(|| format!("cannot write the configuration of the {name}"))?;
    files::write_private(&path, text.as_bytes(), None)?;
    let program = std::env::current_exe().context("cannot tell where the cfq binary is")?;
    let mut spec = Spec::new(name, &program, &paths.log(name), &paths.pidfile(name));
    spec.args = vec![OsString::from("serve"), OsString::from(name), path.into_os_string()];
    if std::env::var_os("CFQ_LOG").is_none() {
        spec.env.push(("CFQ_LOG".into(), level.into()));
    }
    spec.env.extend(environment.iter().map(|(key, value)| (OsString::from(key), OsString::from(value))));
    let process = child::spawn(spec.clone())?;
    let (stopper, stop) = cfq_link::stop::pair();
    let task = tokio::spawn(keep(name, spec, process, stop, grace));
    Ok(Service { name, stopper, task })
}

impl Service {
    /// Returns when the process has ended.
    pub async fn stop(self) {
        self.stopper.stop();
        if let Err(error) = self.task.await {
            tracing::error!(service = self.name, %error, "its supervisor failed");
        }
    }
}

async fn keep(name: &'static str, spec: Spec, first: child::Process, mut stop: Stop, grace: Duration) {
    let mut process = first;
    let mut wait = FIRST_WAIT;
    loop {
        let started = Instant::now();
        tokio::select! {
            exit = process.ended() => tracing::warn!(service = name, %exit, "ended; it is started again"),
            () = stop.raised() => {
                if let Err(error) = process.stop(grace).await {
                    tracing::error!(service = name, %error, "could not be stopped");
                }
                return;
            }
        }
        if started.elapsed() > HEALTHY {
            wait = FIRST_WAIT;
        }
        loop {
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = stop.raised() => return,
            }
            wait = (wait * 2).min(SLOWEST);
            match child::spawn(spec.clone()) {
                Ok(again) => {
                    process = again;
                    break;
                }
                Err(error) => tracing::error!(service = name, %error, "could not be started again"),
            }
        }
    }
}
