//! Download of one file into a partial file. The download continues over any number of broken connections.
//!
//! Bytes that are already in the partial file, from this process or an earlier one, are read and hashed, and the rest
//! is requested with a range request. A partial file is named by the expected checksum of the whole file, so its bytes
//! should belong to the same file; if they do not, the checksum at the end differs, and the file is fetched once more
//! from the beginning. The count of failed attempts is reset by every attempt that transfers enough, so a download over
//! an unreliable connection finishes, and a download over a dead connection fails.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use reqwest::StatusCode;
use reqwest::header::CONTENT_RANGE;

use super::client::{HubClient, HubFailure, RequestTarget};
use super::error::HubError;
use crate::models::PullProgress;
use crate::models::checksum::{Checksum, ChecksumHasher};

/// Size of the chunks in which a partial file is read, in bytes.
const READ_CHUNK_BYTES: usize = 1 << 20;

/// A file to fetch.
#[derive(Debug, Clone)]
pub(super) struct TargetFile {
    /// Path in the repository.
    pub path: String,
    pub size: u64,
    pub checksum: Checksum,
}

/// Why a file could not be fetched.
pub(super) enum TransferError {
    Hub(HubError),
    /// The hub now has different contents under this name.
    FileChanged,
}

impl From<HubError> for TransferError {
    fn from(error: HubError) -> Self {
        Self::Hub(error)
    }
}

/// Progress reports of one file.
pub(super) struct FileProgress<'a> {
    pub report: &'a mut dyn FnMut(PullProgress),
    /// Total size of the files before this one, and of all files, in bytes; `None` if the progress of this file is not
    /// reported.
    pub offset: Option<(u64, u64)>,
}

impl FileProgress<'_> {
    /// Reports that the first `have` bytes of the file are present.
    fn report_transferred(&mut self, have: u64) {
        if let Some((before, total)) = self.offset {
            (self.report)(PullProgress::Transferred { done: before + have, total });
        }
    }
}

/// Number of consecutive failed attempts, with the retry policy.
pub(super) struct Retries<'a> {
    client: &'a HubClient,
    failed: u32,
}

impl<'a> Retries<'a> {
    pub(super) fn new(client: &'a HubClient) -> Self {
        Self { client, failed: 0 }
    }

    /// Counts a failed attempt and waits before the next attempt.
    ///
    /// # Errors
    /// The error of `failure` if it is permanent, else [`HubError::RetriesExhausted`] after the last attempt.
    pub(super) async fn wait_after(
        &mut self,
        failure: HubFailure,
        report: &mut dyn FnMut(PullProgress),
    ) -> Result<(), HubError> {
        let (error, wait) = match failure {
            HubFailure::Permanent(error) => return Err(error),
            HubFailure::Retryable { error, wait } => (error, wait),
        };
        self.failed += 1;
        if self.failed >= self.client.retry.max_attempts {
            return Err(HubError::RetriesExhausted { attempts: self.failed, source: Box::new(error) });
        }
        let wait = wait.unwrap_or_else(|| self.client.retry.backoff(self.failed));
        report(PullProgress::Retrying { reason: error.to_string(), wait });
        tokio::time::sleep(wait).await;
        Ok(())
    }

    pub(super) fn reset(&mut self) {
        self.failed = 0;
    }
}

/// A partial file, and the checksum of its bytes so far.
struct PartialFile<'a> {
    file: File,
    path: &'a Path,
    have: u64,
    hasher: ChecksumHasher,
}

impl<'a> PartialFile<'a> {
    fn open(path: &'a Path, target: &TargetFile) -> Result<Self, HubError> {
        let file = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
        let file = file.map_err(file_error("write", path))?;
        let mut this = Self { file, path, have: 0, hasher: ChecksumHasher::new(&target.checksum, target.size) };
        let mut chunk = vec![0; READ_CHUNK_BYTES];
        loop {
            match this.file.read(&mut chunk).map_err(file_error("read", path))? {
                0 => break,
                n => {
                    this.hasher.update(&chunk[..n]);
                    this.have += n as u64;
                }
            }
        }
        if this.have > target.size {
            this.restart(target)?;
        }
        Ok(this)
    }

    fn restart(&mut self, target: &TargetFile) -> Result<(), HubError> {
        self.file.set_len(0).map_err(file_error("truncate", self.path))?;
        self.file.seek(SeekFrom::Start(0)).map_err(file_error("write", self.path))?;
        self.have = 0;
        self.hasher = ChecksumHasher::new(&target.checksum, target.size);
        Ok(())
    }

    fn append(&mut self, bytes: &[u8]) -> Result<(), HubError> {
        self.file.write_all(bytes).map_err(file_error("write", self.path))?;
        self.hasher.update(bytes);
        self.have += bytes.len() as u64;
        Ok(())
    }
}

pub(super) fn file_error(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> HubError {
    move |source| HubError::Io { action, path: path.to_owned(), source }
}

/// Fetches `target` into the file at `path`, verified and durable.
pub(super) async fn fetch(
    client: &HubClient,
    source: RequestTarget<'_>,
    target: &TargetFile,
    path: &Path,
    progress: &mut FileProgress<'_>,
) -> Result<(), TransferError> {
    let mut partial = PartialFile::open(path, target)?;
    progress.report_transferred(partial.have);
    let mut retries = Retries::new(client);
    let mut whole_in_one_run = partial.have == 0;
    loop {
        while partial.have < target.size {
            let before = partial.have;
            let failure = match stream(client, source, target, &mut partial, progress).await {
                Ok(()) => continue,
                Err(DownloadError::FileChanged) => return Err(TransferError::FileChanged),
                Err(DownloadError::Local(error)) => return Err(error.into()),
                Err(DownloadError::Hub(failure)) => failure,
            };
            if partial.have.saturating_sub(before) >= client.retry.stall_bytes.min(target.size / 2).max(1) {
                retries.reset();
            }
            retries.wait_after(failure, progress.report).await?;
        }
        let hasher = std::mem::replace(&mut partial.hasher, ChecksumHasher::new(&target.checksum, target.size));
        if hasher.finish() == target.checksum {
            return Ok(partial.file.sync_all().map_err(file_error("write", path))?);
        }
        if whole_in_one_run {
            drop(partial);
            std::fs::remove_file(path).map_err(file_error("remove", path))?;
            let (repo, file) = (source.repo.to_owned(), target.path.clone());
            return Err(HubError::ChecksumMismatch { repo, file }.into());
        }
        // The bytes of an earlier run may belong to another file, or be damaged by a power failure.
        let reason = format!("{} has a wrong checksum", target.path);
        (progress.report)(PullProgress::Retrying { reason, wait: Duration::ZERO });
        partial.restart(target)?;
        progress.report_transferred(0);
        whole_in_one_run = true;
    }
}

/// Why a connection ended before the end of the file.
enum DownloadError {
    /// The request failed.
    Hub(HubFailure),
    /// The hub now has different contents under this name.
    FileChanged,
    /// The partial file could not be written.
    Local(HubError),
}

impl From<HubFailure> for DownloadError {
    fn from(failure: HubFailure) -> Self {
        Self::Hub(failure)
    }
}

/// Requests the rest of a file, and appends the response to the partial file until the connection ends.
async fn stream(
    client: &HubClient,
    source: RequestTarget<'_>,
    target: &TargetFile,
    partial: &mut PartialFile<'_>,
    progress: &mut FileProgress<'_>,
) -> Result<(), DownloadError> {
    let mut answer = client.open(source, partial.have).await?;
    if answer.info.checksum.as_ref().is_some_and(|current| current.contradicts(&target.checksum)) {
        return Err(DownloadError::FileChanged);
    }
    let status = answer.response.status();
    let resumes = status == StatusCode::PARTIAL_CONTENT && {
        let range = answer.response.headers().get(CONTENT_RANGE).and_then(|v| v.to_str().ok());
        range.is_some_and(|r| r.starts_with(&format!("bytes {}-", partial.have)))
    };
    if !resumes && partial.have > 0 {
        // The server does not support ranges, or not this range: start again from the beginning. If this response
        // contains the whole file, it is used.
        partial.restart(target).map_err(DownloadError::Local)?;
        progress.report_transferred(0);
    }
    if !resumes && status != StatusCode::OK {
        let error = HubError::UnexpectedStatus { status: status.as_u16(), what: target.path.clone() };
        return Err(HubFailure::retryable(error).into());
    }
    let stall_timeout = client.retry.stall_timeout();
    // Start of the current stall window, and the bytes at that time.
    let mut window = (Instant::now(), partial.have);
    while partial.have < target.size {
        let left = stall_timeout.saturating_sub(window.0.elapsed());
        let stalled = || {
            let (have, size) = (partial.have, target.size);
            DownloadError::from(HubFailure::retryable(HubError::Stalled { duration: stall_timeout, have, size }))
        };
        let chunk = match tokio::time::timeout(left, answer.response.chunk()).await {
            Err(_) => return Err(stalled()),
            Ok(Err(source)) => {
                let (have, size) = (partial.have, target.size);
                let error = HubError::ConnectionBroken { have, size, source: source.without_url() };
                return Err(HubFailure::retryable(error).into());
            }
            Ok(Ok(None)) => {
                let (have, size) = (partial.have, target.size);
                return Err(HubFailure::retryable(HubError::TruncatedResponse { have, size }).into());
            }
            Ok(Ok(Some(chunk))) => chunk,
        };
        if partial.have + chunk.len() as u64 > target.size {
            let reason = "it sends more bytes than announced".to_owned();
            partial.restart(target).map_err(DownloadError::Local)?;
            return Err(
                HubFailure::retryable(HubError::UnexpectedResponse { what: target.path.clone(), reason }).into()
            );
        }
        partial.append(&chunk).map_err(DownloadError::Local)?;
        progress.report_transferred(partial.have);
        if partial.have - window.1 >= client.retry.stall_bytes {
            window = (Instant::now(), partial.have);
        }
    }
    Ok(())
}
