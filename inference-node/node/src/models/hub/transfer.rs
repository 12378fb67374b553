//! One file's bytes into a partial file, however often the connection breaks.
//!
//! What is there already, from this run or from one that was killed, is read again and summed, and the rest is asked for
//! with a range. It may be trusted to be the same file, since partial files are named by the checksum they shall have; and
//! if it is not, the sum at the end says so, and the file is fetched once more from its first byte. Tries are counted
//! since the last one that brought something worth it, so that a bad line finishes and a dead one is given up.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use reqwest::StatusCode;
use reqwest::header::CONTENT_RANGE;

use super::checksum::{Checksum, Summing};
use super::client::{Client, Subject, Trouble};
use super::error::HubError;
use crate::models::Step;

/// What a file must become.
#[derive(Debug, Clone)]
pub(super) struct Target {
    pub path: String,
    pub size: u64,
    pub checksum: Checksum,
}

pub(super) enum Failed {
    Hub(HubError),
    /// The hub has another content under this name by now.
    Changed,
}

impl From<HubError> for Failed {
    fn from(error: HubError) -> Self {
        Self::Hub(error)
    }
}

/// Tries that brought nothing, in a row.
pub(super) struct Tries<'a> {
    client: &'a Client,
    in_vain: u32,
}

impl<'a> Tries<'a> {
    pub(super) fn new(client: &'a Client) -> Self {
        Self { client, in_vain: 0 }
    }

    /// Waits for the next try, unless this trouble was the last.
    pub(super) async fn after(&mut self, trouble: Trouble, report: &mut dyn FnMut(Step)) -> Result<(), HubError> {
        let (cause, wait) = match trouble {
            Trouble::Final(error) => return Err(error),
            Trouble::Again { cause, wait } => (cause, wait),
        };
        self.in_vain += 1;
        if self.in_vain >= self.client.patience.tries {
            return Err(HubError::GaveUp { tries: self.in_vain, source: Box::new(cause) });
        }
        let wait = wait.unwrap_or_else(|| self.client.patience.wait(self.in_vain));
        report(Step::Again { why: cause.to_string(), wait });
        tokio::time::sleep(wait).await;
        Ok(())
    }

    pub(super) fn brought_something(&mut self) {
        self.in_vain = 0;
    }
}

/// Bytes on disk, and their sum so far.
struct Partial<'a> {
    file: File,
    path: &'a Path,
    have: u64,
    sum: Summing,
}

impl<'a> Partial<'a> {
    fn open(path: &'a Path, target: &Target) -> Result<Self, HubError> {
        let error = failed("write", path);
        let options = OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path);
        let mut this =
            Self { file: options.map_err(error)?, path, have: 0, sum: Summing::new(&target.checksum, target.size) };
        let mut chunk = vec![0; 1 << 20];
        loop {
            match this.file.read(&mut chunk).map_err(failed("read", path))? {
                0 => break,
                n => {
                    this.sum.add(&chunk[..n]);
                    this.have += n as u64;
                }
            }
        }
        if this.have > target.size {
            this.restart(target)?;
        }
        Ok(this)
    }

    fn restart(&mut self, target: &Target) -> Result<(), HubError> {
        self.file.set_len(0).map_err(failed("shorten", self.path))?;
        self.file.seek(SeekFrom::Start(0)).map_err(failed("write", self.path))?;
        self.have = 0;
        self.sum = Summing::new(&target.checksum, target.size);
        Ok(())
    }

    fn add(&mut self, bytes: &[u8]) -> Result<(), HubError> {
        self.file.write_all(bytes).map_err(failed("write", self.path))?;
        self.sum.add(bytes);
        self.have += bytes.len() as u64;
        Ok(())
    }
}

pub(super) fn failed(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> HubError {
    move |source| HubError::File { action, path: path.to_owned(), source }
}

/// Makes `path` hold the target, checked and on disk. `report` is told the bytes of this file that are there.
pub(super) async fn fetch(
    client: &Client,
    subject: Subject<'_>,
    target: &Target,
    path: &Path,
    report: &mut dyn FnMut(Step),
    done: &mut dyn FnMut(u64) -> Step,
) -> Result<(), Failed> {
    let mut partial = Partial::open(path, target)?;
    report(done(partial.have));
    let mut tries = Tries::new(client);
    let mut whole_in_one_run = partial.have == 0;
    loop {
        while partial.have < target.size {
            let before = partial.have;
            let trouble = match stream(client, subject, target, &mut partial, report, done).await {
                Ok(()) => continue,
                Err(Ended::Changed) => return Err(Failed::Changed),
                Err(Ended::Here(error)) => return Err(error.into()),
                Err(Ended::Trouble(trouble)) => trouble,
            };
            if partial.have.saturating_sub(before) >= client.patience.stall_bytes.min(target.size / 2).max(1) {
                tries.brought_something();
            }
            tries.after(trouble, report).await?;
        }
        let sum = std::mem::replace(&mut partial.sum, Summing::new(&target.checksum, target.size)).end();
        if sum == target.checksum {
            return Ok(partial.file.sync_all().map_err(failed("write", path))?);
        }
        if whole_in_one_run {
            drop(partial);
            std::fs::remove_file(path).map_err(failed("remove", path))?;
            let (repo, file) = (subject.repo.to_owned(), target.path.clone());
            return Err(HubError::WrongBytes { repo, file }.into());
        }
        // The part that was there before may be of another file, or cut by a power failure.
        report(Step::Again { why: format!("{} is not what it should be", target.path), wait: Duration::ZERO });
        partial.restart(target)?;
        report(done(0));
        whole_in_one_run = true;
    }
}

enum Ended {
    Trouble(Trouble),
    Changed,
    Here(HubError),
}

impl From<Trouble> for Ended {
    fn from(trouble: Trouble) -> Self {
        Self::Trouble(trouble)
    }
}

/// One connection, to its end.
async fn stream(
    client: &Client,
    subject: Subject<'_>,
    target: &Target,
    partial: &mut Partial<'_>,
    report: &mut dyn FnMut(Step),
    done: &mut dyn FnMut(u64) -> Step,
) -> Result<(), Ended> {
    let mut answer = client.open(subject, partial.have).await?;
    if answer.said.checksum.as_ref().is_some_and(|said| said.contradicts(&target.checksum)) {
        return Err(Ended::Changed);
    }
    let status = answer.response.status();
    let goes_on = status == StatusCode::PARTIAL_CONTENT && {
        let range = answer.response.headers().get(CONTENT_RANGE).and_then(|v| v.to_str().ok());
        range.is_some_and(|r| r.starts_with(&format!("bytes {}-", partial.have)))
    };
    if !goes_on && partial.have > 0 {
        // Ranges are not for this server or this place in the file: from the first byte, with what it sends if it does.
        partial.restart(target).map_err(Ended::Here)?;
        report(done(0));
    }
    if !goes_on && status != StatusCode::OK {
        return Err(Trouble::again(HubError::Status { status: status.as_u16(), what: target.path.clone() }).into());
    }
    let patience = client.patience;
    let mut window = (Instant::now(), partial.have);
    while partial.have < target.size {
        let left = patience.stall().saturating_sub(window.0.elapsed());
        let stalled = || {
            let (have, size) = (partial.have, target.size);
            Ended::from(Trouble::again(HubError::Stalled { quiet: patience.stall(), have, size }))
        };
        let chunk = match tokio::time::timeout(left, answer.response.chunk()).await {
            Err(_) => return Err(stalled()),
            Ok(Err(source)) => {
                let (have, size) = (partial.have, target.size);
                return Err(Trouble::again(HubError::Broke { have, size, source: source.without_url() }).into());
            }
            Ok(Ok(None)) => {
                let (have, size) = (partial.have, target.size);
                return Err(Trouble::again(HubError::EndedEarly { have, size }).into());
            }
            Ok(Ok(Some(chunk))) => chunk,
        };
        if partial.have + chunk.len() as u64 > target.size {
            let why = "it sends more than it said".to_owned();
            partial.restart(target).map_err(Ended::Here)?;
            return Err(Trouble::again(HubError::Strange { what: target.path.clone(), why }).into());
        }
        partial.add(&chunk).map_err(Ended::Here)?;
        report(done(partial.have));
        if partial.have - window.1 >= patience.stall_bytes {
            window = (Instant::now(), partial.have);
        }
    }
    Ok(())
}
