//! A Postgres server that one test may kill and freeze, because it holds no other test's data. It starts on a copy of a
//! prepared data folder, which takes a fraction of the time of `initdb`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use cfq_deploy::postgres::{Postgres, PostgresAddress};
use cfq_link::child::{Process, ProcessIdentity};
use tokio::sync::OnceCell;

use super::{config, scratch, start};
use crate::signal;

/// A running dedicated server, killed on drop with all its processes.
pub struct DedicatedPostgres {
    postgres: Postgres,
    process: Mutex<Process>,
}

/// Path of the seed folder: a cfq data folder with a migrated database, whose server is stopped. Created once per test
/// run.
async fn seed() -> &'static Path {
    static SEED: OnceCell<PathBuf> = OnceCell::const_new();
    SEED.get_or_init(|| async {
        let data = scratch().join("seed");
        let (postgres, process) = start(&data).await;
        let address = postgres.address();
        cfq_scheduler::migrate(&config(&address, &address.database)).await.unwrap();
        let exit = Postgres::stop(&process).await.unwrap();
        assert!(exit.is_success(), "{exit}");
        data
    })
    .await
}

/// Copies the seed folder to `data`, which must not exist. `cfq up` accepts the copy as a folder it has used before.
pub async fn copy_seed(data: &Path) {
    let seed = seed().await;
    // `cp` shares blocks between the copies if the file system supports it.
    let copied = Command::new("cp").arg("-a").arg(seed).arg(data).status().unwrap();
    assert!(copied.success(), "cp -a {} {}", seed.display(), data.display());
}

impl DedicatedPostgres {
    /// Starts a server on a copy of the seed folder in `dir`.
    pub async fn start(dir: &Path) -> Self {
        let data = dir.join("postgres-data");
        copy_seed(&data).await;
        let (postgres, process) = start(&data).await;
        Self { postgres, process: Mutex::new(process) }
    }

    pub fn address(&self) -> PostgresAddress {
        self.postgres.address()
    }

    /// Sends SIGKILL to the postmaster and to all its children, and waits until they have ended.
    pub async fn kill9(&self) {
        let process = self.process.lock().unwrap().clone();
        let all = self.stop_all();
        for one in all.iter().rev() {
            signal::send(one.pid, libc::SIGKILL);
        }
        process.ended().await;
        for one in all {
            assert!(one.ended(super::EXIT_LIMIT).await, "process {} of Postgres is still there", one.pid);
        }
    }

    /// Stops the server as cfq does.
    pub async fn stop(&self) {
        let process = self.process.lock().unwrap().clone();
        Postgres::stop(&process).await.unwrap();
    }

    /// Starts the server again on the same folder and socket.
    pub async fn restart(&self) {
        let process = self.postgres.start().await.unwrap();
        *self.process.lock().unwrap() = process;
    }

    /// Sends SIGSTOP to all processes of the server, so that connections stay open without answers. Dropping the
    /// returned guard resumes the processes.
    pub fn freeze(&self) -> Frozen {
        Frozen(self.stop_all())
    }

    /// Sends SIGSTOP to the postmaster first, so that it starts no further process, then to its children. Returns all
    /// of them, the postmaster first.
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

/// Guard of a frozen Postgres; dropping it resumes the processes.
#[must_use]
pub struct Frozen(Vec<ProcessIdentity>);

impl Drop for Frozen {
    fn drop(&mut self) {
        for one in self.0.iter().rev() {
            signal::send(one.pid, libc::SIGCONT);
        }
    }
}

impl Drop for DedicatedPostgres {
    fn drop(&mut self) {
        // All processes must have ended before their folder is removed, since they write to it.
        let process = self.process.lock().unwrap_or_else(|e| e.into_inner()).clone();
        if process.exit().is_none() {
            for one in self.stop_all().iter().rev() {
                signal::send(one.pid, libc::SIGKILL);
            }
        }
    }
}
