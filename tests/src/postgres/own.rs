//! A Postgres that one test may kill and freeze: nobody else's data is in it, and it starts in a fraction of the time that
//! making a data folder takes, since it starts on a copy.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use cfq_deploy::postgres::{Postgres, PostgresFacts};
use cfq_link::child::{Process, ProcessIdentity};
use tokio::sync::OnceCell;

use super::{config, scratch, start};
use crate::signal;

pub struct OwnPostgres {
    postgres: Postgres,
    process: Mutex<Process>,
}

/// cfq's data folder with a migrated database in it, at rest.
async fn seed() -> &'static Path {
    static SEED: OnceCell<PathBuf> = OnceCell::const_new();
    SEED.get_or_init(|| async {
        let data = scratch().join("seed");
        let (postgres, process) = start(&data).await;
        let facts = postgres.facts();
        cfq_scheduler::migrate(&config(&facts, &facts.database)).await.unwrap();
        let exit = Postgres::stop(&process).await.unwrap();
        assert!(exit.is_success(), "{exit}");
        data
    })
    .await
}

/// Copies that folder to `data`, which must not exist: a folder that `cfq up` would take for one it has used before.
pub async fn copy_seed(data: &Path) {
    let seed = seed().await;
    // Shares blocks where the file system can.
    let copied = Command::new("cp").arg("-a").arg(seed).arg(data).status().unwrap();
    assert!(copied.success(), "cp -a {} {}", seed.display(), data.display());
}

impl OwnPostgres {
    pub async fn start(dir: &Path) -> Self {
        let data = dir.join("postgres-data");
        copy_seed(&data).await;
        let (postgres, process) = start(&data).await;
        Self { postgres, process: Mutex::new(process) }
    }

    pub fn facts(&self) -> PostgresFacts {
        self.postgres.facts()
    }

    /// SIGKILL to the postmaster and to every process it started; all of it is gone when this returns.
    pub async fn kill9(&self) {
        let process = self.process.lock().unwrap().clone();
        let all = self.stop_all();
        for one in all.iter().rev() {
            signal::send(one.pid, libc::SIGKILL);
        }
        process.ended().await;
        for one in all {
            assert!(one.ended(super::GONE).await, "process {} of Postgres is still there", one.pid);
        }
    }

    /// On the same folder, at the same socket.
    pub async fn start_again(&self) {
        let process = self.postgres.start().await.unwrap();
        *self.process.lock().unwrap() = process;
    }

    /// SIGSTOP to all of it, so that connections stay open and nothing is answered. It goes on when the answer is dropped.
    pub fn freeze(&self) -> Frozen {
        Frozen(self.stop_all())
    }

    /// The postmaster first, which then starts no others.
    fn stop_all(&self) -> Vec<ProcessIdentity> {
        let postmaster = self.process.lock().unwrap().identity().clone();
        signal::send(postmaster.pid, libc::SIGSTOP);
        let children = signal::children_of(postmaster.pid);
        for child in &children {
            signal::send(child.pid, libc::SIGSTOP);
        }
        [postmaster].into_iter().chain(children).collect()
    }
}

/// A Postgres that does nothing until this is dropped.
#[must_use]
pub struct Frozen(Vec<ProcessIdentity>);

impl Drop for Frozen {
    fn drop(&mut self) {
        for one in self.0.iter().rev() {
            signal::send(one.pid, libc::SIGCONT);
        }
    }
}

impl Drop for OwnPostgres {
    fn drop(&mut self) {
        // Before its folder is removed: nothing may write there any more.
        let process = self.process.lock().unwrap_or_else(|e| e.into_inner()).clone();
        if process.exit().is_none() {
            for one in self.stop_all().iter().rev() {
                signal::send(one.pid, libc::SIGKILL);
            }
        }
    }
}
