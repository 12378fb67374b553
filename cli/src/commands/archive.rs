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
    let default = |number| PathBuf::from(format!("{number}.tar.zst"));
    let archived =
        archive::write(client, task, audit, |detail| file.unwrap_or_else(|| default(detail.summary.number))).await?;
    out.print(&archived, |archived| {
        let files = output::count(archived.manifest.files.len(), "file");
        format!("wrote {}: {files}, {} bytes, sha256 {}", archived.file.display(), archived.bytes, archived.sha256)
    })?;
    out.status("list its files: tar --zstd -tf FILE");
    Ok(Code::Done)
}
