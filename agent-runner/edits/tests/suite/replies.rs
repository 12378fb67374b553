//! Replies in the forms that models send them, in `replies.txt`.

use cfq_edits::{ChangedFile, encode};

use super::files::Files;

/// The parts of a case: the words after `===`, and the lines below.
fn parts(case: &str) -> Vec<(&str, String)> {
    let mut parts: Vec<(&str, String)> = Vec::new();
    for line in case.split_inclusive('\n') {
        match (line.strip_prefix("=== "), parts.last_mut()) {
            (Some(head), _) => parts.push((head.trim_end(), String::new())),
            (None, Some((_, text))) => text.push_str(line),
            (None, None) => {}
        }
    }
    parts
}

/// The artifact after all replies, in the form of the file, or the problem of a reply.
fn outcome(base: &Files, replies: &[&str]) -> Vec<(String, String)> {
    let mut previous: Vec<ChangedFile> = Vec::new();
    for reply in replies {
        match base.changes(reply, &previous) {
            Ok(changed) => previous = changed,
            Err(problem) => {
                let name = format!("{problem:?}");
                let name = name.split([' ', '(']).next().unwrap_or_default();
                return vec![(format!("REFUSED {name}"), String::new())];
            }
        }
    }
    let part = |file: ChangedFile| match file.content {
        None => (format!("REMOVED {}", file.path), String::new()),
        Some(content) => {
            let bytes = encode(&content.text, content.encoding).unwrap().into_owned();
            (format!("AFTER {}", file.path), String::from_utf8(bytes).unwrap())
        }
    };
    previous.into_iter().map(part).collect()
}

#[test]
fn replies_have_their_outcome() {
    let text = include_str!("replies.txt");
    let mut count = 0;
    let mut wrong = Vec::new();
    for case in text.split("\n=== CASE ").skip(1) {
        count += 1;
        let (title, body) = case.split_once('\n').unwrap();
        let body = if body.ends_with('\n') { body.to_owned() } else { format!("{body}\n") };
        let parts = parts(&body);
        let named = |key: &'static str| parts.iter().filter(move |(head, _)| head.split(' ').next() == Some(key));
        let files: Vec<(&str, &str)> = named("FILE").map(|(head, text)| (&head[5..], text.as_str())).collect();
        let replies: Vec<&str> = named("REPLY").map(|(_, text)| text.as_str()).collect();
        let is_outcome = |head: &str| ["AFTER", "REMOVED", "REFUSED"].contains(&head.split(' ').next().unwrap());
        let expected = parts.iter().filter(|(head, _)| is_outcome(head));
        let expected: Vec<_> = expected.map(|(head, text)| ((*head).to_owned(), text.clone())).collect();
        assert!(!replies.is_empty() && !expected.is_empty(), "{title} is incomplete");
        let outcome = outcome(&Files::of(&files), &replies);
        if outcome != expected {
            wrong.push(format!("{title}:\n  expected {expected:?}\n  is {outcome:?}"));
        }
    }
    assert!(count > 70, "only {count} cases were read");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
