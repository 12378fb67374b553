//! The archive of a task: its specification, results, reviews, decisions and events in one file, for a hand-off or for
//! keeping after `cfq gc`. The same task in the same state gives the same bytes.

use std::path::{Component, Path, PathBuf};

use anyhow::Context;
use cfq_agent_runner::workstream::file_bytes;
use cfq_deploy::files::write_private;
use cfq_proto::blob::BlobHash;
use cfq_proto::client::Client;
use cfq_proto::http::TaskDetail;
use cfq_proto::ids::{TaskId, TaskKey};
use cfq_proto::loop_step::Artifact;
use cfq_proto::task::TaskState;
use schemars::JsonSchema;
use serde::Serialize;

/// Version of the archive's layout.
use crate::file_diffs::encode_diff;

const FORMAT: u32 = 1;
/// Name of the list of files. It is the first entry of the archive.
const MANIFEST: &str = "manifest.json";
const ZSTD_LEVEL: i32 = 9;

/// What an archive contains, with checksums.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct Manifest {
    /// Version of the archive's layout.
    pub format: u32,
    /// Version of cfq that wrote the archive.
    pub cfq_version: String,
    /// Id of the task.
    pub session_id: TaskId,
    /// Number of the task, as in t42.
    pub task: String,
    /// State of the task when the archive was made.
    pub state: TaskState,
    /// Iteration whose files are below `result/`; absent if no iteration has a usable result.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub best_iteration: Option<u32>,
    /// All files of the archive but the manifest, in order.
    pub files: Vec<ManifestFile>,
}

/// A file of an archive.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct ManifestFile {
    /// Path in the archive.
    pub path: String,
    /// Size in bytes.
    pub bytes: u64,
    /// SHA-256 of the content, in hexadecimal.
    pub sha256: String,
}

/// A written archive.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Archived {
    /// Path of the file.
    pub file: PathBuf,
    /// Size of the file in bytes.
    pub bytes: u64,
    /// SHA-256 of the file, in hexadecimal.
    pub sha256: String,
    /// What it contains.
    pub manifest: Manifest,
}

/// Files of an archive, in order: path and content.
type Files = Vec<(String, Vec<u8>)>;

/// An archive in memory.
#[derive(Debug)]
pub struct Packed {
    /// The archive.
    pub bytes: Vec<u8>,
    /// SHA-256 of the archive, in hexadecimal.
    pub sha256: String,
    /// What it contains.
    pub manifest: Manifest,
}

impl Packed {
    /// A name for the file. The number alone is not unique: a user may delete the data folder and begin again with t1.
    pub fn file_name(&self) -> String {
        format!("{}-{}.tar.zst", self.manifest.task, self.manifest.session_id)
    }
}

/// Writes the archive of a task to the file that `target` names for it, whole or not at all. `audit` adds the events.
pub async fn write(
    client: &Client,
    task: TaskKey,
    audit: bool,
    target: impl FnOnce(&Packed) -> PathBuf,
) -> anyhow::Result<Archived> {
    let packed = pack_task(client, task, audit).await?;
    let file = target(&packed);
    let written = tokio::task::spawn_blocking(move || -> anyhow::Result<Archived> {
        write_file(&file, &packed.bytes)?;
        Ok(Archived { file, bytes: packed.bytes.len() as u64, sha256: packed.sha256, manifest: packed.manifest })
    });
    written.await.context("the archive was not written")?
}

/// Makes the archive of a task. `audit` adds the events.
pub async fn pack_task(client: &Client, task: TaskKey, audit: bool) -> anyhow::Result<Packed> {
    let detail = client.task(task).await?;
    let key = TaskKey::Id(detail.summary.id);
    let mut artifacts = Vec::with_capacity(detail.iterations.len());
    for iteration in &detail.iterations {
        artifacts.extend(client.artifacts(key, Some(iteration.iteration)).await?.artifacts.pop());
    }
    let events = if audit { Some(client.events(key, 0).await?) } else { None };
    let packed = tokio::task::spawn_blocking(move || -> anyhow::Result<Packed> {
        let mut files = task_files(&detail, &artifacts)?;
        if let Some(events) = events {
            files.push(("audit/events.json".to_owned(), pretty_json(&events)?));
            files.push(("audit/events.yaml".to_owned(), serde_saphyr::to_string(&events)?.into_bytes()));
        }
        let manifest = manifest(&detail, &files);
        files.insert(0, (MANIFEST.to_owned(), pretty_json(&manifest)?));
        let bytes = pack(&files, detail.summary.updated_at)?;
        let sha256 = BlobHash::of(&bytes).as_str().to_owned();
        Ok(Packed { bytes, sha256, manifest })
    });
    packed.await.context("the archive was not made")?
}

/// The files that do not depend on the events.
fn task_files(detail: &TaskDetail, artifacts: &[Artifact]) -> anyhow::Result<Files> {
    let mut files = vec![
        ("task.json".to_owned(), pretty_json(detail)?),
        ("task.yaml".to_owned(), serde_saphyr::to_string(&detail.spec)?.into_bytes()),
    ];
    if let Some(best) = artifacts.iter().find(|artifact| Some(artifact.iteration) == detail.best_iteration) {
        files.push(("result.diff".to_owned(), encode_diff(&best.diff, &best.windows_1252_in_diff).into_owned()));
        for file in &best.files {
            // A removed file appears only in the diff.
            if let (Some(path), Some(bytes)) = (path_below("result", &file.path), file_bytes(file)?) {
                files.push((path, bytes.into_owned()));
            }
        }
    }
    for artifact in artifacts {
        let folder = format!("iterations/{}", artifact.iteration);
        files.push((format!("{folder}/artifact.json"), pretty_json(artifact)?));
        files.push((
            format!("{folder}/artifact.diff"),
            encode_diff(&artifact.diff, &artifact.windows_1252_in_diff).into_owned(),
        ));
        let iteration = detail.iterations.iter().find(|iteration| iteration.iteration == artifact.iteration);
        if let Some(review) = iteration.and_then(|iteration| iteration.review.as_ref()) {
            files.push((format!("{folder}/review.json"), pretty_json(review)?));
        }
    }
    Ok(files)
}

/// The path of a model's file in the archive; `None` for a path that would leave the folder when it is unpacked.
fn path_below(folder: &str, path: &str) -> Option<String> {
    let is_plain = !path.is_empty() && Path::new(path).components().all(|part| matches!(part, Component::Normal(_)));
    is_plain.then(|| format!("{folder}/{path}"))
}

fn manifest(detail: &TaskDetail, files: &Files) -> Manifest {
    let entry = |(path, content): &(String, Vec<u8>)| ManifestFile {
        path: path.clone(),
        bytes: content.len() as u64,
        sha256: BlobHash::of(content).as_str().to_owned(),
    };
    Manifest {
        format: FORMAT,
        cfq_version: env!("CARGO_PKG_VERSION").to_owned(),
        session_id: detail.summary.id,
        task: detail.summary.number.to_string(),
        state: detail.summary.state,
        best_iteration: detail.best_iteration,
        files: files.iter().map(entry).collect(),
    }
}

fn pretty_json<T: Serialize>(value: &T) -> serde_json::Result<Vec<u8>> {
    let mut text = serde_json::to_vec_pretty(value)?;
    text.push(b'\n');
    Ok(text)
}

/// The files as a compressed tar archive. Their times are that of the task's last change.
fn pack(files: &Files, changed_at: f64) -> std::io::Result<Vec<u8>> {
    let mut archive = tar::Builder::new(zstd::Encoder::new(Vec::new(), ZSTD_LEVEL)?);
    for (path, content) in files {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(0o644);
        header.set_mtime(changed_at.max(0.0) as u64);
        archive.append_data(&mut header, path, content.as_slice())?;
    }
    archive.into_inner()?.finish()
}

/// Writes the file whole or not at all. Only its owner may read it, because it holds source code.
fn write_file(file: &Path, bytes: &[u8]) -> anyhow::Result<()> {
    // A file name alone has an empty parent, which names no folder.
    let file = std::path::absolute(file)?;
    let folder = file.parent().context("the path names no file")?;
    std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    Ok(write_private(&file, bytes, None)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packed_files_are_read_again_and_equal_files_give_equal_bytes() {
        let long = format!("result/{}/a.py", "folder/".repeat(30));
        let files = vec![("manifest.json".to_owned(), b"{}".to_vec()), (long, vec![7; 100_000])];
        let packed = pack(&files, 1_700_000_000.9).unwrap();
        assert_eq!(packed, pack(&files, 1_700_000_000.2).unwrap());
        let mut archive = tar::Archive::new(zstd::Decoder::new(packed.as_slice()).unwrap());
        let read = archive.entries().unwrap().map(|entry| {
            let mut entry = entry.unwrap();
            let mut content = Vec::new();
            std::io::Read::read_to_end(&mut entry, &mut content).unwrap();
            (entry.path().unwrap().to_str().unwrap().to_owned(), content)
        });
        assert_eq!(read.collect::<Files>(), files);
    }

    #[test]
    fn path_that_would_leave_the_folder_is_left_out() {
        assert_eq!(path_below("result", "src/a.py").as_deref(), Some("result/src/a.py"));
        for path in ["", "/etc/passwd", "../a.py", "src/../../a.py", "."] {
            assert_eq!(path_below("result", path), None, "{path:?}");
        }
    }
}
