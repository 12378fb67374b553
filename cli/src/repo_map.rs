//! Maps of the user's repositories, made in a child process. The symbols of their files are kept in the cache folder.

use std::path::{Path, PathBuf};
use std::time::Duration;

use cfq_agent_runner::workstream::{self, CancelGuard, RepoMapReply, RepoMapRequest, StartPointRequest, StopCondition};
use cfq_repo_map::MapRequest;

use crate::{exit, repo};

/// Maximum length of a map if the user names none, in tokens: what a client of MCP shows its model without a warning.
pub const DEFAULT_TOKENS: u32 = 8_000;
/// Least maximum: a map needs room for some paths.
pub const MIN_TOKENS: u32 = 256;
/// Largest maximum: the context of the models with the longest one.
pub const MAX_TOKENS: u32 = 256_000;

/// Time beyond that for parsing in which the process has to end.
const PROCESS_END_MARGIN: Duration = Duration::from_secs(60);

/// The condition under which a call of [`make`] is stopped, even if it does not end by itself.
pub fn stop_after(parse_within: Duration) -> (StopCondition, CancelGuard) {
    StopCondition::after(parse_within.saturating_add(PROCESS_END_MARGIN))
}

/// Makes a map of the repository that contains `dir`, which the user named with `option`. `base` is a commit, branch
/// or tag, HEAD if absent. Stops after `parse_within`; a later call continues.
pub fn make(
    (option, dir): (&str, &Path),
    base: Option<&str>,
    map: MapRequest,
    cache: &Path,
    parse_within: Duration,
    stop: &StopCondition,
) -> anyhow::Result<RepoMapReply> {
    let dir = repo::existing_folder(option, dir)?;
    let cache_dir = symbols_folder(cache)?;
    let request = RepoMapRequest {
        start: StartPointRequest { dir: dir.clone(), base: base.map(str::to_owned), context_files: Vec::new() },
        map,
        cache_dir,
        parse_within_ms: parse_within.as_millis().try_into().unwrap_or(u64::MAX),
    };
    let reply = repo::access()?.repo_map(request, stop).map_err(|error| repo::not_usable(option, &dir, error))?;
    match reply {
        RepoMapReply::Refused { reason } => Err(exit::usage(reason)),
        reply => Ok(reply),
    }
}

/// The folder of the symbols in the cache folder.
pub fn symbols_folder(cache: &Path) -> anyhow::Result<PathBuf> {
    let folder = std::fs::create_dir_all(cache).and_then(|()| workstream::symbols_folder(cache));
    folder.map_err(|error| {
        let cache = cache.display();
        exit::usage(format!(
            "cannot use the cache folder {cache}: {error}; set CFQ_CACHE to a folder that you can write"
        ))
    })
}
