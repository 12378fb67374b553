use TestOutcome::{Failed, Passed, Skipped};

use super::*;

fn parse(text: &str) -> Vec<(String, TestOutcome)> {
    let report = TestReport::parse(text.as_bytes(), "/checkout").unwrap();
    report.tests.into_iter().map(|(name, test)| (name, test.outcome)).collect()
}

fn test(name: &str, outcome: TestOutcome) -> (String, TestOutcome) {
    (name.to_owned(), outcome)
}

/// As pytest 9 writes it.
#[test]
fn report_of_pytest_is_read() {
    let text = r#"<?xml version="1.0" encoding="utf-8"?><testsuites name="pytest tests"><testsuite name="pytest"
        errors="0" failures="1" skipped="1" tests="3" time="0.030" hostname="vm"><testcase classname="tests.test_a"
        name="test_add" time="0.001" /><testcase classname="tests.test_a" name="test_x[1-&quot;a&quot;]" time="0.001">
        <failure message="assert 1 == 2">def test_x():
&gt;       assert 1 == 2
E       assert 1 == 2

/checkout/tests/test_a.py:6: AssertionError</failure></testcase><testcase classname="tests.test_a" name="test_s"><skipped
        type="pytest.skip" message="later">x</skipped></testcase></testsuite></testsuites>"#;
    let name = "pytest::tests.test_a::test_x[1-\"a\"]";
    let expected = [
        test("pytest::tests.test_a::test_add", Passed),
        test("pytest::tests.test_a::test_s", Skipped),
        test(name, Failed),
    ];
    assert_eq!(parse(text), expected);
    let report = TestReport::parse(text.as_bytes(), "/checkout").unwrap();
    let failed = &report.tests[name];
    assert!(failed.text.starts_with("assert 1 == 2\ndef test_x():\n>  "), "{}", failed.text);
    assert!(failed.text.ends_with("\n./tests/test_a.py:6: AssertionError"), "{}", failed.text);
    let older = r#"<testsuite><testcase name="a" file="tests/test_a.py" line="5"/></testsuite>"#;
    let report = TestReport::parse(older.as_bytes(), "/checkout").unwrap();
    assert_eq!((report.tests["a"].file.as_str(), report.tests["a"].line), ("tests/test_a.py", 5));
}

#[test]
fn reports_of_other_test_runners_are_read() {
    let nextest = r#"<testsuites name="nextest-run"><testsuite name="edits::suite"><testcase name="a::b" classname="edits::suite"/>
        <testcase name="a::c" classname="edits::suite"><failure type="test failure">panicked</failure></testcase></testsuite></testsuites>"#;
    assert_eq!(parse(nextest), [test("edits::suite::a::b", Passed), test("edits::suite::a::c", Failed)]);
    let gotestsum = r#"<testsuites><testsuite name="box/m"><testcase classname="" name="TestA"></testcase>
        <testcase classname="" name="TestB"><skipped message="x"></skipped></testcase></testsuite></testsuites>"#;
    assert_eq!(parse(gotestsum), [test("box/m::TestA", Passed), test("box/m::TestB", Skipped)]);
    let ctest = r#"<testsuite name="Linux-c++"><testcase name="a" classname="a" status="run"><system-out/></testcase>
        <testcase name="b" classname="b" status="fail"><failure message=""/></testcase>
        <testcase name="c" classname="c" status="disabled"/></testsuite>"#;
    let names = ["Linux-c++::a::a", "Linux-c++::b::b", "Linux-c++::c::c"];
    assert_eq!(parse(ctest), [test(names[0], Passed), test(names[1], Failed), test(names[2], Skipped)]);
    let google = r#"<testsuites><testsuite name="S"><testcase name="D" status="notrun" result="suppressed" classname="S"/></testsuite></testsuites>"#;
    assert_eq!(parse(google), [test("S::D", Skipped)]);
    let surefire = r#"<testsuite name="x.T"><properties/><testcase name="m" classname="x.T"><error type="E"><![CDATA[at <x>]]></error>
        </testcase><testcase name="n" classname="x.T"><flakyFailure/></testcase></testsuite>"#;
    assert_eq!(parse(surefire), [test("x.T::m", Failed), test("x.T::n", Passed)]);
    // Node writes the same class for all tests.
    let node = r#"<testsuites><testsuite name="A"><testcase name="works" classname="test"/></testsuite><testsuite name="B">
        <testcase name="works" classname="test"><failure/></testcase></testsuite></testsuites>"#;
    assert_eq!(parse(node), [test("A::test::works", Passed), test("B::test::works", Failed)]);
}

#[test]
fn tests_of_one_name_are_counted_and_the_worst_of_them_counts() {
    let text = r#"<testsuite><testcase name="a"><failure message="x"/></testcase><testcase name="a"/><testcase name="b"/>
        <testcase name="b"><skipped/></testcase></testsuite>"#;
    assert_eq!(parse(text), [test("a", Failed), test("b", Skipped)]);
    let report = TestReport::parse(text.as_bytes(), "/checkout").unwrap();
    let a = &report.tests["a"];
    assert_eq!((a.count, a.failed, a.text.as_str(), report.count()), (2, 1, "x\n", 4));
}

#[test]
fn error_of_a_suite_is_a_failure() {
    let text = r#"<testsuite name="s"><error message="setup"/><testcase name="a"/></testsuite>"#;
    assert_eq!(parse(text), [test("s", Failed), test("s::a", Passed)]);
}

#[test]
fn output_that_looks_like_a_report_is_only_text() {
    let text = "<testsuite><testcase name=\"a\"><failure/><system-out><![CDATA[</testcase><testcase name=\"a\"/>]]>\
                &lt;testcase name=\"b\"/&gt;</system-out></testcase></testsuite>";
    assert_eq!(parse(text), [test("a", Failed)]);
}

#[test]
fn what_is_not_a_complete_report_is_refused() {
    let long = format!("<testsuite></{}>", "x".repeat(100_000));
    let deep = "<testsuite name=\"x\">".repeat(100_000);
    for (text, expected) in [
        ("", "contains no XML element"),
        ("ok\n", "contains no XML element"),
        ("<testsuite><testcase name=\"a\"/>", "is truncated"),
        ("<testsuite><testcase name=\"a\"", "is invalid at byte"),
        ("<testsuite></testcase></testsuite>", "is invalid at byte"),
        ("<testsuite><testcase name=\"a\"><testcase name=\"b\"/></testcase></testsuite>", "inside of a `testcase`"),
        ("<html></html>", "its first element is `html`"),
        ("<!DOCTYPE x [<!ENTITY a \"b\">]><testsuite/>", "contains a DOCTYPE"),
        (long.as_str(), "is invalid at byte"),
        (deep.as_str(), "more than 64 nested suites"),
    ] {
        let error = TestReport::parse(text.as_bytes(), "/checkout").unwrap_err().to_string();
        assert!(error.contains(expected) && error.len() < 400, "{error}");
    }
    assert_eq!(parse("<testsuites/>"), []);
    let entity = "<testsuite name=\"&unknown;\"><testcase name=\"a\"/></testsuite>";
    assert_eq!(parse(entity), [test("&unknown;::a", Passed)], "an entity is not expanded");
    for invalid in ["<failure>&#0;</failure>", "<failure message=\"&#0;\"/>"] {
        let text = format!("<testsuite><testcase name=\"a\">{invalid}</testcase></testsuite>");
        assert_eq!(parse(&text), [test("a", Failed)], "{invalid}");
    }
    let many: String = (0..=MAX_TESTS).map(|n| format!("<testcase name=\"{n}\"/>")).collect();
    let many = format!("<testsuite>{many}</testsuite>");
    assert_eq!(TestReport::parse(many.as_bytes(), "/checkout"), Err(ReportError::TooManyTests));
}

#[test]
fn long_names_and_texts_are_cut() {
    let text =
        format!("<testsuite><testcase name=\"a\"><failure>{}é end</failure></testcase></testsuite>", "é".repeat(9000));
    let report = TestReport::parse(text.as_bytes(), "/checkout").unwrap();
    let kept = &report.tests["a"].text;
    assert!(kept.len() <= 2 * MAX_TEXT_BYTES && kept.ends_with("é end"), "{} bytes", kept.len());
    let long = "é".repeat(100_000);
    let text =
        format!("<testsuite name=\"{long}\"><testcase name=\"{long}x\"/><testcase name=\"{long}y\"/></testsuite>");
    let report = TestReport::parse(text.as_bytes(), "/checkout").unwrap();
    assert_eq!(report.tests.len(), 2, "the names stay different");
    assert!(report.tests.keys().all(|name| name.len() < 1000));
}
