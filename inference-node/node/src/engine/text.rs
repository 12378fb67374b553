//! From tokens to text as it may be shown: whole characters only, and nothing of a stop string.
//!
//! A token may end inside a character, and a stop string may begin in one token and end in another. Bytes are held back
//! while they could still become either; what was handed out is never taken back.

/// What one more token made of the text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Text that is final now; often empty.
    pub text: String,
    /// A stop string was met: the text ended before it.
    pub stopped: bool,
}

#[derive(Debug)]
pub struct TextStream {
    stops: Vec<Vec<u8>>,
    held: Vec<u8>,
    stopped: bool,
}

impl TextStream {
    pub fn new(stops: &[String]) -> Self {
        let stops = stops.iter().filter(|s| !s.is_empty()).map(|s| s.clone().into_bytes()).collect();
        Self { stops, held: Vec::new(), stopped: false }
    }

    pub fn push(&mut self, bytes: &[u8]) -> Piece {
        if self.stopped {
            return Piece { text: String::new(), stopped: true };
        }
        self.held.extend_from_slice(bytes);
        if let Some(at) = self.stops.iter().filter_map(|stop| find(&self.held, stop)).min() {
            self.held.truncate(at);
            self.stopped = true;
            return Piece { text: self.finish(), stopped: true };
        }
        let sure = self.held.len() - self.beginning_of_a_stop();
        let whole = whole_characters(&self.held[..sure]);
        let text = String::from_utf8_lossy(&self.held[..whole]).into_owned();
        self.held.drain(..whole);
        Piece { text, stopped: false }
    }

    /// The end: what was held back and did not become a stop string. Bytes that are no character become U+FFFD.
    pub fn finish(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.held).into_owned();
        self.held.clear();
        text
    }

    /// Length of the longest end of the held bytes that begins a stop string.
    fn beginning_of_a_stop(&self) -> usize {
        let longest = |stop: &Vec<u8>| {
            let most = stop.len().saturating_sub(1).min(self.held.len());
            (1..=most).rev().find(|n| self.held.ends_with(&stop[..*n])).unwrap_or(0)
        };
        self.stops.iter().map(longest).max().unwrap_or(0)
    }
}

fn find(text: &[u8], part: &[u8]) -> Option<usize> {
    text.windows(part.len()).position(|window| window == part)
}

/// How many bytes end with a whole character: all but up to three of one that is begun and not finished.
fn whole_characters(bytes: &[u8]) -> usize {
    for back in 1..=bytes.len().min(3) {
        let at = bytes.len() - back;
        let length = match bytes[at] {
            0xf0..=0xf7 => 4,
            0xe0..=0xef => 3,
            0xc0..=0xdf => 2,
            // A continuation: its beginning is further back.
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
    fn a_stop_string_may_span_tokens() {
        assert_eq!(run(&["```\n"], &[b"a``", b"`", b"\nrest"]), ("a".into(), true));
        assert_eq!(run(&["END", "x"], &[b"EN", b"Ax"]), ("ENA".into(), true));
        assert_eq!(run(&["END"], &[b"EN"]), ("EN".into(), false));
        assert_eq!(run(&[""], &[b"ab"]), ("ab".into(), false));
    }

    #[test]
    fn characters_stay_whole() {
        let mut stream = TextStream::new(&[]);
        let smile = "🙂".as_bytes();
        assert_eq!(stream.push(&smile[..1]).text, "");
        assert_eq!(stream.push(&smile[1..3]).text, "");
        assert_eq!(stream.push(&smile[3..]).text, "🙂");
        assert_eq!(run(&[], &[&[0xff, b'a', 0xe2]]), ("\u{fffd}a\u{fffd}".into(), false));
    }

    proptest! {
        #[test]
        fn cutting_anywhere_changes_nothing(text in "[ab🙂é]{0,30}", stop in "[ab🙂]{1,3}", cuts in proptest::collection::vec(1usize..5, 1..40)) {
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
