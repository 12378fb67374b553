//! Converts tokens into text that can be sent to readers: it contains whole characters only and no part of a stop
//! string.
//!
//! A token may end within a character, and a stop string may begin in one token and end in another. Bytes are withheld
//! as long as they could be part of an incomplete character or of a stop string; text that was returned is never
//! retracted.

/// The effect of one more token on the text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TextDelta {
    /// Text that is final now; often empty.
    pub text: String,
    /// Whether a stop string was found; the text ends before it.
    pub stopped: bool,
}

/// Incremental decoder of UTF-8 that stops at stop strings.
#[derive(Debug)]
pub struct TextStream {
    stops: Vec<Vec<u8>>,
    /// Bytes that have not been returned yet.
    withheld: Vec<u8>,
    stopped: bool,
}

impl TextStream {
    /// Creates a stream that ends before the first occurrence of one of `stops` in the text; empty stop strings are
    /// ignored.
    pub fn new(stops: &[String]) -> Self {
        let stops = stops.iter().filter(|s| !s.is_empty()).map(|s| s.clone().into_bytes()).collect();
        Self { stops, withheld: Vec::new(), stopped: false }
    }

    /// Appends a token's bytes. After a stop string it returns empty deltas.
    pub fn push(&mut self, bytes: &[u8]) -> TextDelta {
        if self.stopped {
            return TextDelta { text: String::new(), stopped: true };
        }
        self.withheld.extend_from_slice(bytes);
        if let Some(at) = self.stops.iter().filter_map(|stop| find(&self.withheld, stop)).min() {
            self.withheld.truncate(at);
            self.stopped = true;
            return TextDelta { text: self.finish(), stopped: true };
        }
        let safe = self.withheld.len() - self.partial_stop_len();
        let whole = whole_characters_len(&self.withheld[..safe]);
        let text = String::from_utf8_lossy(&self.withheld[..whole]).into_owned();
        self.withheld.drain(..whole);
        TextDelta { text, stopped: false }
    }

    /// Ends the stream and returns the withheld text. Invalid UTF-8 becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.withheld).into_owned();
        self.withheld.clear();
        text
    }

    /// Length of the longest suffix of the withheld bytes that is a proper prefix of a stop string.
    fn partial_stop_len(&self) -> usize {
        let longest = |stop: &Vec<u8>| {
            let max = stop.len().saturating_sub(1).min(self.withheld.len());
            (1..=max).rev().find(|n| self.withheld.ends_with(&stop[..*n])).unwrap_or(0)
        };
        self.stops.iter().map(longest).max().unwrap_or(0)
    }
}

/// Offset of the first occurrence of `part` in `text`; `part` must not be empty.
fn find(text: &[u8], part: &[u8]) -> Option<usize> {
    text.windows(part.len()).position(|window| window == part)
}

/// Length of `bytes` without an incomplete UTF-8 character (up to three bytes) at the end.
fn whole_characters_len(bytes: &[u8]) -> usize {
    for back in 1..=bytes.len().min(3) {
        let at = bytes.len() - back;
        let length = match bytes[at] {
            0xf0..=0xf7 => 4,
            0xe0..=0xef => 3,
            0xc0..=0xdf => 2,
            // A continuation byte; the first byte of its character is before it.
            0x80..=0xbf => continue,
            _ => 1,
        };
        return if length > back { at } else { bytes.len() };
    }
    bytes.len()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn run(stops: &[&str], pieces: &[&[u8]]) -> (String, bool) {
        let stops: Vec<String> = stops.iter().map(|s| (*s).to_owned()).collect();
        let mut stream = TextStream::new(&stops);
        let mut text = String::new();
        for piece in pieces {
            let got = stream.push(piece);
            text.push_str(&got.text);
            if got.stopped {
                return (text, true);
            }
        }
        text.push_str(&stream.finish());
        (text, false)
    }

    #[test]
    fn stop_string_may_span_tokens() {
        assert_eq!(run(&["```\n"], &[b"a``", b"`", b"\nrest"]), ("a".into(), true));
        assert_eq!(run(&["END", "x"], &[b"EN", b"Ax"]), ("ENA".into(), true));
        assert_eq!(run(&["END"], &[b"EN"]), ("EN".into(), false));
        assert_eq!(run(&[""], &[b"ab"]), ("ab".into(), false));
    }

    #[test]
    fn incomplete_characters_are_withheld() {
        let mut stream = TextStream::new(&[]);
        let smile = "🙂".as_bytes();
        assert_eq!(stream.push(&smile[..1]).text, "");
        assert_eq!(stream.push(&smile[1..3]).text, "");
        assert_eq!(stream.push(&smile[3..]).text, "🙂");
        assert_eq!(run(&[], &[&[0xff, b'a', 0xe2]]), ("\u{fffd}a\u{fffd}".into(), false));
    }

    proptest! {
        #[test]
        fn text_does_not_depend_on_token_boundaries(text in "[ab🙂é]{0,30}", stop in "[ab🙂]{1,3}", cuts in proptest::collection::vec(1usize..5, 1..40)) {
            let expected = match text.find(&stop) {
                Some(at) => (text[..at].to_owned(), true),
                None => (text.clone(), false),
            };
            let mut left = text.as_bytes();
            let mut pieces: Vec<&[u8]> = Vec::new();
            for cut in cuts.iter().cycle() {
                if left.is_empty() { break; }
                let (head, tail) = left.split_at((*cut).min(left.len()));
                pieces.push(head);
                left = tail;
            }
            prop_assert_eq!(run(&[&stop], &pieces), expected);
        }
    }
}
