//! What all prompts of a task show alike.

use std::sync::Arc;

use cfq_repo_map::RepoMap;

use super::port::TaskPort;
use super::task_driver::{ActionError, TaskDriver};
use crate::pipeline::PromptSources;
use crate::policy_files::ServerPolicies;
use crate::workstream::Snapshot;

/// The parts of a [`PromptSources`] that are the same in all prompts of a task.
#[derive(Debug, Clone)]
pub(super) struct SharedSources {
    map: Option<Arc<RepoMap>>,
    server_policies: Arc<ServerPolicies>,
}

impl SharedSources {
    /// Returns the sources of a prompt, with the files of the base commit.
    pub(super) fn with<'r>(&'r self, snapshot: Snapshot<'r>) -> PromptSources<'r> {
        PromptSources { snapshot, map: self.map.as_deref(), server_policies: &self.server_policies }
    }
}

impl<P: TaskPort> TaskDriver<P> {
    /// Returns the shared sources. The driver keeps them, so that all prompts begin alike and a node finds that
    /// beginning in its prefix cache.
    pub(super) async fn shared_sources(&mut self) -> Result<SharedSources, ActionError> {
        Ok(SharedSources { map: self.repository_map().await?, server_policies: self.server_policies.clone() })
    }
}
