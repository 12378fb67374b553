//! A `cfq` command that runs concurrently with the test. The test can read the command's output so far and its exit
//! status.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use crate::cluster::{TOKEN, kill_with_parent};
use crate::{binary, wait};

/// Maximum wait for the command to exit. The command makes a few requests without waits; the limit is this long because
/// the machine may be loaded.
const EXIT_LIMIT: Duration = Duration::from_secs(90);

/// A running command, killed on drop.
pub struct CfqProcess {
    child: Child,
    output_file: PathBuf,
    command_line: String,
}

impl CfqProcess {
    /// Starts `cfq ARGS` in `home` against the API at `url`; its output goes to a file in `home`.
    pub fn start(home: &Path, args: &[&str], url: &str) -> Self {
        let output_file = home.join("output");
        let mut command = Command::new(tokio::task::block_in_place(binary::cfq));
        let out = std::fs::File::create(&output_file).unwrap();
        command.args(args).current_dir(home).stdin(Stdio::null()).stderr(out.try_clone().unwrap()).stdout(out);
        command.env("CFQ_DATA", home.join("data")).env("CFQ_CONFIG", home.join("config"));
        command.env("CFQ_URL", url).env("CFQ_TOKEN", TOKEN);
        kill_with_parent(&mut command);
        Self { child: command.spawn().unwrap(), output_file, command_line: format!("cfq {args:?}") }
    }

    /// The command's standard output and standard error so far, in the order in which they were written.
    pub fn output(&self) -> String {
        String::from_utf8_lossy(&std::fs::read(&self.output_file).unwrap()).into_owned()
    }

    /// Waits until the command ends.
    pub async fn wait_for_exit(&mut self) -> ExitStatus {
        let what = format!("{} to end", self.command_line);
        wait::until(&what, EXIT_LIMIT, || {
            let done = self.child.try_wait().unwrap();
            let output = self.output();
            async move { done.ok_or_else(|| format!("still running; output: {output:?}")) }
        })
        .await
    }
}

impl Drop for CfqProcess {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
