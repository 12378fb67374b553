//! The first prompt of a task, before it is submitted.

use cfq_convergence::History;
use cfq_proto::job::ChatMessage;
use cfq_proto::task::{Agent, TaskSpec};
use cfq_repo_map::RepoMap;

use super::artifact::reply_target;
use crate::pipeline::{Budget, PromptError, PromptSources, creator_prompt, max_tokens};
use crate::policy_files::ServerPolicies;
use crate::workstream::{GitError, Mirror, Snapshot};

/// Why the first prompt cannot be shown.
#[derive(Debug, thiserror::Error)]
pub enum FirstPromptError {
    /// The commit cannot be read.
    #[error(transparent)]
    Git(#[from] GitError),
    /// The prompt cannot be written.
    #[error(transparent)]
    Prompt(#[from] PromptError),
}

/// Returns the prompt of the first call of a task: that of the creator, within the budget of its first try. The mirror
/// has the commit `base`, `map` is its map, and `server_policies` are those of this server.
///
/// # Errors
/// [`FirstPromptError`].
pub fn first_prompt(
    spec: &TaskSpec,
    mirror: &Mirror,
    base: &str,
    map: Option<&RepoMap>,
    server_policies: &ServerPolicies,
) -> Result<Vec<ChatMessage>, FirstPromptError> {
    let repository = mirror.repository()?;
    let base = PromptSources { snapshot: Snapshot::of(&repository, base)?, map, server_policies };
    let history = History::default();
    let budget = Budget::first(max_tokens(Agent::Alpha, spec.agents.of(Agent::Alpha)));
    Ok(creator_prompt(spec, &history, &reply_target(spec, &history, &base.snapshot), &base, &budget)?)
}
