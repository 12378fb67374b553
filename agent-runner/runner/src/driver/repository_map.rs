//! The repository map of a task's prompts.

use std::sync::Arc;

use cfq_repo_map::RepoMap;

use super::port::TaskPort;
use super::task_driver::{ActionError, TaskDriver};
use crate::pipeline::{MAX_MAP_TIME, map_request};
use crate::workstream::{RepoMapReply, StopCondition, symbols_folder};

impl<P: TaskPort> TaskDriver<P> {
    /// Returns the map that the prompts of this task show. A driver makes it once, so that the prompts begin alike and a
    /// node finds that beginning in its prefix cache. `None` for a review, because the author of the change chose its
    /// description, if the map cannot be made in time, and once a prompt was too long for a model's context.
    pub(super) async fn repository_map(&mut self) -> Result<Option<Arc<RepoMap>>, ActionError> {
        if self.spec.review.is_some() {
            return Ok(None);
        }
        if let Some(map) = &self.map {
            return Ok(map.clone());
        }
        let (mirror, base) = (self.prepare_mirror().await?, self.base()?);
        let (spec, repositories) = (self.spec.clone(), self.repositories.clone());
        let _turn = mirror.map_turn().lock_owned().await;
        self.port.record_progress();
        let limit = (self.repository_time_limit() / 2).min(4 * MAX_MAP_TIME);
        let (stop, _cancel) = StopCondition::after(limit);
        let made = tokio::task::spawn_blocking(move || {
            let folder = mirror.path();
            // The cache is removed together with the mirror.
            let cache_dir = symbols_folder(folder)
                .map_err(|error| format!("cannot create a folder in {}: {error}", folder.display()))?;
            let parse_within = MAX_MAP_TIME.min(limit / 2);
            let request = map_request(&spec, (folder.to_owned(), &base.commit), cache_dir, parse_within);
            repositories.repo_map(request, &stop).map_err(|error| error.with_causes())
        });
        let map = match made.await? {
            Ok(RepoMapReply::Map { map, .. }) => Some(Arc::new(map)),
            Ok(RepoMapReply::Unfinished { parsed, files }) => {
                tracing::info!(task = %self.number, parsed, files, "the prompts have no repository map: files are not parsed yet");
                None
            }
            Ok(RepoMapReply::Refused { reason }) | Err(reason) => {
                tracing::warn!(task = %self.number, reason, "the prompts have no repository map");
                None
            }
        };
        self.port.record_progress();
        Ok(self.map.insert(map).clone())
    }
}
