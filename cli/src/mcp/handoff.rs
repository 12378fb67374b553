//! `final_handoff_archive`.

use cfq_proto::ids::TaskKey;

use super::access::Access;
use super::arguments::FinalHandoffArchive;
use super::error::ToolError;
use super::replies::{ArchivedFiles, HandoffArchive};
use super::submission::absolute;
use crate::archive::{self, Manifest};

/// Path of the archives over HTTP, without the task.
pub const ARCHIVES: &str = "/mcp/archives";

/// The URL at which a caller downloads the archive of a task. `server` is the root URL that the caller uses.
fn archive_url(server: &str, task: TaskKey, audit: bool) -> String {
    let query = if audit { "" } else { "?audit=false" };
    format!("{server}{ARCHIVES}/{task}{query}")
}

/// `final_handoff_archive`.
pub async fn make(access: &Access, arguments: FinalHandoffArchive) -> Result<HandoffArchive, ToolError> {
    let FinalHandoffArchive { session_id, include_audit, folder } = arguments;
    let client = access.client()?;
    match access {
        Access::Local { cache, .. } => {
            let folder = match &folder {
                Some(folder) => absolute("folder", folder)?,
                // Of the callers that name none.
                None => cache.join("archives"),
            };
            let target = |packed: &archive::Packed| folder.join(packed.file_name());
            let written = archive::write(&client, session_id.0, include_audit, target).await?;
            let place = Place { file: Some(written.file.to_string_lossy().into_owned()), url: None };
            Ok(reply(place, written.bytes, written.sha256, written.manifest))
        }
        Access::Http { .. } if folder.is_some() => {
            Err(ToolError::argument("folder", "is not available over HTTP: leave it out, and download the archive"))
        }
        Access::Http { url, .. } => {
            let packed = archive::pack_task(&client, session_id.0, include_audit).await?;
            let url = archive_url(url, session_id.0, include_audit);
            let place = Place { file: None, url: Some(url) };
            Ok(reply(place, packed.bytes.len() as u64, packed.sha256, packed.manifest))
        }
    }
}

/// Where the caller gets the archive.
struct Place {
    file: Option<String>,
    url: Option<String>,
}

fn reply(Place { file, url }: Place, bytes: u64, sha256: String, manifest: Manifest) -> HandoffArchive {
    HandoffArchive {
        file,
        url,
        bytes,
        sha256,
        ended: manifest.state.is_terminal(),
        best_iteration: manifest.best_iteration,
        untrusted_content: ArchivedFiles { files: manifest.files },
    }
}
