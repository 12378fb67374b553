//! Carries out the faults of a plan on a cluster's processes. Like `cfq up`, it starts a service again that ended by
//! itself.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::plan::{Fault, Kind, Part};
use crate::cluster::{Cluster, SERVICES};
use crate::signal;

/// Number of times that the processor has more busy threads than cores.
const BUSY_THREADS_PER_CORE: usize = 3;

/// The faults that were carried out.
#[derive(Default)]
pub struct Injected {
    pub by_kind: BTreeMap<String, u64>,
    /// Services that ended by themselves, with the last lines of their logs.
    pub ended: Vec<String>,
    /// Violations of a regular stop.
    pub violations: Vec<String>,
    /// One line for each fault: its times since the start of the run.
    pub timeline: String,
}

impl Injected {
    /// Carries out a fault and waits until its end.
    pub async fn inject(&mut self, cluster: &Cluster, fault: Fault, began: Instant) {
        tokio::time::sleep(fault.pause).await;
        self.start_ended_services(cluster);
        let at = began.elapsed();
        match fault.kind {
            Kind::Kill(part) => {
                kill(cluster, part).await;
                tokio::time::sleep(fault.duration).await;
                start(cluster, part).await;
            }
            Kind::Suspend(part) => suspend(cluster, part, fault.duration).await,
            Kind::Restart(part) => {
                self.stop(cluster, part).await;
                tokio::time::sleep(fault.duration).await;
                start(cluster, part).await;
            }
            Kind::KillAll => {
                for part in Part::ALL {
                    kill(cluster, part).await;
                }
                tokio::time::sleep(fault.duration).await;
                for part in Part::ALL.into_iter().rev() {
                    start(cluster, part).await;
                }
            }
            Kind::RestartAll => {
                for part in [Part::Runner, Part::Node, Part::Scheduler, Part::Nats, Part::Postgres] {
                    self.stop(cluster, part).await;
                }
                tokio::time::sleep(fault.duration).await;
                for part in Part::ALL.into_iter().rev() {
                    start(cluster, part).await;
                }
            }
            Kind::BusyProcessor => busy_processor(fault.duration).await,
        }
        *self.by_kind.entry(fault.kind.name()).or_default() += 1;
        let (from, to) = (at.as_secs_f64(), began.elapsed().as_secs_f64());
        let seconds = fault.duration.as_secs_f64();
        let clock = cfq_link::clock::unix_seconds();
        let line =
            format!("{from:7.2} s to {to:7.2} s (ends at unix time {clock}): {} ({seconds:.2} s)", fault.kind.name());
        eprintln!("{line}");
        // Writing to a string cannot fail.
        let _ = writeln!(self.timeline, "{line}");
    }

    /// Starts every service again that ended by itself.
    pub fn start_ended_services(&mut self, cluster: &Cluster) {
        for service in SERVICES {
            if cluster.has_exited(service) {
                let end = crate::cluster::tail(&cluster.log(service));
                self.ended.push(format!("{service} ended by itself; its log ends with:\n{end}"));
                cluster.start_service(service);
            }
        }
    }

    /// Stops a part as `cfq up` does; a service must then exit with success.
    async fn stop(&mut self, cluster: &Cluster, part: Part) {
        match part {
            Part::Nats => cluster.nats.stop().await,
            Part::Postgres => cluster.database.server().stop().await,
            Part::Scheduler | Part::Node | Part::Runner => {
                let status = cluster.stop(part.name()).await;
                if !status.success() {
                    let end = crate::cluster::tail(&cluster.log(part.name()));
                    self.violations.push(format!("{} ended with {status} after SIGTERM:\n{end}", part.name()));
                }
            }
        }
    }
}

async fn kill(cluster: &Cluster, part: Part) {
    match part {
        Part::Nats => cluster.nats.kill9().await,
        Part::Postgres => cluster.database.server().kill9().await,
        Part::Scheduler | Part::Node | Part::Runner => cluster.kill9(part.name()),
    }
}

async fn start(cluster: &Cluster, part: Part) {
    match part {
        Part::Nats => cluster.nats.restart().await,
        Part::Postgres => cluster.database.server().restart().await,
        Part::Scheduler | Part::Node | Part::Runner => cluster.start_service(part.name()),
    }
}

async fn suspend(cluster: &Cluster, part: Part, duration: Duration) {
    let pid = match part {
        Part::Postgres => {
            let frozen = cluster.database.server().freeze();
            tokio::time::sleep(duration).await;
            drop(frozen);
            return;
        }
        Part::Nats => cluster.nats.pid(),
        Part::Scheduler | Part::Node | Part::Runner => cluster.pid(part.name()),
    };
    signal::send(pid, libc::SIGSTOP);
    tokio::time::sleep(duration).await;
    signal::send(pid, libc::SIGCONT);
}

async fn busy_processor(duration: Duration) {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let stop = Arc::new(AtomicBool::new(false));
    let spin = || {
        let stop = stop.clone();
        std::thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        })
    };
    let threads: Vec<_> = (0..cores * BUSY_THREADS_PER_CORE).map(|_| spin()).collect();
    tokio::time::sleep(duration).await;
    stop.store(true, Ordering::Relaxed);
    for thread in threads {
        thread.join().unwrap();
    }
}
