//! Word wrapping of text that arrives in pieces. Rows after the first are indented. The last row stays open and is
//! redrawn in place; a row is returned as complete once it cannot change any more.

use console::measure_text_width;

/// Minimum columns of text in a row, on a terminal that is narrower than the indentation.
const MIN_TEXT_COLUMNS: usize = 8;
const TAB: &str = "    ";

#[derive(Debug)]
pub struct WrappedText {
    /// Prefix of the open row, that is, the last row, which is not complete.
    prefix: String,
    /// Prefix of every row after the first.
    indent: String,
    open: String,
}

impl WrappedText {
    pub fn new(prefix: impl Into<String>, indent: impl Into<String>) -> Self {
        Self { prefix: prefix.into(), indent: indent.into(), open: String::new() }
    }

    /// Appends `text`, whose only control characters are line ends and tabs. Returns the rows that it completes, none
    /// wider than `width` columns.
    pub fn push(&mut self, text: &str, width: usize) -> Vec<String> {
        let mut done = Vec::new();
        for c in text.chars() {
            match c {
                '\n' => self.close(String::new(), &mut done),
                '\t' => self.open.push_str(TAB),
                c => self.open.push(c),
            }
            let columns = width.saturating_sub(measure_text_width(&self.prefix)).max(MIN_TEXT_COLUMNS);
            while measure_text_width(&self.open) > columns {
                let rest = self.split_overflow();
                self.close(rest, &mut done);
            }
        }
        done
    }

    /// Returns the open row with its prefix.
    pub fn open_row(&self) -> String {
        format!("{}{}", self.prefix, self.open)
    }

    /// Ends the text. Returns the last row, unless it is blank.
    pub fn finish(self) -> Option<String> {
        (!self.open.trim().is_empty()).then(|| self.open_row())
    }

    fn close(&mut self, rest: String, done: &mut Vec<String>) {
        done.push(self.open_row().trim_end().to_owned());
        self.prefix.clone_from(&self.indent);
        self.open = rest;
    }

    /// Splits off the part of the open row that does not fit: the last word, or the last character if one word fills
    /// the row.
    fn split_overflow(&mut self) -> String {
        let words = self.open.trim_end();
        let indentation = words.len() - words.trim_start().len();
        let at = match words.rfind(' ').filter(|at| *at > indentation) {
            Some(space) => space + 1,
            None => words.char_indices().next_back().map_or(0, |(at, _)| at),
        };
        self.open.split_off(at.max(1).min(self.open.len()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(pieces: &[&str], width: usize) -> Vec<String> {
        let mut rows = WrappedText::new("a | ", "  | ");
        let mut done: Vec<String> = pieces.iter().flat_map(|p| rows.push(p, width)).collect();
        done.extend(rows.finish());
        done
    }

    #[test]
    fn rows_break_between_words() {
        assert_eq!(all(&["one two th", "ree four"], 14), ["a | one two", "  | three four"]);
        assert_eq!(all(&["x = 1\n", "\n", "y\n"], 14), ["a | x = 1", "  |", "  | y"]);
    }

    #[test]
    fn long_words_are_split_and_wide_characters_count_twice() {
        assert_eq!(all(&["abcdefghijklmnopqrstuvw"], 14), ["a | abcdefghij", "  | klmnopqrst", "  | uvw"]);
        assert_eq!(all(&["日本語日本語"], 14), ["a | 日本語日本", "  | 語"]);
        assert_eq!(all(&["        abcdef"], 14), ["a |         ab", "  | cdef"]);
    }

    #[test]
    fn rows_fit_the_terminal_and_only_blanks_are_lost() {
        let text = "def is_even(n):\n\treturn n % 2 == 0  # zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich 🦊\n";
        for width in 12..90 {
            let rows = all(&[text], width);
            assert!(rows.iter().all(|r| measure_text_width(r) <= width), "{width}: {rows:?}");
            let letters = |s: &str| s.chars().filter(|c| !c.is_whitespace()).collect::<String>();
            let kept: String = rows.iter().map(|r| letters(r.split_once('|').unwrap().1)).collect();
            assert_eq!(kept, letters(text), "{width}");
        }
    }

    #[test]
    fn open_row_is_returned_once_its_line_ends() {
        let mut rows = WrappedText::new("a | ", "  | ");
        assert!(rows.push("one", 14).is_empty());
        assert_eq!(rows.open_row(), "a | one");
        assert_eq!(rows.push("\n", 14), ["a | one"]);
        assert_eq!(rows.finish(), None);
    }
}
