//! Tests that the files named in ARCHITECTURE.md exist, and that each word of its table occurs in the file listed for
//! the word.

use std::path::{Path, PathBuf};

/// The workspace's root folder.
pub fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn architecture() -> String {
    std::fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap()
}

/// The first two cells of each row of the table under `heading`, without the two header lines.
fn table(heading: &str) -> Vec<(String, String)> {
    let text = architecture();
    let (_, section) = text.split_once(heading).unwrap_or_else(|| panic!("no section {heading}"));
    let rows = section.lines().skip_while(|line| !line.starts_with('|')).take_while(|line| line.starts_with('|'));
    let cells = rows.skip(2).map(|line| {
        let mut cells = line.trim_matches('|').split('|').map(str::trim);
        (cells.next().unwrap().to_owned(), cells.next().unwrap().to_owned())
    });
    cells.collect()
}

/// Whether a case-insensitive grep for `word` finds a line of `text`.
fn grep_finds(text: &str, word: &str) -> bool {
    text.to_lowercase().lines().any(|line| line.contains(&word.to_lowercase()))
}

#[test]
fn words_of_the_table_are_found_in_their_files() {
    let rows = table("## Find it by its word");
    assert!(rows.len() >= 40, "{} words", rows.len());
    for (word, file) in rows {
        let text = std::fs::read_to_string(root().join(&file)).unwrap_or_else(|error| panic!("{file}: {error}"));
        assert!(grep_finds(&text, &word), "{file} does not contain {word:?}");
    }
}

#[test]
fn files_of_decisions_exist() {
    for (question, files) in table("## Where decisions are made") {
        let named: Vec<&str> = files.split([' ', ',', ';']).filter(|word| word.contains("/src/")).collect();
        assert!(!named.is_empty(), "{question} names no file");
        for file in named {
            let found = [root().join(file), root().join("inference-node").join(file)].iter().any(|path| path.exists());
            assert!(found, "{question}: there is no {file}");
        }
    }
}
