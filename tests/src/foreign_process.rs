//! A process that is not part of cfq, for tests in which such a process uses a GPU, or has a process id that a cfq
//! process had before.

use std::process::{Child, Command, Stdio};

/// A running `sleep` command, killed on drop.
pub struct ForeignProcess(Child);

impl ForeignProcess {
    pub fn start() -> Self {
        let mut sleep = Command::new("sleep");
        Self(sleep.arg("600").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap())
    }

    pub fn pid(&self) -> u32 {
        self.0.id()
    }

    pub fn is_running(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }
}

impl Drop for ForeignProcess {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}
