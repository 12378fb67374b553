use proptest::prelude::*;

use super::*;

fn request(max_tokens: usize) -> MapRequest {
    MapRequest {
        depth: None,
        include_tests: false,
        max_tokens,
        part: 1,
        focus: Vec::new(),
        mentioned_names: Vec::new(),
    }
}

const FILES: [(&str, &str); 6] = [
    ("README.md", ""),
    ("src/app/main.py", "from queue import Queue\n\ndef main():\n    Queue().put(1)\n"),
    ("src/app/other.py", "from queue import Queue\n\ndef other():\n    return Queue()\n"),
    ("src/queue.py", "class Queue:\n    def put(self, item):\n        pass\n\ndef unused():\n    pass\n"),
    ("src/sub/deep/x.txt", ""),
    ("tests/test_queue.py", "def test_put():\n    pass\n"),
];

fn map(files: &[(&str, &str)], request: &MapRequest) -> Result<RepoMap, MapError> {
    let symbols: Vec<FileSymbols> =
        files.iter().map(|(path, text)| FileSymbols::of(path, text).unwrap_or(FileSymbols::NONE)).collect();
    let files: Vec<(&str, &FileSymbols)> = files.iter().zip(&symbols).map(|((path, _), file)| (*path, file)).collect();
    repo_map(&files, request)
}

#[test]
fn whole_map_shows_folders_files_and_definitions() {
    let map = map(&FILES, &request(1000)).unwrap();
    let expected = "\
src/
  app/
    main.py
      3: def main():
    other.py
      3: def other():
  sub/deep/
    x.txt
  queue.py
    1: class Queue:
      2: def put(self, item):
    5: def unused():
README.md
";
    assert_eq!(map.text, expected);
    assert_eq!((map.parts, map.files, map.symbols, map.tests_left_out), (1, 5, 5, 1));
}

#[test]
fn small_map_shows_what_is_used_most() {
    let map = map(&FILES, &request(50)).unwrap();
    assert!(map.tokens <= 50, "{map:?}");
    let expected = "\
src/
  queue.py
    1: class Queue:
  ... 3 more files
... 1 more file
";
    assert_eq!(map.text, expected);
    assert!(map.parts > 1, "{map:?}");
}

#[test]
fn tests_are_shown_on_request_and_depth_hides_what_is_below() {
    let with_tests = map(&FILES, &MapRequest { include_tests: true, ..request(1000) }).unwrap();
    assert!(with_tests.text.contains("tests/\n  test_queue.py\n    1: def test_put():\n"), "{}", with_tests.text);
    let top = map(&FILES, &MapRequest { depth: Some(1), ..request(1000) }).unwrap();
    assert_eq!(top.text, "src/\n  ... 4 more files\nREADME.md\n");
    let two = map(&FILES, &MapRequest { depth: Some(2), ..request(1000) }).unwrap();
    assert!(
        two.text.starts_with("src/\n  app/\n    ... 2 more files\n  sub/deep/\n    ... 1 more file\n  queue.py\n"),
        "{}",
        two.text
    );
}

#[test]
fn focus_moves_what_is_near_to_the_front() {
    let near = |focus: &str| map(&FILES, &MapRequest { focus: vec![focus.to_owned()], ..request(60) }).unwrap().text;
    assert!(near("src/app/other.py").contains("other.py") && !near("src/app/other.py").contains("main.py"));
    assert!(near("other.py").contains("3: def other():") && near("unused").contains("5: def unused():"));
    assert!(near("main").contains("main.py") && !near("main").contains("other.py"), "{}", near("main"));
    let unknown = map(&FILES, &MapRequest { focus: vec!["nothing".to_owned()], ..request(60) });
    assert_eq!(unknown, Err(MapError::UnknownFocus("nothing".to_owned())));
    let mentioned_names = vec!["nothing".to_owned(), "./other.py".to_owned()];
    assert_eq!(map(&FILES, &MapRequest { mentioned_names, ..request(60) }).unwrap().text, near("other.py"));
}

#[test]
fn mentioned_name_that_many_files_define_is_ignored() {
    let files: Vec<(String, String)> =
        (0..17).map(|n| (format!("f{n:02}.py"), format!("def new(): pass\ndef only_{n}(): pass\n"))).collect();
    let files: Vec<(&str, &str)> = files.iter().map(|(path, text)| (path.as_str(), text.as_str())).collect();
    let mentioning = |name: &str| {
        let mentioned_names = vec![name.to_owned()];
        map(&files, &MapRequest { mentioned_names, ..request(60) }).unwrap().text
    };
    assert_eq!(mentioning("new"), mentioning("nothing"));
    assert!(mentioning("only_9").contains("def only_9()") && !mentioning("nothing").contains("def only_9()"));
    let few: Vec<(&str, &str)> = files[..16].to_vec();
    let mentioned = map(&few, &MapRequest { mentioned_names: vec!["new".to_owned()], ..request(60) }).unwrap().text;
    assert!(mentioned.contains("def new()"), "{mentioned}");
}

#[test]
fn odd_names_are_one_short_line_each() {
    let long = "x".repeat(600);
    let path = format!("{long}/\u{202e}a\n  1: def forged():.py");
    let map = map(&[(&path, "def real(): pass\n")], &request(256)).unwrap();
    let lines: Vec<&str> = map.text.lines().collect();
    assert_eq!(lines.len(), 3, "{}", map.text);
    assert!(lines[0].starts_with("xxx") && lines[0].contains("...") && lines[0].len() < 100, "{}", lines[0]);
    assert_eq!(lines[1], "  <U+202E>a<U+000A>  1: def forged():.py");
}

#[test]
fn many_folders_at_the_top_are_no_outline() {
    let files: Vec<(String, &str)> = (0..60)
        .map(|n| (format!("package_{n:02}/file.py"), if n == 40 { "class Queue: pass\n" } else { "Queue()\n" }))
        .collect();
    let files: Vec<(&str, &str)> = files.iter().map(|(path, text)| (path.as_str(), *text)).collect();
    let map = map(&files, &request(256)).unwrap();
    assert!(map.text.contains("package_40/\n  file.py\n    1: class Queue: pass\n"), "{}", map.text);
}

#[test]
fn empty_repository_has_an_empty_map() {
    let map = map(&[], &request(100)).unwrap();
    assert_eq!((map.text.as_str(), map.parts), ("", 1));
}

#[test]
fn part_that_does_not_exist_is_refused() {
    let refused = map(&FILES, &MapRequest { part: 2, ..request(1000) });
    assert_eq!(refused, Err(MapError::NoSuchPart { part: 2, parts: 1 }));
}

/// A repository: folders of up to three levels, with files that define and use names of a small alphabet.
fn repository() -> impl Strategy<Value = Vec<(String, String)>> {
    let name = prop::sample::select(vec!["alpha", "beta", "gamma", "delta", "epsilon"]);
    let folder = prop::sample::select(vec!["", "a/", "a/b/", "a/b/c/", "a/d/", "e/f/"]);
    let file = (folder, 0..6_u8, prop::collection::vec((name.clone(), name), 0..4));
    prop::collection::btree_map("[a-z]{1,8}", file, 0..20).prop_map(|files| {
        let mut files: Vec<(String, String)> = files
            .into_iter()
            .map(|(stem, (folder, kind, names))| {
                let extension = if kind == 0 { "txt" } else { "py" };
                let text = names.iter().map(|(defines, uses)| format!("def {defines}(): {uses}()\n")).collect();
                (format!("{folder}{stem}.{extension}"), text)
            })
            .collect();
        files.sort();
        files.dedup_by(|a, b| a.0 == b.0);
        files
    })
}

proptest! {
    /// Every part keeps the budget, and together they show each file and each definition once.
    #[test]
    fn parts_keep_the_budget_and_show_everything_once(files in repository(), max_tokens in 90..400_usize) {
        let files: Vec<(&str, &str)> = files.iter().map(|(path, text)| (path.as_str(), text.as_str())).collect();
        let first = map(&files, &request(max_tokens)).unwrap();
        let mut definitions = 0;
        for part in 1..=first.parts {
            let map = map(&files, &MapRequest { part, ..request(max_tokens) }).unwrap();
            prop_assert!(map.tokens <= max_tokens, "{map:?}");
            definitions += map.text.lines().filter(|line| line.contains(": def ")).count();
            if part == first.parts {
                prop_assert!(!map.text.contains(" more file"), "the last part leaves nothing: {map:?}");
            }
        }
        prop_assert_eq!(definitions, first.symbols);
        prop_assert_eq!(map(&files, &request(max_tokens)).unwrap(), first);
    }
}
