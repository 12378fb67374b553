//! Logs of a test cluster's services: for failure messages, and to find panics.

use std::path::{Path, PathBuf};

use cfq_proto::http::TaskDetail;

use super::Cluster;

impl Cluster {
    /// Path of a service's log file.
    pub fn log(&self, service: &str) -> PathBuf {
        self.file(&format!("{service}.log"))
    }

    /// The task's state and the last lines of every log, for the failure message of a test.
    pub(super) fn diagnostics(&self, detail: &TaskDetail) -> String {
        let logs: Vec<String> = self.services().map(|s| format!("--- {s}\n{}", tail(&self.log(s)))).collect();
        format!("{:?} {:?}\njobs {:#?}\n{}", detail.summary, detail.reason, detail.jobs, logs.join("\n"))
    }

    /// Asserts that no service panicked, except at a failpoint that the test configured.
    pub(super) fn assert_no_panics(&self) {
        for service in self.services() {
            let text = std::fs::read_to_string(self.log(service)).unwrap_or_default();
            // The panic's message is on the line after its location.
            let messages = text.lines().skip(1).chain([""]);
            let armed = |message: &str| message.starts_with("a panic at the armed failpoint");
            let panics = text.lines().zip(messages).filter(|(l, m)| l.contains("panicked at") && !armed(m)).count();
            assert_eq!(panics, 0, "{service} panicked:\n{}", tail(&self.log(service)));
        }
    }
}

/// The last 25 lines of a file.
pub fn tail(path: &Path) -> String {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(25)..].join("\n")
}
