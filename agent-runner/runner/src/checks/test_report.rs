//! The test report of a check: JUnit XML, which most test runners can write.
//!
//! The format has no standard. What is read here is written by all of them: `testcase` elements with a `name`, inside
//! them `failure`, `error` or `skipped`. A report is written by code that is not trusted, so its size is limited, entities
//! are not expanded, and what a report does not contain counts as not passed (see `verdict`).

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use quick_xml::events::{BytesStart, Event};
use quick_xml::{Reader, XmlVersion};

/// Maximum size of a report, in bytes.
pub(super) const MAX_REPORT_BYTES: u64 = 16 * 1024 * 1024;
/// Maximum number of tests in a report.
const MAX_TESTS: usize = 100_000;
/// Bytes of a failed test's text that are kept: its end, where test runners print what failed.
const MAX_TEXT_BYTES: usize = 1500;

/// How a test ended. If several tests have the same name, the last of these that one of them had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum TestEnd {
    Passed,
    Skipped,
    Failed,
}

/// A test in a report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct TestResult {
    pub end: TestEnd,
    /// Path of its file, as the test runner wrote it; empty if it did not.
    pub file: String,
    /// Line number from 1; 0 if there is none.
    pub line: u32,
    /// Why it failed: the message and the end of the text.
    pub text: String,
}

/// A report, by the names of the tests.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct TestReport {
    pub tests: BTreeMap<String, TestResult>,
}

/// Why a check has no report.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum ReportError {
    #[error("was not written")]
    Missing,
    #[error("is not a regular file")]
    NotAFile,
    #[error("cannot be read: {0}")]
    Unreadable(String),
    #[error("is larger than {} MiB", MAX_REPORT_BYTES / 1024 / 1024)]
    TooLarge,
    #[error("has more than {MAX_TESTS} tests")]
    TooManyTests,
    #[error("has more than {0} files")]
    TooManyFiles(usize),
    #[error("is not valid XML at byte {at}: {reason}")]
    Invalid { at: u64, reason: String },
    #[error("declares a document type, which is not read")]
    DocumentType,
    #[error("is not a JUnit report: its first element is `{0}`, not `testsuites` or `testsuite`")]
    OtherFormat(String),
    #[error("ends too early")]
    Truncated,
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

impl TestReport {
    /// Reads a JUnit report.
    ///
    /// # Errors
    /// [`ReportError`] if it is not one, or not complete.
    pub fn parse(bytes: &[u8]) -> Result<Self, ReportError> {
        // Output of a test that is not UTF-8 must not hide the other tests.
        let text = String::from_utf8_lossy(bytes);
        let mut reader = Reader::from_str(&text);
        let mut parser = Parser::default();
        let (mut depth, mut has_root) = (0_u32, false);
        loop {
            let event = reader.read_event();
            let at = reader.buffer_position();
            let invalid = |reason: String| ReportError::Invalid { at, reason };
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
                    Err(error) => return Err(invalid(error.to_string())),
                },
                Event::DocType(_) => return Err(ReportError::DocumentType),
                Event::Decl(_) | Event::PI(_) | Event::Comment(_) => {}
                Event::Eof if has_root && depth == 0 => return Ok(parser.report),
                Event::Eof => return Err(ReportError::Truncated),
            }
        }
    }

    fn check_size(&self) -> Result<(), ReportError> {
        if self.tests.len() > MAX_TESTS { Err(ReportError::TooManyTests) } else { Ok(()) }
    }

    /// Adds the tests of another file.
    ///
    /// # Errors
    /// [`ReportError::TooManyTests`].
    pub fn add(&mut self, other: Self) -> Result<(), ReportError> {
        other.tests.into_iter().for_each(|(name, test)| self.insert(name, test));
        self.check_size()
    }

    fn insert(&mut self, name: String, test: TestResult) {
        match self.tests.entry(name) {
            Entry::Vacant(entry) => drop(entry.insert(test)),
            Entry::Occupied(mut entry) if test.end > entry.get().end => drop(entry.insert(test)),
            Entry::Occupied(_) => {}
        }
    }

    /// The names of the tests that ended so.
    pub fn names(&self, end: TestEnd) -> impl Iterator<Item = &str> {
        self.tests.iter().filter(move |(_, test)| test.end == end).map(|(name, _)| name.as_str())
    }

    /// How a test ended; `None` if the report does not have it.
    pub fn end_of(&self, name: &str) -> Option<TestEnd> {
        self.tests.get(name).map(|test| test.end)
    }
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
            ("testsuite", _) => self.suites.push(attribute(element, "name")?),
            ("testcase", _) => {
                let name = attribute(element, "name")?;
                let class = attribute(element, "classname")?;
                let suite = self.suites.last().map(String::as_str).unwrap_or_default();
                let group = if class.is_empty() { suite } else { &class };
                let name = if group.is_empty() { name } else { format!("{group}::{name}") };
                // CTest and GoogleTest give the end of a test that did not run as an attribute.
                let skipped = ["notrun", "disabled", "skipped", "suppressed"];
                let ends = [attribute(element, "status")?, attribute(element, "result")?];
                let is_skipped = ends.iter().any(|end| skipped.contains(&end.as_str()));
                let result = TestResult {
                    end: if is_skipped { TestEnd::Skipped } else { TestEnd::Passed },
                    file: attribute(element, "file")?,
                    line: attribute(element, "line")?.parse().unwrap_or(0),
                    text: String::new(),
                };
                self.test = Some((name, result));
            }
            ("failure" | "error", Some((_, test))) => {
                test.end = TestEnd::Failed;
                append(&mut test.text, &attribute(element, "message")?);
                append(&mut test.text, "\n");
                self.in_failure = true;
            }
            ("skipped", Some((_, test))) => test.end = test.end.max(TestEnd::Skipped),
            _ => {}
        }
        Ok(())
    }

    fn close(&mut self, name: &str) {
        match name {
            "testsuite" => drop(self.suites.pop()),
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
fn attribute(element: &BytesStart<'_>, name: &str) -> Result<String, String> {
    // Without the check for duplicates, which compares each attribute with each other one.
    for attribute in element.attributes().with_checks(false) {
        let attribute = attribute.map_err(|error| error.to_string())?;
        if attribute.key.local_name().as_ref() == name {
            let value = attribute.normalized_value(XmlVersion::Implicit1_0).map_err(|error| error.to_string())?;
            return Ok(value.into_owned());
        }
    }
    Ok(String::new())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Vec<(String, TestEnd)> {
        let report = TestReport::parse(text.as_bytes()).unwrap();
        report.tests.into_iter().map(|(name, test)| (name, test.end)).collect()
    }

    fn test(name: &str, end: TestEnd) -> (String, TestEnd) {
        (name.to_owned(), end)
    }

    #[test]
    fn report_of_pytest_is_read() {
        let text = r#"<?xml version="1.0" encoding="utf-8"?><testsuites name="pytest tests"><testsuite name="pytest"
            errors="0" failures="1" skipped="1" tests="3" time="0.030"><testcase classname="tests.test_a" name="test_add"
            time="0.001" /><testcase classname="tests.test_a" name="test_x[1-&quot;a&quot;]" file="tests/test_a.py" line="5">
            <failure message="assert 1 == 2">def test_x():
&gt;       assert 1 == 2
E       assert 1 == 2

tests/test_a.py:6: AssertionError</failure></testcase><testcase classname="tests.test_a" name="test_s"><skipped
            type="pytest.skip" message="later">x</skipped></testcase></testsuite></testsuites>"#;
        let report = TestReport::parse(text.as_bytes()).unwrap();
        assert_eq!(report.names(TestEnd::Passed).collect::<Vec<_>>(), ["tests.test_a::test_add"]);
        assert_eq!(report.names(TestEnd::Skipped).collect::<Vec<_>>(), ["tests.test_a::test_s"]);
        let failed = &report.tests["tests.test_a::test_x[1-\"a\"]"];
        assert_eq!((failed.end, failed.file.as_str(), failed.line), (TestEnd::Failed, "tests/test_a.py", 5));
        assert!(failed.text.starts_with("assert 1 == 2\ndef test_x():\n>  "), "{}", failed.text);
        assert!(failed.text.ends_with("test_a.py:6: AssertionError"), "{}", failed.text);
    }

    #[test]
    fn reports_of_other_test_runners_are_read() {
        use TestEnd::{Failed, Passed, Skipped};
        // cargo-nextest, gotestsum, CTest, GoogleTest, Surefire.
        let nextest = r#"<testsuites name="nextest-run"><testsuite name="edits::suite"><testcase name="a::b" classname="edits::suite"/>
            <testcase name="a::c" classname="edits::suite"><failure type="test failure">panicked</failure></testcase></testsuite></testsuites>"#;
        assert_eq!(parse(nextest), [test("edits::suite::a::b", Passed), test("edits::suite::a::c", Failed)]);
        let go = r#"<testsuites><testsuite name="box/m"><testcase classname="" name="TestA"></testcase>
            <testcase classname="" name="TestB"><skipped message="x"></skipped></testcase></testsuite></testsuites>"#;
        assert_eq!(parse(go), [test("box/m::TestA", Passed), test("box/m::TestB", Skipped)]);
        let ctest = r#"<testsuite name="Linux-c++"><testcase name="a" classname="a" status="run"><system-out/></testcase>
            <testcase name="b" classname="b" status="fail"><failure message=""/></testcase>
            <testcase name="c" classname="c" status="disabled"/></testsuite>"#;
        assert_eq!(parse(ctest), [test("a::a", Passed), test("b::b", Failed), test("c::c", Skipped)]);
        let google = r#"<testsuites><testsuite name="S"><testcase name="D" status="notrun" result="suppressed" classname="S"/></testsuite></testsuites>"#;
        assert_eq!(parse(google), [test("S::D", Skipped)]);
        let surefire = r#"<testsuite name="x.T"><properties/><testcase name="m" classname="x.T"><error type="E"><![CDATA[at <x>]]></error>
            </testcase><testcase name="n" classname="x.T"><flakyFailure/></testcase></testsuite>"#;
        assert_eq!(parse(surefire), [test("x.T::m", Failed), test("x.T::n", Passed)]);
    }

    #[test]
    fn tests_of_the_same_name_end_as_the_worst_of_them() {
        let text = r#"<testsuite><testcase name="a"><failure/></testcase><testcase name="a"/><testcase name="b"/>
            <testcase name="b"><skipped/></testcase></testsuite>"#;
        assert_eq!(parse(text), [test("a", TestEnd::Failed), test("b", TestEnd::Skipped)]);
    }

    #[test]
    fn output_that_looks_like_a_report_is_only_text() {
        let text = "<testsuite><testcase name=\"a\"><failure/><system-out><![CDATA[</testcase><testcase name=\"a\"/>]]>\
                    &lt;testcase name=\"b\"/&gt;</system-out></testcase></testsuite>";
        assert_eq!(parse(text), [test("a", TestEnd::Failed)]);
    }

    #[test]
    fn what_is_not_a_complete_report_is_refused() {
        for (text, expected) in [
            ("", "ends too early"),
            ("ok\n", "ends too early"),
            ("<testsuite><testcase name=\"a\"/>", "ends too early"),
            ("<testsuite><testcase name=\"a\"", "not valid XML"),
            ("<testsuite></testcase></testsuite>", "not valid XML"),
            ("<html></html>", "its first element is `html`"),
            ("<!DOCTYPE x [<!ENTITY a \"b\">]><testsuite/>", "document type"),
            ("<testsuite name=\"&unknown;\"/>", "not valid XML"),
        ] {
            let error = TestReport::parse(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains(expected), "{text}: {error}");
        }
        assert_eq!(parse("<testsuites/>"), []);
        let many: String = (0..=MAX_TESTS).map(|n| format!("<testcase name=\"{n}\"/>")).collect();
        let many = format!("<testsuite>{many}</testsuite>");
        assert_eq!(TestReport::parse(many.as_bytes()), Err(ReportError::TooManyTests));
    }

    #[test]
    fn long_text_is_cut_at_its_start() {
        let text = format!(
            "<testsuite><testcase name=\"a\"><failure>{}é end</failure></testcase></testsuite>",
            "é".repeat(9000)
        );
        let report = TestReport::parse(text.as_bytes()).unwrap();
        let kept = &report.tests["a"].text;
        assert!(kept.len() <= 2 * MAX_TEXT_BYTES && kept.ends_with("é end"), "{} bytes", kept.len());
    }
}
