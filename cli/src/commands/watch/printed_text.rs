//! What a watch has printed of the text of a call, so that repeated text is printed once.

use std::borrow::Cow;
use std::ops::Range;

use cfq_proto::http::TokensData;
use cfq_proto::ids::JobId;

/// The printed part of a job's text. An attempt that resumes a lost attempt sends the job's text again from the
/// beginning.
#[derive(Debug, Default)]
pub struct PrintedText {
    job: Option<JobId>,
    /// Offset of `text` in the job's output, in bytes.
    from: u64,
    text: String,
}

impl PrintedText {
    /// Whether the text is that of this job.
    pub fn is_of(&self, job: JobId) -> bool {
        self.job == Some(job)
    }

    /// Returns the part of the frame that was not printed yet, and a separator to print before it: a note that text is
    /// missing, or that a new attempt generates different text, else empty.
    pub fn take_new_text<'a>(&mut self, tokens: &'a TokensData) -> (&'static str, Cow<'a, str>) {
        let new = tokens.text.as_str();
        if self.job != Some(tokens.job) {
            *self = Self { job: Some(tokens.job), from: tokens.offset, text: new.to_owned() };
            return ("", new.into());
        }
        let printed = self.from + self.text.len() as u64;
        if tokens.offset > printed {
            *self = Self { from: tokens.offset, text: new.to_owned(), ..*self };
            return (" [...] ", new.into());
        }
        let overlap = self.from.max(tokens.offset)..printed.min(tokens.offset + new.len() as u64);
        let same = overlap.is_empty()
            || new.as_bytes().get(relative(&overlap, tokens.offset))
                == self.text.as_bytes().get(relative(&overlap, self.from));
        if !same && tokens.offset >= self.from {
            // The new attempt has written this frame and what was equal before it, which is printed again.
            let equal = relative(&(self.from..tokens.offset), self.from);
            let text = self.text.get(equal).unwrap_or_default().to_owned() + new;
            self.text.clone_from(&text);
            return ("\n[a new attempt generates different text]\n", text.into());
        }
        if tokens.offset < self.from {
            *self = Self { from: tokens.offset, text: new.to_owned(), ..*self };
            return (if same { " [...] " } else { "\n[a new attempt generates different text]\n" }, new.into());
        }
        let rest = usize::try_from(printed - tokens.offset).ok().and_then(|at| new.get(at..)).unwrap_or("");
        self.text.push_str(rest);
        ("", rest.into())
    }
}

/// Converts a byte range of the job's output to a range of a text that starts at offset `start` of that output.
fn relative(bytes: &Range<u64>, start: u64) -> Range<usize> {
    let at = |byte: u64| usize::try_from(byte.saturating_sub(start)).unwrap_or(usize::MAX);
    at(bytes.start)..at(bytes.end)
}

#[cfg(test)]
mod tests {
    use cfq_proto::job::JobRole;

    use super::*;

    fn frame(attempt: i32, offset: u64, text: &str) -> TokensData {
        let job = "018f4a5e-0000-7000-8000-000000000001".parse().unwrap();
        TokensData { job, attempt, role: JobRole::Alpha, offset, text: text.to_owned() }
    }

    #[test]
    fn repeated_text_is_printed_once_and_changed_text_again() {
        let mut printed = PrintedText::default();
        let other = TokensData { job: "018f4a5e-0000-7000-8000-000000000002".parse().unwrap(), ..frame(1, 0, "hm") };
        let seen: Vec<_> = [
            (frame(1, 0, "def ä"), ("", "def ä")),
            (frame(1, 6, "dd"), ("", "dd")),
            // The node was lost: the next attempt sends the text from the beginning, in larger pieces.
            (frame(2, 0, "def äd"), ("", "")),
            (frame(2, 7, "d(a"), ("", "(a")),
            (frame(2, 14, "b)"), (" [...] ", "b)")),
            (frame(3, 14, "c)"), ("\n[a new attempt generates different text]\n", "c)")),
            (frame(4, 0, "def"), (" [...] ", "def")),
            (frame(4, 3, ""), ("", "")),
            // A lost attempt: the next one begins equally and continues differently.
            (frame(5, 3, " f"), ("", " f")),
            (frame(6, 0, "de"), ("", "")),
            (frame(6, 2, "x g"), ("\n[a new attempt generates different text]\n", "dex g")),
            (other, ("", "hm")),
        ]
        .into();
        for (tokens, (separator, text)) in &seen {
            assert_eq!(printed.take_new_text(tokens), (*separator, Cow::from(*text)), "{tokens:?}");
        }
    }
}
