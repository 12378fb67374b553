//! Server-sent events of a task's feed.

use super::Frame;

/// Parser of server-sent events, which end with a blank line. Comments (keep-alives) and unknown event names are
/// skipped.
#[derive(Default)]
pub(super) struct SseBuffer {
    bytes: Vec<u8>,
}

impl SseBuffer {
    pub(super) fn push(&mut self, chunk: &[u8]) {
        self.bytes.extend(chunk.iter().filter(|b| **b != b'\r'));
    }

    pub(super) fn next_frame(&mut self) -> Option<Result<Frame, serde_json::Error>> {
        loop {
            let end = self.bytes.windows(2).position(|w| w == b"\n\n")?;
            let block: Vec<u8> = self.bytes.drain(..end + 2).collect();
            let text = String::from_utf8_lossy(&block);
            let mut name = "message";
            let mut data = String::new();
            for line in text.lines() {
                if let Some(value) = line.strip_prefix("event:") {
                    name = value.trim();
                } else if let Some(value) = line.strip_prefix("data:") {
                    data.push_str(value.strip_prefix(' ').unwrap_or(value));
                }
            }
            match name {
                "event" => return Some(serde_json::from_str(&data).map(|e| Frame::Event(Box::new(e)))),
                "tokens" => return Some(serde_json::from_str(&data).map(Frame::Tokens)),
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_span_chunks_and_comments_are_skipped() {
        let mut buffer = SseBuffer::default();
        buffer.push(b": keep-alive\n\nevent: tok");
        assert!(buffer.next_frame().is_none());
        buffer.push(b"ens\ndata: {\"job\":\"0190b4b1-0000-7000-8000-000000000000\",\"attempt\":1,\"role\":\"alpha\",\"offset\":0,\"text\":\"hi\"}\n\n");
        let Some(Ok(Frame::Tokens(tokens))) = buffer.next_frame() else { panic!("a frame") };
        assert_eq!(tokens.text, "hi");
        assert!(buffer.next_frame().is_none());
    }
}
