//! Files of a project's tests, recognized by their path.

/// Words of a path that mark a test file.
const TEST_WORDS: [&str; 8] =
    ["test", "tests", "testutil", "testutils", "testdata", "unittest", "unittests", "conftest"];
/// Folders of test files.
const TEST_FOLDERS: [&str; 5] = ["spec", "specs", "fixtures", "__snapshots__", "__mocks__"];

/// Whether a file belongs to the tests, by the words of its path: `tests/a.py`, `src/a_test.go`, `a.spec.ts`,
/// `QueueTest.java`.
pub(crate) fn is_test_path(path: &str) -> bool {
    let (folders, name) = path.rsplit_once('/').unwrap_or(("", path));
    if folders.split('/').any(|folder| TEST_FOLDERS.contains(&folder))
        || name.contains(".spec.")
        || name.ends_with("_spec.rb")
    {
        return true;
    }
    let mut word = String::new();
    let mut previous_is_lower = false;
    for character in path.chars().chain(['/']) {
        if !character.is_alphanumeric() || (character.is_uppercase() && previous_is_lower) {
            if TEST_WORDS.contains(&word.as_str()) {
                return true;
            }
            word.clear();
        }
        if character.is_alphanumeric() {
            word.extend(character.to_lowercase());
        }
        previous_is_lower = character.is_lowercase();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_are_recognized_by_the_words_of_their_path() {
        for (path, expected) in [
            ("tests/a.py", true),
            ("src/test_a.py", true),
            ("a_test.go", true),
            ("a.spec.ts", true),
            ("src/main/java/QueueTest.java", true),
            ("src/main/java/Latest.java", false),
            ("contest/a.py", false),
            ("src/inspect.py", false),
            ("attest.rs", false),
            ("spec/models/a_spec.rb", true),
            ("vllm/spec_decode/eagle.py", false),
            ("src/task_spec.py", false),
            ("src/testing.py", false),
        ] {
            assert_eq!(is_test_path(path), expected, "{path}");
        }
    }
}
