//! A text file as lines that keep their line ends, so that an edit of some lines leaves the bytes of all others alone.

/// Byte order mark.
const BOM: char = '\u{feff}';

/// End of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LineEnd {
    /// The end of the file: its last line has no newline.
    None,
    Lf,
    CrLf,
}

/// One line of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Line {
    pub text: String,
    pub end: LineEnd,
}

/// A text file.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Text {
    has_bom: bool,
    pub lines: Vec<Line>,
}

impl Text {
    pub(crate) fn new(text: &str) -> Self {
        let (has_bom, text) = match text.strip_prefix(BOM) {
            Some(rest) => (true, rest),
            None => (false, text),
        };
        let lines = text.split_inclusive('\n').map(|line| match line.strip_suffix('\n') {
            None => Line { text: line.to_owned(), end: LineEnd::None },
            Some(line) => match line.strip_suffix('\r') {
                None => Line { text: line.to_owned(), end: LineEnd::Lf },
                Some(line) => Line { text: line.to_owned(), end: LineEnd::CrLf },
            },
        });
        Self { has_bom, lines: lines.collect() }
    }

    /// True if the last line ends with a newline, or there is no line.
    pub(crate) fn has_final_newline(&self) -> bool {
        self.lines.last().is_none_or(|line| line.end != LineEnd::None)
    }

    /// The most frequent line end, LF if none is.
    pub(crate) fn usual_line_end(&self) -> LineEnd {
        let crlf = self.lines.iter().filter(|line| line.end == LineEnd::CrLf).count();
        let lf = self.lines.iter().filter(|line| line.end == LineEnd::Lf).count();
        if crlf > lf { LineEnd::CrLf } else { LineEnd::Lf }
    }

    /// Gives all lines but the last one a newline, and the last one if `final_newline`.
    pub(crate) fn end_lines(&mut self, final_newline: bool, usual: LineEnd) {
        let last = self.lines.len().saturating_sub(1);
        for (n, line) in self.lines.iter_mut().enumerate() {
            match (n == last && !final_newline, line.end) {
                (true, _) => line.end = LineEnd::None,
                (false, LineEnd::None) => line.end = usual,
                (false, LineEnd::Lf | LineEnd::CrLf) => {}
            }
        }
    }

    /// Replaces the whole text. Keeps the byte order mark, the state of the last line, and the line ends: those of the
    /// unchanged lines at the beginning and at the end, and the usual one for the lines between.
    pub(crate) fn replace_all(&self, content: &str) -> Self {
        let mut new = Self::new(content);
        new.has_bom = self.has_bom;
        if self.lines.is_empty() || content.contains("\r\n") {
            return new;
        }
        let usual = self.usual_line_end();
        let equal = |(old, new): &(&Line, &Line)| old.text == new.text;
        let before = self.lines.iter().zip(&new.lines).take_while(equal).count();
        let most = self.lines.len().min(new.lines.len()) - before;
        let after = self.lines.iter().rev().zip(new.lines.iter().rev()).take(most).take_while(equal).count();
        let (count, old_count) = (new.lines.len(), self.lines.len());
        for (n, line) in new.lines.iter_mut().enumerate() {
            line.end = match () {
                () if n < before => self.lines[n].end,
                () if n >= count - after => self.lines[old_count - (count - n)].end,
                () => usual,
            };
        }
        new.end_lines(self.has_final_newline(), usual);
        new
    }
}

impl std::fmt::Display for Text {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.has_bom {
            write!(f, "{BOM}")?;
        }
        self.lines.iter().try_for_each(|line| {
            let end = match line.end {
                LineEnd::None => "",
                LineEnd::Lf => "\n",
                LineEnd::CrLf => "\r\n",
            };
            write!(f, "{}{end}", line.text)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_unchanged_by_its_lines() {
        for text in ["", "a", "a\n", "\u{feff}a\r\nb", "a\rb\n\r\n\r", "\n\n"] {
            assert_eq!(Text::new(text).to_string(), text);
        }
    }

    #[test]
    fn whole_file_keeps_the_line_ends_and_the_last_line() {
        let replaced = |old: &str, new: &str| Text::new(old).replace_all(new).to_string();
        assert_eq!(replaced("a\r\nb\r\n", "a\nc\n"), "a\r\nc\r\n");
        assert_eq!(replaced("a\r\nb\nc\r\n", "a\nb\nx\nc\n"), "a\r\nb\nx\r\nc\r\n");
        assert_eq!(replaced("a\nb", "x\nb\n"), "x\nb");
        assert_eq!(replaced("\u{feff}a\n", "b\n"), "\u{feff}b\n");
        assert_eq!(replaced("a\n", "b\r\n"), "b\r\n");
        assert_eq!(replaced("", "b\n"), "b\n");
        assert_eq!(replaced("a\n", ""), "");
    }
}
