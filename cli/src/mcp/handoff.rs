//! `final_handoff_archive`.

use std::path::PathBuf;

use cfq_proto::http::TaskDetail;

use super::access::Access;
use super::arguments::FinalHandoffArchive;
use super::error::ToolError;
use super::replies::{ArchivedFiles, HandoffArchive};
use super::submission::absolute;
use crate::archive;

/// `final_handoff_archive`.
pub async fn write(access: &Access, arguments: FinalHandoffArchive) -> Result<HandoffArchive, ToolError> {
    let folder = match &arguments.folder {
        Some(folder) => absolute("folder", folder)?,
        None => access.archives.clone(),
    };
    let client = access.client()?;
    // The number alone is not unique: a user may delete the data folder and begin again with t1.
    let target = |detail: &TaskDetail| -> PathBuf {
        folder.join(format!("{}-{}.tar.zst", detail.summary.number, detail.summary.id))
    };
    let archived = archive::write(&client, arguments.session_id.0, arguments.include_audit, target).await?;
    Ok(HandoffArchive {
        file: archived.file.to_string_lossy().into_owned(),
        bytes: archived.bytes,
        sha256: archived.sha256,
        ended: archived.manifest.state.is_terminal(),
        best_iteration: archived.manifest.best_iteration,
        untrusted_content: ArchivedFiles { files: archived.manifest.files },
    })
}
