//! Lines of a view, in the width and the colours of a terminal; whole and without colours in a pipe.

use super::{indent_rest, one_line, sanitize};

/// A line of a view.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    pub text: String,
    pub tone: Tone,
    fit: Fit,
}

/// What a line says, which decides its colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tone {
    Plain,
    Heading,
    Good,
    Bad,
    /// A human is needed.
    NeedsUser,
    /// Ended without a result.
    Faint,
}

/// How a line is shown on a terminal that is narrower.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fit {
    /// Its end is left out: a row of a table.
    Cut,
    /// It continues below, indented by this number of columns; `None`: as the line suggests.
    Wrap { indent: Option<usize> },
    /// The terminal wraps it, so that it can be copied in one piece: a command.
    Whole,
}

impl Tone {
    /// The tone of the first line of a view.
    pub fn or_heading(self) -> Self {
        if self == Self::Plain { Self::Heading } else { self }
    }
}

impl Line {
    /// A row of a table.
    pub fn row(text: impl Into<String>, tone: Tone) -> Self {
        Self { text: text.into(), tone, fit: Fit::Cut }
    }

    /// A line of text, or a command if it begins with one.
    pub fn new(text: impl Into<String>, tone: Tone) -> Self {
        let text = text.into();
        let fit = if is_command(&text) { Fit::Whole } else { Fit::Wrap { indent: None } };
        Self { text, tone, fit }
    }

    /// The rows of the line on a terminal of this width.
    fn rows(&self, columns: Option<usize>) -> Vec<String> {
        let text = sanitize(&self.text);
        // A terminal shows a tab in up to eight columns.
        let text = if columns.is_some() { text.replace('\t', "    ") } else { text };
        let row = |text: &str| match (columns, self.fit) {
            (None, _) | (_, Fit::Whole) => vec![text.to_owned()],
            (Some(columns), Fit::Cut) => vec![console::truncate_str(text, columns.max(1), "…").into_owned()],
            (Some(columns), Fit::Wrap { .. }) if console::measure_text_width(text) <= columns => vec![text.to_owned()],
            (Some(columns), Fit::Wrap { indent }) => {
                let is_text = self.tone == Tone::Plain;
                wrap(text, columns, indent.unwrap_or_else(|| hanging_indent(text, columns, is_text)))
            }
        };
        text.split('\n').flat_map(row).collect()
    }
}

/// Whether the text is a command that the user can copy, such as `cfq ls`.
fn is_command(text: &str) -> bool {
    let after = ["cfq ", "git "].iter().find_map(|program| text.trim_start().strip_prefix(program));
    after.is_some_and(|after| after.starts_with(|c: char| c.is_ascii_lowercase() || c == '-'))
}

/// The line in rows of at most `columns` columns; those after the first are indented. A word is never broken, so that a
/// path or a name can be copied, and neither is a command in backquotes.
fn wrap(text: &str, columns: usize, indent: usize) -> Vec<String> {
    let indent = indent.min(columns / 2);
    let (mut rows, mut row) = (Vec::new(), String::new());
    // Width of the row, and whether it has a word.
    let (mut width, mut has_word) = (0, false);
    for word in words(text) {
        let word_width = console::measure_text_width(word.trim_end_matches(' '));
        let is_space = word_width == 0;
        if has_word && width + word_width > columns {
            rows.push(row.trim_end().to_owned());
            (row, width, has_word) = (" ".repeat(indent), indent, false);
        }
        // Several spaces between two words are not a part of the next row.
        if !is_space || has_word || rows.is_empty() {
            row += word;
            width += word_width + (word.len() - word.trim_end_matches(' ').len());
            has_word |= !is_space;
        }
    }
    rows.push(row.trim_end().to_owned());
    rows
}

/// The words of a text, each with a space after it. A command in backquotes is one word, and so is a command after a
/// colon, with the rest of the line.
fn words(text: &str) -> Vec<&str> {
    let mut words: Vec<&str> = Vec::new();
    let (mut start, mut is_quoted) = (0, false);
    // The last character that is no space.
    let mut last = ' ';
    for (at, c) in text.char_indices() {
        match c {
            // A single backquote is only a character.
            '`' if is_quoted || text.get(at + 1..).is_some_and(|rest| rest.contains('`')) => is_quoted = !is_quoted,
            ' ' if !is_quoted => {
                words.extend(text.get(start..=at));
                start = at + 1;
                let is_command_next = |rest: &str| !rest.starts_with(' ') && is_command(rest);
                if last == ':' && text.get(start..).is_some_and(is_command_next) {
                    break;
                }
            }
            _ => {}
        }
        if c != ' ' {
            last = c;
        }
    }
    words.extend(text.get(start..).filter(|rest| !rest.is_empty()));
    words
}

/// Indentation of the rows after the first one: below the text that follows a label with two spaces after it, else two
/// columns more than the line. A line of a text that is not indented continues without indentation.
fn hanging_indent(text: &str, columns: usize, is_text: bool) -> usize {
    let content = text.trim_start_matches(' ');
    let indentation = text.len() - content.len();
    let label = content.find("  ").map(|end| {
        let (label, rest) = content.split_at(end);
        indentation + console::measure_text_width(label) + rest.len() - rest.trim_start_matches(' ').len()
    });
    // A label that takes too much room is a part of the text.
    let without_label = if indentation == 0 && is_text { 0 } else { indentation + 2 };
    label.filter(|start| *start <= columns * 2 / 5).unwrap_or(without_label)
}

/// The lines of a view of something whose texts come from users, models and nodes: a line break in such a text does not
/// begin a line that looks like cfq's own.
#[derive(Debug, Default)]
pub struct View {
    pub lines: Vec<Line>,
}

impl View {
    pub fn push(&mut self, text: impl AsRef<str>) {
        self.push_toned(Tone::Plain, text);
    }

    pub fn push_toned(&mut self, tone: Tone, text: impl AsRef<str>) {
        self.lines.push(Line::new(indent_rest(text.as_ref()), tone));
    }

    /// Adds a line that continues below after `indent` columns.
    pub fn push_hanging(&mut self, tone: Tone, indent: usize, text: impl AsRef<str>) {
        let fit = Fit::Wrap { indent: Some(indent) };
        self.lines.push(Line { text: indent_rest(text.as_ref()), tone, fit });
    }

    pub fn push_blank(&mut self) {
        self.push("");
    }

    /// Adds a table, whose rows are cut.
    pub fn push_table(&mut self, header: &[&str], rows: &[Vec<String>]) {
        let rows: Vec<Vec<String>> = rows.iter().map(|row| row.iter().map(|cell| one_line(cell)).collect()).collect();
        self.lines.extend(table(header, &rows).lines().map(|row| Line::row(row, Tone::Plain)));
    }

    /// Adds a command after a label. If both do not fit beside each other, the command is below the label, in one piece.
    pub fn push_command(&mut self, label: &str, command: &str, columns: Option<usize>) {
        let both = format!("{label}{command}");
        let fit = Fit::Whole;
        if columns.is_none_or(|columns| console::measure_text_width(&both) <= columns) {
            return self.lines.push(Line { text: both, tone: Tone::Plain, fit });
        }
        self.push(label.trim_end());
        let indentation = label.len() - label.trim_start().len() + 2;
        self.lines.push(Line { text: format!("{:indentation$}{command}", ""), tone: Tone::Plain, fit });
    }

    /// Adds a text with its own indentation, below four more columns, so that none of its lines looks like one of cfq.
    pub fn push_verbatim(&mut self, text: &str) {
        let fit = Fit::Wrap { indent: Some(4) };
        let line = |line: &str| Line { text: format!("    {line}"), tone: Tone::Plain, fit };
        self.lines.extend(text.lines().map(line));
    }
}

/// The lines of a table in columns or of a list, which are cut at the width of the terminal.
pub fn rows(lines: impl IntoIterator<Item = String>, tones: impl IntoIterator<Item = Tone>) -> Vec<Line> {
    lines.into_iter().zip(tones).map(|(text, tone)| Line::row(text, tone)).collect()
}

/// A line between two views.
pub fn blank_line(is_needed: bool) -> Vec<Line> {
    if is_needed { vec![Line::new("", Tone::Plain)] } else { Vec::new() }
}

/// The lines of a text without colours, wrapped at the width of the terminal.
pub fn plain_lines(text: &str) -> Vec<Line> {
    text.lines().map(|line| Line::new(line, Tone::Plain)).collect()
}

/// The lines as rows of at most `columns` columns, except commands and long words.
fn wrapped_lines(lines: &[Line], columns: Option<usize>) -> Vec<Line> {
    in_rows(lines, columns, Fit::Whole)
}

/// The lines as rows, each of which takes one row of the terminal.
pub fn cut_rows(lines: &[Line], columns: usize) -> Vec<Line> {
    in_rows(lines, Some(columns), Fit::Cut)
}

fn in_rows(lines: &[Line], columns: Option<usize>, fit: Fit) -> Vec<Line> {
    let row = |line: &Line, text: String| Line { text, tone: line.tone, fit };
    lines.iter().flat_map(|line| line.rows(columns).into_iter().map(|text| row(line, text))).collect()
}

/// The lines as one text: sanitized, in the width of a terminal, and coloured if the terminal shows colours.
pub fn paint(lines: &[Line], columns: Option<usize>, is_coloured: bool) -> String {
    let paint = |line: Line| {
        let style = console::Style::new().force_styling(true);
        let style = match line.tone {
            _ if !is_coloured => return line.text,
            Tone::Plain => return line.text,
            Tone::Heading => style.bold(),
            Tone::Good => style.green(),
            Tone::Bad => style.red(),
            Tone::NeedsUser => style.yellow(),
            Tone::Faint => style.dim(),
        };
        style.apply_to(line.text).to_string()
    };
    wrapped_lines(lines, columns).into_iter().map(paint).collect::<Vec<_>>().join("\n")
}

/// A table whose columns are as wide as their widest cell, without trailing spaces.
pub fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let mut widths: Vec<usize> = header.iter().map(|h| h.len()).collect();
    for row in rows {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(console::measure_text_width(cell));
        }
    }
    let render = |cells: Vec<&str>| {
        let mut text = String::new();
        for (i, cell) in cells.iter().enumerate() {
            text.push_str(cell);
            if i + 1 < cells.len() {
                let pad = widths[i].saturating_sub(console::measure_text_width(cell)) + 2;
                text.push_str(&" ".repeat(pad));
            }
        }
        text.trim_end().to_owned()
    };
    let mut lines = vec![render(header.to_vec())];
    lines.extend(rows.iter().map(|row| render(row.iter().map(String::as_str).collect())));
    lines.join("\n")
}

/// A column of a table.
#[derive(Debug, Clone, Copy)]
pub struct Column {
    pub name: &'static str,
    /// The columns with the highest number are left out first on a narrow terminal; those with 0 never.
    pub expendable: u8,
}

/// Minimum width of the last column of a table, for which others are left out.
const MIN_LAST_COLUMN: usize = 24;

/// A table as in [`table`], with those columns of which enough fit beside each other, so that the last one has a usable
/// width.
pub fn fitted_table(columns: &[Column], rows: &[Vec<String>], terminal: Option<usize>) -> Vec<String> {
    let width = |n: usize| {
        let cells = rows.iter().filter_map(|row| row.get(n)).map(|cell| console::measure_text_width(cell));
        cells.chain([columns[n].name.len()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns.len()).map(width).collect();
    let mut shown: Vec<usize> = (0..columns.len()).collect();
    if let Some(terminal) = terminal {
        let needed = |shown: &[usize]| -> usize {
            let before = shown.split_last().map_or(0, |(_, rest)| rest.iter().map(|n| widths[*n] + 2).sum());
            before + shown.last().map_or(0, |last| widths[*last].min(MIN_LAST_COLUMN))
        };
        while needed(&shown) > terminal {
            let least = shown.iter().copied().filter(|n| columns[*n].expendable > 0);
            let Some(least) = least.max_by_key(|n| columns[*n].expendable) else { break };
            shown.retain(|n| *n != least);
        }
    }
    let header: Vec<&str> = shown.iter().map(|n| columns[*n].name).collect();
    let select = |row: &Vec<String>| shown.iter().map(|n| row.get(*n).cloned().unwrap_or_default()).collect();
    let rows: Vec<Vec<String>> = rows.iter().map(select).collect();
    table(&header, &rows).split('\n').map(str::to_owned).collect()
}

/// A list of columns (each with its [`Column::expendable`]) that fits the terminal, with a tone for each row.
pub fn list_lines(
    columns: &[(&'static str, u8)],
    cells: &[Vec<String>],
    tones: impl IntoIterator<Item = Tone>,
    terminal: Option<usize>,
) -> Vec<Line> {
    let columns: Vec<Column> =
        columns.iter().map(|(name, expendable)| Column { name, expendable: *expendable }).collect();
    rows(fitted_table(&columns, cells, terminal), [Tone::Heading].into_iter().chain(tones))
}

/// The view on terminals of 40, 80 and 120 columns, in a pipe, and with colours: what the snapshots of the views contain.
/// A colour changes no character.
#[cfg(test)]
#[track_caller]
pub fn at_widths(view: impl Fn(Option<usize>) -> Vec<Line>) -> String {
    let mut text = String::new();
    for columns in [40, 80, 120] {
        let lines = view(Some(columns));
        let plain = paint(&lines, Some(columns), false);
        let coloured = paint(&lines, Some(columns), true);
        assert_eq!(console::strip_ansi_codes(&coloured), plain);
        for line in wrapped_lines(&lines, Some(columns)) {
            let width = console::measure_text_width(&line.text);
            let is_one_word = words(line.text.trim()).len() == 1;
            let is_whole = is_one_word || is_command(&line.text);
            assert!(width <= columns || is_whole, "{width} columns: {}", line.text);
        }
        text += &format!("--- {columns} columns\n{plain}\n");
    }
    text += &format!("--- pipe\n{}\n", paint(&view(None), None, false));
    let coloured = paint(&view(Some(80)), Some(80), true).replace('\u{1b}', "ESC");
    text + &format!("--- 80 columns with colours\n{coloured}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wide_lines_are_cut() {
        let lines =
            ["TASK  TITLE", "t1    a longer title", "t2    名前の長い題"].map(|row| Line::row(row, Tone::Plain));
        assert_eq!(paint(&lines, Some(12), false), "TASK  TITLE\nt1    a lon…\nt2    名前…");
    }

    #[test]
    fn colours_are_added_around_sanitized_text() {
        let lines = [Line::row("t1 \u{1b}[2J", Tone::Bad), Line::row("t2", Tone::Plain)];
        assert_eq!(paint(&lines, None, true), "\u{1b}[31mt1 <U+001B>[2J\u{1b}[0m\nt2");
    }

    #[test]
    fn narrow_table_leaves_columns_out() {
        let column = |name, expendable| Column { name, expendable };
        let columns = [column("TASK", 0), column("LOOP", 2), column("PRIO", 1), column("TITLE", 0)];
        let row = vec!["t1".to_owned(), "generating".to_owned(), "P2".to_owned(), "x".repeat(40)];
        let header = |terminal| fitted_table(&columns, std::slice::from_ref(&row), terminal)[0].clone();
        assert_eq!(header(None), "TASK  LOOP        PRIO  TITLE");
        assert_eq!(header(Some(48)), "TASK  LOOP        PRIO  TITLE");
        assert_eq!(header(Some(47)), "TASK  PRIO  TITLE");
        assert_eq!(header(Some(20)), "TASK  TITLE");
    }

    #[test]
    fn columns_are_aligned_without_trailing_spaces() {
        let text =
            table(&["TASK", "STATE"], &[vec!["t1".into(), "merged".into()], vec!["t1234".into(), "ready".into()]]);
        assert_eq!(text, "TASK   STATE\nt1     merged\nt1234  ready");
    }

    #[test]
    fn text_is_wrapped_below_its_label_and_commands_are_not() {
        let shown = |text: &str, columns| paint(&plain_lines(text), Some(columns), false);
        assert_eq!(shown("  reason      a word and another", 32), "  reason      a word and another");
        assert_eq!(
            shown("  now       waits for free capacity on a node", 36),
            "  now       waits for free capacity\n            on a node"
        );
        // A label that leaves no room is a part of the text.
        assert_eq!(shown("  reason      a word and", 22), "  reason      a word\n    and");
        assert_eq!(shown("one two three", 8), "one two\nthree");
        assert_eq!(shown("    cfq resolve t1 --action abort", 20), "    cfq resolve t1 --action abort");
        assert_eq!(shown("cfq 0.1.0 is ready", 12), "cfq 0.1.0 is\nready");
        assert_eq!(shown("in a_path_without_any_space", 10), "in\na_path_without_any_space");
        assert_eq!(shown("run `cfq ls -w` or `x", 12), "run\n`cfq ls -w`\nor `x");
        assert_eq!(shown("50 of 104, next: cfq ls --after 8", 20), "50 of 104, next:\ncfq ls --after 8");
        // An indentation that leaves no room is not continued.
        let deep = format!("{}one two three four", " ".repeat(60));
        assert_eq!(shown(&deep, 20).lines().nth(1), Some("          two three"));
    }
}
