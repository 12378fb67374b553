//! Parts of a reply's body: events of a stream, lines with one JSON value each, or the whole body.
//!
//! Endpoints are not trusted: the size of each part is limited, so that a part without an end is an error and cannot fill
//! the memory.

use super::sse::{EventParser, EventTooLong};

/// Maximum size of a line, in bytes. The line of one token has a few hundred bytes.
const MAX_LINE_BYTES: usize = 4 << 20;

/// A part exceeds its maximum size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub(super) enum PartTooLong {
    #[error(transparent)]
    Event(#[from] EventTooLong),
    #[error("one line is longer than {MAX_LINE_BYTES} bytes")]
    Line,
    #[error("its reply is longer than {max_bytes} bytes")]
    Body { max_bytes: usize },
}

/// Splits the body of a reply into parts.
#[derive(Debug)]
pub(super) enum Parts {
    /// Server-sent events.
    Events(EventParser),
    /// Lines, as in <https://github.com/ndjson/ndjson-spec>; the field is the begun line.
    Lines(Vec<u8>),
    /// One part, which ends with the body.
    Whole { body: Vec<u8>, max_bytes: usize },
}

impl Parts {
    /// Processes the next bytes. Returns the parts that they complete.
    pub(super) fn push(&mut self, bytes: &[u8]) -> Result<Vec<Vec<u8>>, PartTooLong> {
        match self {
            Self::Events(events) => Ok(events.push(bytes)?.into_iter().map(String::into_bytes).collect()),
            Self::Lines(line) => {
                let mut done = Vec::new();
                for piece in bytes.split_inclusive(|b| *b == b'\n') {
                    line.extend_from_slice(piece);
                    if line.len() > MAX_LINE_BYTES {
                        return Err(PartTooLong::Line);
                    }
                    if piece.ends_with(b"\n") {
                        done.extend(non_empty(std::mem::take(line)));
                    }
                }
                Ok(done)
            }
            Self::Whole { body, max_bytes } => {
                body.extend_from_slice(bytes);
                match body.len() > *max_bytes {
                    true => Err(PartTooLong::Body { max_bytes: *max_bytes }),
                    false => Ok(Vec::new()),
                }
            }
        }
    }

    /// The part that the end of the body completes.
    pub(super) fn finish(self) -> Option<Vec<u8>> {
        match self {
            Self::Events(events) => events.finish().map(String::into_bytes),
            Self::Lines(line) => non_empty(line),
            Self::Whole { body, .. } => Some(body),
        }
    }
}

fn non_empty(line: Vec<u8>) -> Option<Vec<u8>> {
    (!line.trim_ascii().is_empty()).then_some(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(parts: impl IntoIterator<Item = Vec<u8>>) -> Vec<String> {
        parts.into_iter().map(|part| String::from_utf8(part).unwrap()).collect()
    }

    #[test]
    fn lines_end_at_line_ends_wherever_the_chunks_end() {
        let mut parts = Parts::Lines(Vec::new());
        assert!(parts.push(b"{\"a\"").unwrap().is_empty());
        assert_eq!(texts(parts.push(b":1}\r\n\n{\"b\":2}\n{").unwrap()), ["{\"a\":1}\r\n", "{\"b\":2}\n"]);
        assert_eq!(texts(parts.finish()), ["{"]);
    }

    #[test]
    fn part_without_an_end_is_an_error() {
        let mut lines = Parts::Lines(Vec::new());
        let chunk = vec![b'x'; 1 << 20];
        let read = (0..5).find_map(|_| lines.push(&chunk).err());
        assert_eq!(read, Some(PartTooLong::Line));
        let mut whole = Parts::Whole { body: Vec::new(), max_bytes: 3 };
        assert_eq!(whole.push(b"123").unwrap(), Vec::<Vec<u8>>::new());
        assert_eq!(whole.push(b"4").unwrap_err(), PartTooLong::Body { max_bytes: 3 });
    }
}
