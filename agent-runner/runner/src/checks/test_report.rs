//! The test report of a check: JUnit XML, which most test runners can write.
//!
//! The format has no standard. What is read here is written by all of them: `testcase` elements with a `name`, inside
//! them `failure`, `error` or `skipped`. A report is written by code that is not trusted, so its size is limited, entities
//! are not expanded, and what a report does not contain counts as not passed (see `verdict`).

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use quick_xml::events::{BytesStart, Event};
use quick_xml::{Reader, XmlVersion};
use sha2::{Digest, Sha256};

/// Maximum size of a report, in bytes.
pub(super) const MAX_REPORT_BYTES: u64 = 16 * 1024 * 1024;
/// Maximum number of tests in a report.
const MAX_TESTS: u32 = 100_000;
/// Maximum length of the names of a suite, a class and a test, in bytes. Each test has all three in its name.
const MAX_NAME_BYTES: usize = 300;
/// Maximum number of suites inside each other.
const MAX_SUITE_DEPTH: usize = 64;
/// Bytes of a failed test's text that are kept if it is longer: its end, where test runners print what failed.
const MAX_TEXT_BYTES: usize = 1500;
/// Maximum length of the reason why a report is invalid, in characters. It quotes the report.
const MAX_REASON_CHARS: usize = 200;

/// Outcome of a test, from best to worst: of several tests with one name, the worst counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum TestOutcome {
    Passed,
    Skipped,
    Failed,
}

/// The tests of one name in a report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TestResult {
    pub outcome: TestOutcome,
    /// Number of tests of this name.
    pub count: u32,
    /// Number of those that were skipped.
    pub skipped: u32,
    /// Number of those that failed.
    pub failed: u32,
    /// Path of the file, as the test runner wrote it; empty if it did not.
    pub file: String,
    /// Line number as the test runner wrote it; 0 if it did not.
    pub line: u32,
    /// The end of message and text of the failure.
    pub text: String,
}

/// A report, by the names of the tests.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct TestReport {
    pub tests: BTreeMap<String, TestResult>,
    count: u32,
}

/// Why a check has no report.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum ReportError {
    #[error("was not written; compare its path with that in the command")]
    Missing,
    #[error("may be incomplete, because the program did not exit by itself")]
    Incomplete,
    #[error("is not a regular file")]
    NotAFile,
    #[error("is a folder; in `report`, end its path with `/`")]
    Folder,
    #[error("cannot be read: {0}")]
    Unreadable(String),
    #[error("is larger than {} MiB", MAX_REPORT_BYTES / 1024 / 1024)]
    TooLarge,
    #[error("has more than {MAX_TESTS} tests")]
    TooManyTests,
    #[error("has more than {0} files")]
    TooManyFiles(usize),
    #[error("is invalid at byte {at}: {reason}")]
    Invalid { at: u64, reason: String },
    #[error("contains a DOCTYPE, which is not allowed")]
    DocumentType,
    #[error("is not a JUnit report: its first element is `{0}`, not `testsuites` or `testsuite`")]
    OtherFormat(String),
    #[error("contains no XML element")]
    Empty,
    #[error("contains no test; correct the command")]
    NoTests,
    #[error("is truncated")]
    Truncated,
    #[error("is no coverage report of LCOV, Cobertura, JaCoCo or Go")]
    NoCoverageFormat,
    #[error("is invalid in line {0}")]
    InvalidLine(u32),
    #[error("contains no line of code")]
    NoLines,
    #[error("has more than {0} lines of code")]
    TooManyLines(usize),
    #[error("has a path of more than {0} bytes")]
    PathTooLong(usize),
    #[error("has an unusable file {name}: it {error}")]
    InFile { name: String, error: Box<ReportError> },
}

/// What the reader is inside of.
#[derive(Debug, Default)]
struct Parser {
    report: TestReport,
    /// Names of the open suites.
    suites: Vec<String>,
    test: Option<(String, TestResult)>,
    /// Whether the text of a `failure` or `error` is being read.
    in_failure: bool,
}

impl TestResult {
    /// Number of tests that ran to an end.
    pub fn ran(&self) -> u32 {
        self.count.saturating_sub(self.skipped)
    }

    pub fn new(outcome: TestOutcome) -> Self {
        let [failed, skipped] = [TestOutcome::Failed, TestOutcome::Skipped].map(|of| u32::from(outcome == of));
        Self { outcome, count: 1, skipped, failed, file: String::new(), line: 0, text: String::new() }
    }
}

impl TestReport {
    /// Reads a JUnit report. `folder` is the path of the checkout, which differs from run to run: names and texts contain
    /// `.` instead.
    ///
    /// # Errors
    /// [`ReportError`] if it is not one, or not complete.
    pub fn parse(bytes: &[u8], folder: &str) -> Result<Self, ReportError> {
        // Output of a test that is not UTF-8 must not hide the other tests.
        let text = String::from_utf8_lossy(bytes).replace(folder, ".");
        let mut reader = Reader::from_str(&text);
        let mut parser = Parser::default();
        let (mut depth, mut has_root) = (0_u32, false);
        loop {
            let event = reader.read_event();
            let at = reader.buffer_position();
            let invalid = |reason: String| invalid_at(at, &reason);
            parser.report.check_size()?;
            match event.map_err(|error| invalid(error.to_string()))? {
                Event::Start(element) => {
                    if !std::mem::replace(&mut has_root, true) {
                        check_root(&element)?;
                    }
                    depth += 1;
                    parser.open(&element).map_err(invalid)?;
                }
                Event::Empty(element) => {
                    if !std::mem::replace(&mut has_root, true) {
                        check_root(&element)?;
                    }
                    parser.open(&element).map_err(invalid)?;
                    parser.close(element.local_name().as_ref());
                }
                Event::End(element) => {
                    depth = depth.saturating_sub(1);
                    parser.close(element.local_name().as_ref());
                }
                Event::Text(text) => parser.text(&text.xml10_content()),
                Event::CData(text) => parser.text(&text.xml10_content()),
                Event::GeneralRef(name) => match name.resolve_char_ref() {
                    Ok(Some(character)) => parser.text(character.encode_utf8(&mut [0; 4])),
                    Ok(None) => parser.text(predefined(&name)),
                    // Some test runners write characters that XML does not permit.
                    Err(_) => parser.text("\u{fffd}"),
                },
                Event::DocType(_) => return Err(ReportError::DocumentType),
                Event::Decl(_) | Event::PI(_) | Event::Comment(_) => {}
                Event::Eof if !has_root => return Err(ReportError::Empty),
                Event::Eof if depth == 0 => return Ok(parser.report),
                Event::Eof => return Err(ReportError::Truncated),
            }
        }
    }

    /// Number of tests.
    pub fn count(&self) -> u32 {
        self.count
    }

    /// Number of tests that failed.
    pub fn failed(&self) -> u32 {
        self.tests.values().map(|test| test.failed).sum()
    }

    fn check_size(&self) -> Result<(), ReportError> {
        if self.count > MAX_TESTS { Err(ReportError::TooManyTests) } else { Ok(()) }
    }

    /// Adds the tests of another file.
    ///
    /// # Errors
    /// [`ReportError::TooManyTests`].
    pub fn add(&mut self, other: Self) -> Result<(), ReportError> {
        other.tests.into_iter().for_each(|(name, test)| self.insert(name, test));
        self.check_size()
    }

    /// Adds tests of one name.
    pub fn insert(&mut self, name: String, test: TestResult) {
        self.count = self.count.saturating_add(test.count);
        match self.tests.entry(name) {
            Entry::Vacant(entry) => {
                entry.insert(test);
            }
            Entry::Occupied(mut entry) => {
                let known = entry.get_mut();
                let [count, skipped, failed] = [
                    known.count.saturating_add(test.count),
                    known.skipped.saturating_add(test.skipped),
                    known.failed.saturating_add(test.failed),
                ];
                if test.outcome > known.outcome {
                    *known = test;
                }
                (known.count, known.skipped, known.failed) = (count, skipped, failed);
            }
        }
    }
}

/// The error of an XML report at a byte.
pub(super) fn invalid_at(at: u64, reason: &str) -> ReportError {
    ReportError::Invalid { at, reason: shortened(reason) }
}

fn shortened(reason: &str) -> String {
    reason.chars().filter(|c| !c.is_control()).take(MAX_REASON_CHARS).collect()
}

/// A name of limited length. Two long names stay different.
fn limited(name: String) -> String {
    if name.len() <= MAX_NAME_BYTES {
        return name;
    }
    let digest = Sha256::digest(name.as_bytes());
    let hash: String = digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect();
    format!("{}...{hash}", &name[..name.floor_char_boundary(MAX_NAME_BYTES)])
}

fn check_root(element: &BytesStart<'_>) -> Result<(), ReportError> {
    match element.local_name().as_ref() {
        "testsuites" | "testsuite" => Ok(()),
        other => Err(ReportError::OtherFormat(other.chars().take(100).collect())),
    }
}

/// The character of one of XML's five own entities. Others are left out.
fn predefined(name: &str) -> &'static str {
    match name {
        "lt" => "<",
        "gt" => ">",
        "amp" => "&",
        "quot" => "\"",
        "apos" => "'",
        _ => "",
    }
}

impl Parser {
    fn open(&mut self, element: &BytesStart<'_>) -> Result<(), String> {
        match (element.local_name().as_ref(), &mut self.test) {
            ("testsuite", None) if self.suites.len() >= MAX_SUITE_DEPTH => {
                return Err(format!("more than {MAX_SUITE_DEPTH} nested suites"));
            }
            ("testsuite", None) => self.suites.push(limited(attribute(element, "name")?)),
            ("testcase", None) => self.test = Some(self.open_test(element)?),
            ("testsuite" | "testcase", Some(_)) => return Err("an element inside of a `testcase`".to_owned()),
            ("failure" | "error", Some((_, test))) => {
                (test.outcome, test.failed, test.skipped) = (TestOutcome::Failed, 1, 0);
                append(&mut test.text, &attribute(element, "message")?);
                append(&mut test.text, "\n");
                self.in_failure = true;
            }
            // An error of a suite, outside of its tests.
            ("failure" | "error", None) if !self.suites.is_empty() => {
                let mut test = TestResult::new(TestOutcome::Failed);
                append(&mut test.text, &attribute(element, "message")?);
                self.report.insert(limited(self.suites.join("::")), test);
            }
            ("skipped", Some((_, test))) if test.outcome == TestOutcome::Passed => {
                (test.outcome, test.skipped) = (TestOutcome::Skipped, 1);
            }
            _ => {}
        }
        Ok(())
    }

    fn open_test(&self, element: &BytesStart<'_>) -> Result<(String, TestResult), String> {
        let (class, name) = (limited(attribute(element, "classname")?), limited(attribute(element, "name")?));
        let suite = self.suites.last().map(String::as_str).unwrap_or_default();
        // Some test runners write the same class for all tests, others the name of the suite again.
        let parts = [suite, if class == suite { "" } else { &class }, &name];
        let full = parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("::");
        // CTest and GoogleTest write the outcome of a test that did not run as an attribute.
        let skipped = ["notrun", "disabled", "skipped", "suppressed"];
        let states = [attribute(element, "status")?, attribute(element, "result")?];
        let is_skipped = states.iter().any(|state| skipped.contains(&state.as_str()));
        let result = TestResult {
            file: limited(attribute(element, "file")?),
            line: attribute(element, "line")?.parse().unwrap_or(0),
            ..TestResult::new(if is_skipped { TestOutcome::Skipped } else { TestOutcome::Passed })
        };
        Ok((full, result))
    }

    fn close(&mut self, name: &str) {
        match name {
            "testsuite" => {
                self.suites.pop();
            }
            "failure" | "error" => self.in_failure = false,
            "testcase" => {
                if let Some((name, test)) = self.test.take() {
                    self.report.insert(name, test);
                }
            }
            _ => {}
        }
    }

    fn text(&mut self, text: &str) {
        if let (true, Some((_, test))) = (self.in_failure, &mut self.test) {
            append(&mut test.text, text);
        }
    }
}

/// Appends to a text of which the end is kept.
fn append(text: &mut String, more: &str) {
    text.push_str(more);
    if text.len() > 2 * MAX_TEXT_BYTES {
        let start = text.ceil_char_boundary(text.len() - MAX_TEXT_BYTES);
        text.drain(..start);
    }
}

/// The value of an attribute; empty if it is absent.
pub(super) fn attribute(element: &BytesStart<'_>, name: &str) -> Result<String, String> {
    // Without the check for duplicates, which compares each attribute with each other one.
    for attribute in element.attributes().with_checks(false) {
        let attribute = attribute.map_err(|error| error.to_string())?;
        if attribute.key.local_name().as_ref() == name {
            // Some test runners write characters that XML does not permit, so the value may be left as it is.
            let value = attribute.normalized_value(XmlVersion::Implicit1_0);
            return Ok(value.map_or_else(|_| attribute.value.to_string(), std::borrow::Cow::into_owned));
        }
    }
    Ok(String::new())
}

#[cfg(test)]
mod tests;
