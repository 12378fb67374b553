//! `cfq archive TASK`

use std::path::PathBuf;

use cfq_proto::client::Client;
use cfq_proto::ids::TaskKey;

use crate::archive;
use crate::exit::Code;
use crate::output::{self, Output};

pub async fn run(
    client: &Client,
    out: Output,
    task: TaskKey,
    file: Option<PathBuf>,
    audit: bool,
) -> anyhow::Result<Code> {
    let target =
        |packed: &archive::Packed| file.unwrap_or_else(|| PathBuf::from(format!("{}.tar.zst", packed.manifest.task)));
    let archived = archive::write(client, task, audit, target).await?;
    out.print(&archived, |archived| {
        let files = output::count(archived.manifest.files.len(), "file");
        format!("wrote {}: {files}, {} bytes, sha256 {}", archived.file.display(), archived.bytes, archived.sha256)
    })?;
    let name = output::shell_word(&archived.file.to_string_lossy());
    out.status(&format!("list its files: tar --zstd -tf {name}"));
    Ok(Code::Done)
}
