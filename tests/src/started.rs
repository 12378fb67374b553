//! A `cfq` command that goes on while a test looks: what it has said so far, and how it ends.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use crate::cluster::{TOKEN, die_with_parent};
use crate::{binary, wait};

/// The client asks a handful of times and waits for nothing: seconds are for a loaded machine.
const BOUND: Duration = Duration::from_secs(20);

/// Dropped, it is killed.
pub struct Started {
    child: Child,
    said: PathBuf,
    what: String,
}

impl Started {
    /// `cfq ARGS` against the API at `url`, from `home`, which keeps what it says.
    pub fn start(home: &Path, args: &[&str], url: &str) -> Self {
        let said = home.join("said");
        let mut command = Command::new(tokio::task::block_in_place(binary::cfq));
        let out = std::fs::File::create(&said).unwrap();
        command.args(args).current_dir(home).stdin(Stdio::null()).stderr(out.try_clone().unwrap()).stdout(out);
        command.env("CFQ_DATA", home.join("data")).env("CFQ_CONFIG", home.join("config"));
        command.env("CFQ_URL", url).env("CFQ_TOKEN", TOKEN);
        die_with_parent(&mut command);
        Self { child: command.spawn().unwrap(), said, what: format!("cfq {args:?}") }
    }

    /// Both of its outputs, as they came.
    pub fn said(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.said).unwrap()).into_owned()
    }

    pub async fn ends(&mut self) -> ExitStatus {
        let what = format!("{} to end", self.what);
        wait::until(&what, BOUND, || {
            let done = self.child.try_wait().unwrap();
            let said = self.said();
            async move { done.ok_or_else(|| format!("it goes on; it said {said:?}")) }
        })
        .await
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
