//! Checks of the configured programs that answer prompts.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use cfq_deploy::doctor::{Check, CheckStatus};
use cfq_inference_node::CommandConfig;
use tokio::process::Command;

use crate::config::Config;
use crate::environment;

/// Longest wait for the version of a program.
const VERSION_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum length of a version, in characters.
const MAX_VERSION_CHARS: usize = 60;

/// Checks the programs of all commands, also of those that no model uses yet, at the same time.
pub async fn check(config: &Config) -> Vec<Check> {
    let commands = config.all_commands();
    futures::future::join_all(commands.iter().map(|(name, command)| check_command(name, command))).await
}

async fn check_command(name: &str, command: &CommandConfig) -> Check {
    let (status, what, next_step) = match command.find(name) {
        Ok(path) => {
            // The arguments of other programs are not known.
            let version = match command.is_coding_agent(name) {
                true => version(&path).await,
                false => None,
            };
            let version = version.map(|version| format!(", version {version}")).unwrap_or_default();
            (CheckStatus::Ok, format!("{}{version}", path.display()), None)
        }
        Err(reason) => (CheckStatus::Fail, reason, Some(command.installation(name))),
    };
    Check { name: "command".to_owned(), status, what: format!("{name}: {what}"), next_step }
}

/// The first line that the program prints for `--version`.
async fn version(program: &Path) -> Option<String> {
    let mut command = Command::new(program);
    command.arg("--version").stdin(Stdio::null()).stderr(Stdio::null()).current_dir("/").kill_on_drop(true);
    command.env_clear().envs(environment::shared(std::env::vars_os()));
    // Gemini CLI starts itself again otherwise.
    command.env("GEMINI_CLI_NO_RELAUNCH", "true");
    let output = tokio::time::timeout(VERSION_TIMEOUT, command.output()).await.ok()?.ok()?;
    let text = String::from_utf8_lossy(&output.stdout).lines().next()?.trim().chars().take(MAX_VERSION_CHARS).collect();
    Some(text).filter(|text: &String| output.status.success() && !text.is_empty())
}
