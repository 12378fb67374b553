//! Parser of server-sent events, limited to the part that chat completions use: `data:` lines, ended by a blank line
//! (<https://html.spec.whatwg.org/multipage/server-sent-events.html>).
//!
//! Endpoints are not trusted: the size of an event is limited, so that an endless line is an error and cannot fill the
//! memory.

/// Maximum size of an event, in bytes. The event of one token has a few hundred bytes; the largest real events contain
/// a whole reply.
const MAX_EVENT_BYTES: usize = 4 << 20;

/// An event exceeds the maximum size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("one event is longer than {MAX_EVENT_BYTES} bytes")]
pub struct EventTooLong;

/// Incremental parser of server-sent events.
#[derive(Debug, Default)]
pub struct EventParser {
    line: Vec<u8>,
    data: String,
}

impl EventParser {
    /// Parses the next bytes. Returns the data of every event that they complete.
    ///
    /// # Errors
    /// [`EventTooLong`].
    pub fn push(&mut self, bytes: &[u8]) -> Result<Vec<String>, EventTooLong> {
        let mut done = Vec::new();
        for piece in bytes.split_inclusive(|b| *b == b'\n') {
            self.line.extend_from_slice(piece);
            if self.line.len() + self.data.len() > MAX_EVENT_BYTES {
                return Err(EventTooLong);
            }
            if piece.ends_with(b"\n") {
                self.end_line(&mut done);
            }
        }
        Ok(done)
    }

    /// Returns the data of the last event if the stream ended without the blank line after it.
    pub fn finish(mut self) -> Option<String> {
        let mut done = Vec::new();
        self.end_line(&mut done);
        if !self.data.is_empty() {
            done.push(std::mem::take(&mut self.data));
        }
        done.pop()
    }

    fn end_line(&mut self, done: &mut Vec<String>) {
        let line = String::from_utf8_lossy(&self.line).trim_end_matches(['\r', '\n']).to_owned();
        self.line.clear();
        if line.is_empty() {
            if !self.data.is_empty() {
                done.push(std::mem::take(&mut self.data));
            }
        } else if let Some(data) = line.strip_prefix("data:") {
            if !self.data.is_empty() {
                self.data.push('\n');
            }
            self.data.push_str(data.strip_prefix(' ').unwrap_or(data));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_complete_for_any_split_of_the_stream() {
        let text = b": hello\r\ndata: {\"a\":1}\r\n\r\nevent: x\ndata:two\ndata: lines\n\ndata: [DONE]\n\n";
        for cut in 1..text.len() {
            let mut events = EventParser::default();
            let mut got = events.push(&text[..cut]).unwrap();
            got.extend(events.push(&text[cut..]).unwrap());
            assert_eq!(got, ["{\"a\":1}", "two\nlines", "[DONE]"], "cut at {cut}");
        }
    }

    #[test]
    fn line_without_end_is_refused() {
        let mut events = EventParser::default();
        let garbage = vec![b'x'; 1 << 20];
        let refused = (0..8).find_map(|_| events.push(&garbage).err());
        assert_eq!(refused, Some(EventTooLong));
    }

    #[test]
    fn missing_last_blank_line_is_accepted() {
        let mut events = EventParser::default();
        assert!(events.push(b"data: a").unwrap().is_empty());
        assert_eq!(events.finish(), Some("a".to_owned()));
    }
}
