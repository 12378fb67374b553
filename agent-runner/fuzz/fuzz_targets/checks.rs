//! Fuzz target for the checks of files: any content must be checked within the limits. The first line is the path.

#![no_main]

use cfq_agent_runner::checks::check;
use cfq_proto::loop_step::ArtifactFile;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let (path, content) = text.split_once('\n').unwrap_or(("a.py", text));
    let file = ArtifactFile::text(path, content);
    let (findings, quarantine) = check(std::slice::from_ref(&file), |_| None);
    assert_eq!(findings.is_empty(), quarantine.is_none());
    // Nothing is added to a base that has the same content.
    let unchanged = check(&[file], |asked| (asked == path).then(|| content.to_owned())).0;
    assert!(unchanged.iter().all(|finding| finding.message.starts_with("cannot be checked") || finding.line == 0));
});
