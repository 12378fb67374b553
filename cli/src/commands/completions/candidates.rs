//! Values that a shell proposes. Those of the server are asked for with a short time limit; without a server there are
//! none.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;

use cfq_deploy::Paths;
use cfq_proto::client::{Client, ClientError};
use cfq_proto::http::{PrFilter, TaskQuery};
use cfq_proto::job::JobState;
use cfq_proto::pr::PrState;
use cfq_proto::task::TaskState;
use clap_complete::CompletionCandidate;

use crate::commands::logs::PROCESSES;
use crate::commands::schema;
use crate::connect;
use crate::output;

/// Maximum time for which a shell waits.
const MAX_WAIT: Duration = Duration::from_millis(800);
/// Maximum number of tasks and pull requests that are proposed, the newest ones.
const MAX_PROPOSED: u32 = 50;

/// Number of tasks, the newest ones, whose labels are proposed.
const MAX_SEARCHED: u32 = 200;

type Candidates = fn() -> Vec<CompletionCandidate>;

/// The candidates of the argument `id` of a command, whose value is called `value` in the help.
pub fn of(command: &str, id: &str, value: &str) -> Option<Candidates> {
    Some(match (command, id, value) {
        (_, "state", _) if command == "jobs" => || names(&JobState::ALL.map(JobState::as_str)),
        ("ls", "state", "PR_STATE") => || names(&PrState::ALL.map(PrState::as_str)),
        (_, "state", _) => || names(&TaskState::ALL.map(TaskState::as_str)),
        (_, "priority", _) => || names(&["P0", "P1", "P2", "P3"]),
        (_, "process", _) => || names(&PROCESSES),
        (_, "sort", _) => || names(&["newest", "oldest", "priority"]),
        ("show", "number", _) => prs,
        (_, "label", _) => labels,
        ("rm" | "pause" | "resume" | "run", "name", "NAME") => schedules,
        ("schema", "name", _) => schemas,
        (_, _, "TASK" | "TASK|JOB") | (_, "task" | "tasks", _) => tasks,
        (_, "node" | "nodes", _) | ("cordon" | "uncordon" | "drain" | "revoke", "name", _) => nodes,
        (_, "alpha" | "beta" | "model", _) | (_, _, "MODEL") => models,
        _ => return None,
    })
}

fn names(names: &[&str]) -> Vec<CompletionCandidate> {
    names.iter().map(|name| CompletionCandidate::new(*name)).collect()
}

fn described(name: impl ToString, help: &str) -> CompletionCandidate {
    let help = output::one_line(help);
    CompletionCandidate::new(name.to_string()).help(Some(help.into()))
}

fn tasks() -> Vec<CompletionCandidate> {
    ask(async |client| {
        let list = client.list_tasks(&TaskQuery { limit: MAX_PROPOSED, ..TaskQuery::default() }).await?;
        let tasks = list.tasks.iter();
        Ok(tasks.map(|task| described(task.number, &format!("{}: {}", task.state, task.title))).collect())
    })
}

fn prs() -> Vec<CompletionCandidate> {
    ask(async |client| {
        let list = client.prs(&PrFilter { limit: MAX_PROPOSED, ..PrFilter::default() }).await?;
        Ok(list.prs.iter().map(|pr| described(pr.number, &format!("{}: {}", pr.state, pr.title))).collect())
    })
}

fn labels() -> Vec<CompletionCandidate> {
    ask(async |client| {
        let list = client.list_tasks(&TaskQuery { limit: MAX_SEARCHED, ..TaskQuery::default() }).await?;
        let labels: BTreeSet<String> =
            list.tasks.iter().flat_map(|task| &task.labels).map(ToString::to_string).collect();
        Ok(labels.into_iter().map(CompletionCandidate::new).collect())
    })
}

fn schedules() -> Vec<CompletionCandidate> {
    ask(async |client| {
        let list = client.schedules().await?;
        // The shell inserts the name into the line.
        let is_name = |name: &str| name.chars().all(|c| c.is_ascii_alphanumeric() || "-_".contains(c));
        let schedules = list.schedules.iter().filter(|schedule| is_name(&schedule.name));
        Ok(schedules.map(|schedule| described(&schedule.name, &schedule.title)).collect())
    })
}

fn schemas() -> Vec<CompletionCandidate> {
    schema::names().iter().map(|schema| described(schema.name, schema.describes)).collect()
}

fn nodes() -> Vec<CompletionCandidate> {
    ask(async |client| {
        Ok(client.nodes().await?.iter().map(|node| CompletionCandidate::new(node.id.to_string())).collect())
    })
}

fn models() -> Vec<CompletionCandidate> {
    ask(async |client| {
        let nodes = client.nodes().await?;
        let models = nodes.iter().flat_map(|node| &node.ledger.models).map(|state| state.model.to_string());
        let mut models: Vec<String> = models.collect();
        models.sort_unstable();
        models.dedup();
        Ok(models.into_iter().map(CompletionCandidate::new).collect())
    })
}

/// The value of `--data` in the line that is completed.
fn data_folder(mut words: impl Iterator<Item = OsString>) -> Option<PathBuf> {
    while let Some(word) = words.next() {
        let folder = match word.to_str().and_then(|word| word.strip_prefix("--data=")) {
            Some(folder) => OsString::from(folder),
            None if word == "--data" => words.next()?,
            None => continue,
        };
        // The shell has not expanded the word yet.
        let below_home = folder.to_str().and_then(|folder| folder.strip_prefix("~/"));
        return Some(match (below_home, std::env::var_os("HOME")) {
            (Some(folder), Some(home)) => PathBuf::from(home).join(folder),
            _ => PathBuf::from(folder),
        });
    }
    None
}

/// Asks the server; nothing is proposed if it does not answer.
fn ask(
    request: impl AsyncFnOnce(&Client) -> Result<Vec<CompletionCandidate>, ClientError>,
) -> Vec<CompletionCandidate> {
    let answered = || {
        cfq_link::outbound::install_crypto();
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().ok()?;
        // Not on every press of a key over a network without encryption.
        if std::env::var("CFQ_URL").is_ok_and(|url| !connect::is_encrypted_or_local(&url)) {
            return None;
        }
        let data = match data_folder(std::env::args_os()) {
            Some(folder) => folder,
            None => Paths::from_environment().ok()?.data,
        };
        let client = connect::client(&data).ok()?;
        let answer = runtime.block_on(async { tokio::time::timeout(MAX_WAIT, request(&client)).await });
        runtime.shutdown_background();
        answer.ok()?.ok()
    };
    answered().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_folder_is_read_from_the_line() {
        let found = |words: &[&str]| data_folder(words.iter().map(OsString::from));
        assert_eq!(found(&["cfq", "--data", "/d", "show"]), Some("/d".into()));
        assert_eq!(found(&["cfq", "show", "--data=/d e"]), Some("/d e".into()));
        let home = PathBuf::from(std::env::var_os("HOME").unwrap());
        assert_eq!(found(&["cfq", "--data", "~/cfq"]), Some(home.join("cfq")));
        assert_eq!(found(&["cfq", "show", "--data"]), None);
        assert_eq!(found(&["cfq", "show"]), None);
    }
}
