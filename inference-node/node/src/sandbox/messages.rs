//! Messages between the node and a child process: JSON, each after its length as a little-endian `u32`.

use std::io::{self, Read, Write};
use std::path::PathBuf;

use cfq_engine::{HeaderError, ModelFacts, PromptRequest, PromptTokens};
use cfq_proto::job::JobFailure;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

/// Maximum size of a child's message, in bytes. A prompt of a million tokens takes 8 MB.
pub(super) const MAX_REPLY_BYTES: usize = 64 << 20;
/// Size of a message's length, in bytes.
pub(super) const LENGTH_BYTES: usize = size_of::<u32>();

/// A message to a child.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Order {
    /// The first message.
    Start {
        path: PathBuf,
        memory_bytes: u64,
        prompt_ms: u64,
    },
    Tokenize(PromptRequest),
}

/// A child's reply; every message to it has one.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Reply {
    /// The file was read. `protection` lists what limits the child besides its resources.
    Started {
        facts: ModelFacts,
        protection: Vec<String>,
    },
    /// The file cannot be used; the child ends.
    File {
        fault: FileFault,
        detail: String,
    },
    Tokens(PromptTokens),
    Failed(JobFailure),
}

/// Why a model's file cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileFault {
    /// The file is missing, cut off or corrupt.
    Unreadable,
    /// The file is valid, but this version cannot run the model.
    Unsupported,
}

impl From<&HeaderError> for FileFault {
    fn from(error: &HeaderError) -> Self {
        match error {
            HeaderError::Open { .. }
            | HeaderError::SpecialFile { .. }
            | HeaderError::NotGguf { .. }
            | HeaderError::Corrupt { .. } => Self::Unreadable,
            HeaderError::Unsupported { .. } => Self::Unsupported,
        }
    }
}

/// The bytes of a message, with its length.
pub(super) fn encode(message: &impl Serialize) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; LENGTH_BYTES];
    serde_json::to_writer(&mut bytes, message)?;
    let length = u32::try_from(bytes.len() - LENGTH_BYTES).map_err(io::Error::other)?;
    bytes[..LENGTH_BYTES].copy_from_slice(&length.to_le_bytes());
    Ok(bytes)
}

/// Writes a message.
pub(super) fn write(output: &mut impl Write, message: &impl Serialize) -> io::Result<()> {
    output.write_all(&encode(message)?)?;
    output.flush()
}

/// Reads the next message from the node; `None` at the end.
pub(super) fn read<T: DeserializeOwned>(input: &mut impl Read) -> io::Result<Option<T>> {
    let mut length = [0; LENGTH_BYTES];
    if let Err(error) = input.read_exact(&mut length) {
        return if error.kind() == io::ErrorKind::UnexpectedEof { Ok(None) } else { Err(error) };
    }
    let mut bytes = vec![0; u32::from_le_bytes(length) as usize];
    input.read_exact(&mut bytes)?;
    Ok(Some(serde_json::from_slice(&bytes)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_read_as_they_were_written() {
        let mut bytes = Vec::new();
        for path in ["/a", "/b"] {
            write(&mut bytes, &Order::Start { path: path.into(), memory_bytes: 1, prompt_ms: 2 }).unwrap();
        }
        let mut input = bytes.as_slice();
        for expected in ["/a", "/b"] {
            let Some(Order::Start { path, .. }) = read(&mut input).unwrap() else { panic!("no message") };
            assert_eq!(path.to_str(), Some(expected));
        }
        assert!(read::<Order>(&mut input).unwrap().is_none());
        assert!(read::<Order>(&mut &bytes[..bytes.len() - 1]).unwrap().is_some(), "the first one is complete");
    }
}
