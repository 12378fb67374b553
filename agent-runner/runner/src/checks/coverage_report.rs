//! The coverage report of a check: how many lines of the code its tests execute.
//!
//! Four formats are read, told apart by their content: LCOV's tracefile (its manual page `geninfo(1)`), XML of
//! Cobertura and JaCoCo, and Go's cover profile (`golang.org/x/tools/cover`). A report is written by code that is not
//! trusted, so its size is limited, entities are not expanded, and nothing is read outside of it.

use std::cmp::Ordering;
use std::collections::BTreeMap;

use cfq_proto::review::LineCoverage;
use quick_xml::Reader;
use quick_xml::events::{BytesStart, Event};

use super::test_report::{ReportError, attribute, invalid_at};

/// Maximum number of folders in a report of Cobertura; further ones are ignored.
const MAX_SOURCES: usize = 20;
/// Maximum number of files.
const MAX_FILES: usize = 100_000;
/// Maximum length of a path, in bytes.
const MAX_PATH_BYTES: usize = 4096;
/// Maximum number of lines, or of blocks in Go's format.
const MAX_LINES: usize = 2_000_000;

/// Lines, or statements, of the code.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct LineCount {
    /// Number of those that were executed.
    pub covered: u64,
    /// Number of all.
    pub total: u64,
}

impl From<LineCount> for LineCoverage {
    fn from(LineCount { covered, total }: LineCount) -> Self {
        Self { covered, total }
    }
}

/// The one with the larger part is greater.
impl Ord for LineCount {
    fn cmp(&self, other: &Self) -> Ordering {
        let part = |of: &Self, total: u64| u128::from(of.covered) * u128::from(total);
        part(self, other.total).cmp(&part(other, self.total)).then_with(|| self.total.cmp(&other.total))
    }
}

impl PartialOrd for LineCount {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl LineCount {
    /// Whether at least this percentage is covered. Without lines, none is missing.
    pub fn reaches(self, percent: u8) -> bool {
        u128::from(self.covered) * 100 >= u128::from(self.total) * u128::from(percent)
    }

    pub fn plus(self, other: Self) -> Self {
        Self { covered: self.covered.saturating_add(other.covered), total: self.total.saturating_add(other.total) }
    }
}

/// The counts of a report, by the paths of the files as the report has them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct CoverageReport {
    files: BTreeMap<String, LineCount>,
    /// Folders to which the paths may be relative, in Cobertura's format.
    sources: Vec<String>,
    /// Whether a path begins with the package, not with the folders above it, as in JaCoCo's format.
    by_package: bool,
}

impl CoverageReport {
    /// Reads a report. Its paths may begin with one of `folders`, in which the program ran.
    ///
    /// # Errors
    /// [`ReportError`] if it has none of the formats, is not complete, or contains no line.
    pub fn parse(bytes: &[u8], folders: &[&str]) -> Result<Self, ReportError> {
        let text = String::from_utf8_lossy(bytes);
        let mut report = match text.trim_start_matches('\u{feff}').trim_start() {
            text if text.starts_with('<') => parse_xml(text)?,
            text if text.starts_with("mode:") => parse_go(text)?,
            text => parse_lcov(text)?,
        };
        if report.total().total == 0 {
            return Err(ReportError::NoLines);
        }
        let relative = |path: String| match folders.iter().find_map(|folder| path.strip_prefix(folder)) {
            Some("") => String::new(),
            Some(rest) => rest.strip_prefix('/').map_or_else(|| path.clone(), str::to_owned),
            None => path,
        };
        report.files = report.files.into_iter().map(|(path, count)| (relative(path), count)).collect();
        report.sources = report.sources.into_iter().map(relative).collect();
        Ok(report)
    }

    /// The files, by their paths in the report.
    pub fn files(&self) -> impl Iterator<Item = (&String, LineCount)> {
        self.files.iter().map(|(path, count)| (path, *count))
    }

    /// The count of all files.
    pub fn total(&self) -> LineCount {
        self.files.values().fold(LineCount::default(), |sum, file| sum.plus(*file))
    }

    /// The count of the file at this path in the repository; `None` if the report does not have it. Without the exact
    /// path, the shortest one that ends with it counts.
    pub fn of_file(&self, path: &str) -> Option<LineCount> {
        let is_below = |long: &str, short: &str| long.strip_suffix(short).is_some_and(|folder| folder.ends_with('/'));
        let is_joined = |reported: &str| {
            let folder = path.strip_suffix(reported).and_then(|folder| folder.strip_suffix('/'));
            folder.is_some_and(|folder| self.sources.iter().any(|source| source.trim_end_matches('/') == folder))
        };
        // A path that is relative to another source is not relative to the top of the repository.
        let is_of_top = self.sources.is_empty() || self.sources.iter().any(|source| source.is_empty() || source == ".");
        let same = self.files.get(path).filter(|_| is_of_top);
        let joined = || self.files.iter().find(|(reported, _)| is_joined(reported)).map(|(_, count)| count);
        let below = || {
            let matching = self.files.iter().filter(|(reported, _)| match self.by_package {
                true => is_below(path, reported),
                false => is_below(reported, path),
            });
            matching.min_by_key(|(reported, _)| reported.len()).map(|(_, count)| count)
        };
        same.or_else(joined).or_else(below).copied()
    }

    /// Whether it has files with the extension of this path.
    pub fn has_files_like(&self, path: &str) -> bool {
        let extension = |path: &str| path.rsplit_once('.').map(|(_, extension)| extension.to_owned());
        extension(path).is_some_and(|of_path| self.files.keys().any(|file| extension(file).as_ref() == Some(&of_path)))
    }
}

/// Whether each line, or block, was executed: in several parts of a report, one of them is enough.
#[derive(Debug)]
struct Lines<K> {
    /// Number of each file, by its path.
    files: BTreeMap<String, usize>,
    lines: BTreeMap<(usize, K), LineCount>,
}

impl<K> Default for Lines<K> {
    fn default() -> Self {
        Self { files: BTreeMap::new(), lines: BTreeMap::new() }
    }
}

impl<K: Ord> Lines<K> {
    /// Number of the file at a path.
    fn file(&mut self, path: &str) -> Result<usize, ReportError> {
        let next = self.files.len();
        match self.files.get(path) {
            Some(known) => Ok(*known),
            None if path.len() > MAX_PATH_BYTES => Err(ReportError::PathTooLong(MAX_PATH_BYTES)),
            None if next >= MAX_FILES => Err(ReportError::TooManyFiles(MAX_FILES)),
            None => Ok(*self.files.entry(path.to_owned()).or_insert(next)),
        }
    }

    fn insert(&mut self, file: usize, key: K, lines: u64, is_covered: bool) -> Result<(), ReportError> {
        let line = self.lines.entry((file, key)).or_default();
        let was_covered = line.covered > 0;
        line.total = line.total.max(lines);
        if is_covered || was_covered {
            line.covered = line.total;
        }
        if self.lines.len() > MAX_LINES { Err(ReportError::TooManyLines(MAX_LINES)) } else { Ok(()) }
    }

    fn report(self) -> CoverageReport {
        let mut counts = vec![LineCount::default(); self.files.len()];
        for ((file, _), line) in self.lines {
            if let Some(count) = counts.get_mut(file) {
                *count = count.plus(line);
            }
        }
        let files = self.files.into_iter().filter_map(|(path, file)| Some((path, *counts.get(file)?)));
        CoverageReport { files: files.collect(), ..CoverageReport::default() }
    }
}

/// A number. Counters of compilers may have wrapped, so it is reduced to the limits of the type.
fn parse_number(text: &str) -> Option<u64> {
    let number: i128 = text.trim().parse().ok()?;
    Some(u64::try_from(number.max(0)).unwrap_or(u64::MAX))
}

/// `SF:FILE`, then `DA:LINE,COUNT` for each line, then `end_of_record`.
fn parse_lcov(text: &str) -> Result<CoverageReport, ReportError> {
    let mut lines = Lines::default();
    let mut file = None;
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if let Some(path) = line.strip_prefix("SF:") {
            file = Some(lines.file(path)?);
        } else if line == "end_of_record" {
            file = None;
        } else if let Some(data) = line.strip_prefix("DA:") {
            let invalid = || ReportError::InvalidLine(number);
            let file = file.ok_or_else(invalid)?;
            let mut parts = data.split(',');
            let mut next = || parts.next().and_then(parse_number).ok_or_else(invalid);
            let (line, count) = (next()?, next()?);
            lines.insert(file, line, 1, count > 0)?;
        } else if file.is_none() && !line.is_empty() && !line.starts_with("TN:") && !line.starts_with('#') {
            return Err(ReportError::NoCoverageFormat);
        }
    }
    if file.is_some() { Err(ReportError::Truncated) } else { Ok(lines.report()) }
}

/// `mode: MODE`, then `FILE:BLOCK STATEMENTS COUNT` for each block. Several packages may report one block.
fn parse_go(text: &str) -> Result<CoverageReport, ReportError> {
    let mut blocks = Lines::default();
    for (number, line) in (1..).zip(text.lines()) {
        let line = line.trim();
        if line.is_empty() || line.starts_with("mode:") {
            continue;
        }
        let mut words = line.rsplitn(3, ' ');
        let mut next = || words.next().ok_or(ReportError::InvalidLine(number));
        let (count, statements, block) = (next()?, next()?, next()?);
        let parsed = |word: &str| parse_number(word).ok_or(ReportError::InvalidLine(number));
        let (path, block) = block.rsplit_once(':').ok_or(ReportError::InvalidLine(number))?;
        let file = blocks.file(path)?;
        blocks.insert(file, block, parsed(statements)?, parsed(count)? > 0)?;
    }
    Ok(blocks.report())
}

/// XML of Cobertura or JaCoCo.
fn parse_xml(text: &str) -> Result<CoverageReport, ReportError> {
    let mut reader = Reader::from_str(text);
    let mut parser = XmlParser::default();
    loop {
        let event = reader.read_event();
        let at = reader.buffer_position();
        match event.map_err(|error| invalid_at(at, &error.to_string()))? {
            Event::Start(element) => {
                parser.open(&element).map_err(|error| error.at(at))?;
                parser.depth += 1;
            }
            Event::Empty(element) => {
                parser.open(&element).map_err(|error| error.at(at))?;
                parser.close(element.local_name().as_ref());
            }
            Event::End(element) => {
                parser.depth = parser.depth.saturating_sub(1);
                parser.close(element.local_name().as_ref());
            }
            Event::Text(text) if parser.in_source => parser.add_source(&text.xml10_content()),
            Event::Eof if parser.root.is_none() => return Err(ReportError::Empty),
            Event::Eof if parser.depth > 0 => return Err(ReportError::Truncated),
            Event::Eof => return Ok(parser.report()),
            // The formats have document types, which are not read.
            Event::DocType(_)
            | Event::Decl(_)
            | Event::PI(_)
            | Event::Comment(_)
            | Event::Text(_)
            | Event::CData(_)
            | Event::GeneralRef(_) => {}
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum XmlFormat {
    Cobertura,
    JaCoCo,
}

#[derive(Debug, Default)]
struct XmlParser {
    root: Option<XmlFormat>,
    depth: u32,
    /// The file of the open class, in Cobertura's format.
    file: usize,
    /// Lines of the files, in Cobertura's format. Those of a method are listed again below its class.
    lines: Lines<u64>,
    sources: Vec<String>,
    in_source: bool,
    /// Name of the open package, in JaCoCo's format.
    package: String,
    /// Path of the open source file, in JaCoCo's format. Its sums are the last of several.
    source_file: Option<String>,
    files: BTreeMap<String, LineCount>,
}

/// Why an element is not read.
enum ElementError {
    Invalid(String),
    Report(ReportError),
}

impl ElementError {
    fn at(self, at: u64) -> ReportError {
        match self {
            Self::Invalid(reason) => invalid_at(at, &reason),
            Self::Report(error) => error,
        }
    }
}

impl XmlParser {
    fn open(&mut self, element: &BytesStart<'_>) -> Result<(), ElementError> {
        let name = element.local_name();
        let Some(root) = self.root else {
            self.root = Some(match name.as_ref() {
                "coverage" => XmlFormat::Cobertura,
                "report" => XmlFormat::JaCoCo,
                _ => return Err(ElementError::Report(ReportError::NoCoverageFormat)),
            });
            return Ok(());
        };
        let text = |name: &str| attribute(element, name).map_err(ElementError::Invalid);
        let number = |name: &str| -> Result<u64, ElementError> {
            parse_number(&text(name)?).ok_or_else(|| ElementError::Invalid(format!("`{name}` is not a number")))
        };
        match (root, name.as_ref()) {
            (XmlFormat::Cobertura, "class") => {
                let path = text("filename")?;
                self.file = self.lines.file(&path).map_err(ElementError::Report)?;
            }
            (XmlFormat::Cobertura, "line") => {
                let (line, hits) = (number("number")?, number("hits")?);
                self.lines.insert(self.file, line, 1, hits > 0).map_err(ElementError::Report)?;
            }
            (XmlFormat::Cobertura, "source") => self.in_source = true,
            (XmlFormat::JaCoCo, "package") => self.package = text("name")?,
            (XmlFormat::JaCoCo, "sourcefile") => {
                let folder = if self.package.is_empty() { String::new() } else { format!("{}/", self.package) };
                self.source_file = Some(folder + &text("name")?);
            }
            (XmlFormat::JaCoCo, "counter") if text("type")? == "LINE" => {
                if let Some(path) = &self.source_file {
                    let (missed, covered) = (number("missed")?, number("covered")?);
                    let count = LineCount { covered, total: missed.saturating_add(covered) };
                    let file = self.files.entry(path.clone()).or_default();
                    *file = file.plus(count);
                }
            }
            _ => {}
        }
        Ok(())
    }

    fn close(&mut self, name: &str) {
        match name {
            "source" => self.in_source = false,
            "sourcefile" => self.source_file = None,
            _ => {}
        }
    }

    fn add_source(&mut self, text: &str) {
        let folder = text.trim();
        if self.sources.len() < MAX_SOURCES && folder.len() <= MAX_PATH_BYTES {
            self.sources.push(folder.to_owned());
        }
    }

    fn report(self) -> CoverageReport {
        match self.root {
            Some(XmlFormat::JaCoCo) => CoverageReport { files: self.files, by_package: true, ..Default::default() },
            Some(XmlFormat::Cobertura) | None => CoverageReport { sources: self.sources, ..self.lines.report() },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(text: &str) -> (u64, u64) {
        let count = CoverageReport::parse(text.as_bytes(), &[]).unwrap().total();
        (count.covered, count.total)
    }

    #[test]
    fn lines_of_each_format_are_counted_once() {
        // As coverage.py, lcov, c8 and cargo-llvm-cov write it.
        let lcov = "TN:\nSF:src/a.py\nFN:1,f\nDA:1,1\nDA:2,0,abc\nDA:3,7\nLF:3\nLH:2\nend_of_record\n\
                    SF:src/a.py\nDA:2,1\nend_of_record\nSF:b.py\nDA:1,0\nend_of_record\n";
        assert_eq!(count(lcov), (3, 4));
        let cobertura = r#"<?xml version="1.0" ?>
<!DOCTYPE coverage SYSTEM "http://cobertura.sourceforge.net/xml/coverage-04.dtd">
<coverage lines-valid="9" line-rate="1"><sources><source>/w</source></sources><packages><package name="."><classes>
<class name="a.py" filename="a.py"><methods><method name="f"><lines><line number="2" hits="0"/></lines></method></methods>
<lines><line number="1" hits="3"/><line number="2" hits="0"/></lines></class>
<class name="b.py" filename="b.py"><lines><line number="1" hits="1" branch="true" condition-coverage="50% (1/2)"/></lines></class>
</classes></package></packages></coverage>"#;
        assert_eq!(count(cobertura), (2, 3));
        let jacoco = r#"<?xml version="1.0"?><!DOCTYPE report PUBLIC "-//JACOCO//DTD Report 1.1//EN" "report.dtd">
<report name="x"><package name="com/p"><class name="com/p/A" sourcefilename="A.java"><counter type="LINE" missed="9" covered="9"/>
</class><sourcefile name="A.java"><line nr="1" mi="0" ci="1"/><counter type="BRANCH" missed="4" covered="0"/>
<counter type="LINE" missed="1" covered="3"/></sourcefile></package><counter type="LINE" missed="1" covered="3"/></report>"#;
        assert_eq!(count(jacoco), (3, 4));
        let go = "mode: set\na.com/m/a.go:3.16,5.2 2 1\na.com/m/a.go:7.16,9.2 1 0\na.com/m/a.go:7.16,9.2 1 1\n\
                  a.com/m/with space.go:1.1,2.2 1 0\n";
        assert_eq!(count(go), (3, 4));
    }

    #[test]
    fn what_is_no_complete_report_is_refused() {
        for (text, words) in [
            ("", "no line"),
            ("hello\n", "no coverage report"),
            ("TN:\nSF:a\nDA:1,1\n", "truncated"),
            ("SF:a\nDA:1\nend_of_record\n", "line 2"),
            ("DA:1,1\n", "line 1"),
            ("SF:a\nend_of_record\n", "no line"),
            ("mode: set\na.go:1.1,2.2 x 1\n", "line 2"),
            ("mode: set\n", "no line"),
            ("<testsuite/>", "no coverage report"),
            ("<coverage><packages>", "truncated"),
            ("<coverage><line number=\"x\" hits=\"1\"/></coverage>", "`number`"),
            ("<coverage/>", "no line"),
            ("<!-- -->", "no XML element"),
        ] {
            let error = CoverageReport::parse(text.as_bytes(), &[]).unwrap_err().to_string();
            assert!(error.contains(words), "{text:?}: {error}");
        }
    }

    #[test]
    fn file_of_the_repository_is_found_in_each_format() {
        let parse = |text: &str| CoverageReport::parse(text.as_bytes(), &["/tmp/work", "/checkout"]).unwrap();
        let total = |text: &str, path: &str| parse(text).of_file(path).map(|count| count.total);
        let lcov = "SF:/checkout/src/a.js\nDA:1,1\nend_of_record\nSF:b.js\nDA:1,1\nDA:2,1\nend_of_record\n\
                    SF:m/b.js\nDA:1,18446744073709551151\nDA:2,-1\nDA:3,1\nend_of_record\n";
        assert_eq!(total(lcov, "m/b.js"), Some(3));
        assert_eq!((total(lcov, "src/a.js"), total(lcov, "b.js")), (Some(1), Some(2)));
        assert_eq!((total(lcov, "rc/a.js"), total(lcov, "c/b.js")), (None, None));
        let cobertura = "<coverage><sources><source>/checkout/src</source></sources><class filename=\"a.py\">\
                         <line number=\"1\" hits=\"0\"/></class></coverage>";
        assert_eq!(
            (total(cobertura, "src/a.py"), total(cobertura, "a.py"), total(cobertura, "b/a.py")),
            (Some(1), None, None)
        );
        let jacoco = "<report><package name=\"com/p\"><sourcefile name=\"A.java\">\
                      <counter type=\"LINE\" missed=\"1\" covered=\"0\"/></sourcefile></package></report>";
        assert_eq!((total(jacoco, "src/main/java/com/p/A.java"), total(jacoco, "src/com/q/A.java")), (Some(1), None));
        let go = "mode: set\nexample.com/m/pkg/a.go:1.1,2.2 3 1\n";
        assert_eq!((total(go, "pkg/a.go"), total(go, "b.go")), (Some(3), None));
        let report = parse(go);
        assert!(report.has_files_like("x/b.go") && !report.has_files_like("b.py") && !report.has_files_like("go"));
    }

    #[test]
    fn percentage_is_compared_exactly() {
        let count = LineCount { covered: 799, total: 1000 };
        assert!(count.reaches(79) && !count.reaches(80));
        assert!(LineCount { covered: 8, total: 10 }.reaches(80));
        assert!(LineCount { covered: u64::MAX, total: u64::MAX }.reaches(100));
        assert!(LineCount { covered: 1, total: 2 } > LineCount { covered: 2, total: 5 });
    }
}
