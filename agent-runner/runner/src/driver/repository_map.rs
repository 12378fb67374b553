//! The repository map of a task's prompts.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::port::TaskPort;
use super::task_driver::{ActionError, TaskDriver};
use crate::pipeline::{RepositoryMap, map_request};
use crate::workstream::{RepoMapReply, StopCondition};

/// Maximum time in which files are parsed for a map. What is parsed is kept for the next task.
const PARSE_WITHIN: Duration = Duration::from_secs(15);
/// Folder in a mirror with the symbols of its files.
const SYMBOLS_FOLDER: &str = "symbols";

impl<P: TaskPort> TaskDriver<P> {
    /// The map that the prompts of this task show. It is made once, because the prompts of a task must begin alike: a node
    /// reuses the part that it has computed. `None` for a review, whose description the user did not write, and if the map
    /// cannot be made in time.
    pub(super) async fn repository_map(&mut self) -> Result<Option<Arc<RepositoryMap>>, ActionError> {
        if self.spec.review.is_some() {
            return Ok(None);
        }
        if let Some(map) = &self.map {
            return Ok(map.clone());
        }
        let (mirror, base) = (self.prepare_mirror().await?, self.base()?);
        let (spec, repositories) = (self.spec.clone(), self.repositories.clone());
        let limit = self.repository_time_limit() / 2;
        let (stop, _cancel) = StopCondition::after(limit);
        let made = tokio::task::spawn_blocking(move || {
            let cache_dir = symbols_folder(mirror.path())?;
            let request =
                map_request(&spec, (mirror.path().to_owned(), &base.commit), cache_dir, PARSE_WITHIN.min(limit / 2));
            repositories.repo_map(request, &stop).map_err(|error| error.with_causes())
        });
        let map = match made.await? {
            Ok(RepoMapReply::Map { map, .. }) => Some(Arc::new(RepositoryMap::from(map))),
            Ok(RepoMapReply::Unfinished { parsed, files }) => {
                tracing::info!(task = %self.number, parsed, files, "the prompts have no repository map: too many new files");
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

/// The folder of a mirror's symbols; it is created. It ends with the mirror.
fn symbols_folder(mirror: &Path) -> Result<std::path::PathBuf, String> {
    let folder = mirror.join(SYMBOLS_FOLDER);
    match std::fs::create_dir(&folder) {
        Err(error) if error.kind() != std::io::ErrorKind::AlreadyExists => {
            Err(format!("cannot create {}: {error}", folder.display()))
        }
        _ => Ok(folder),
    }
}
