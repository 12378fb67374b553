//! Server-sent events, as much of them as chat completions use: `data:` lines, ended by a blank line.
//!
//! What comes from an endpoint is not trusted: a line that never ends is an error before it fills the memory.

/// Longest event taken. A token is a few hundred bytes; the largest real chunks carry a whole answer at once.
const LONGEST: usize = 4 << 20;

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("one event is longer than {LONGEST} bytes")]
pub struct TooLong;

#[derive(Debug, Default)]
pub struct Events {
    line: Vec<u8>,
    data: String,
}

impl Events {
    /// The data of every event completed by `bytes`.
    pub fn push(&mut self, bytes: &[u8]) -> Result<Vec<String>, TooLong> {
        let mut done = Vec::new();
        for piece in bytes.split_inclusive(|b| *b == b'\n') {
            self.line.extend_from_slice(piece);
            if self.line.len() + self.data.len() > LONGEST {
                return Err(TooLong);
            }
            if piece.ends_with(b"\n") {
                self.end_line(&mut done);
            }
        }
        Ok(done)
    }

    /// What an endpoint left without its closing blank line.
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
    fn events_are_whole_however_they_are_cut() {
        let text = b": hello\r\ndata: {\"a\":1}\r\n\r\nevent: x\ndata:two\ndata: lines\n\ndata: [DONE]\n\n";
        for cut in 1..text.len() {
            let mut events = Events::default();
            let mut got = events.push(&text[..cut]).unwrap();
            got.extend(events.push(&text[cut..]).unwrap());
            assert_eq!(got, ["{\"a\":1}", "two\nlines", "[DONE]"], "cut at {cut}");
        }
    }

    #[test]
    fn a_line_without_end_is_refused() {
        let mut events = Events::default();
        let garbage = vec![b'x'; 1 << 20];
        let refused = (0..8).find_map(|_| events.push(&garbage).err());
        assert_eq!(refused, Some(TooLong));
    }

    #[test]
    fn a_missing_last_blank_line_is_forgiven() {
        let mut events = Events::default();
        assert!(events.push(b"data: a").unwrap().is_empty());
        assert_eq!(events.finish(), Some("a".to_owned()));
    }
}
