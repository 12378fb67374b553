//! Fuzz target for a creator's replies: any text must result in edits of valid paths or an error.

#![no_main]

use cfq_agent_runner::checks::Language;
use cfq_agent_runner::edits::{ReplyTarget, parse};
use cfq_agent_runner::workstream::repo_path;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|reply: &str| {
    let target = ReplyTarget { path: "src/add.py".to_owned(), language: Some(Language::Python) };
    for truncated in [false, true] {
        for edit in parse(reply, &target, truncated).unwrap_or_default() {
            assert_eq!(repo_path(edit.path()).unwrap(), edit.path());
        }
    }
});
