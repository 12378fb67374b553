//! Reports parts of tests that cannot run on this machine.
//!
//! With libtest a running test cannot be marked as skipped: a test that returns early counts as passed. Such a test
//! calls [`skip`] before it returns. `.ci/run` lists and counts the skipped parts, and fails if `.ci/allowed-skips`
//! does not allow one of them.

use std::fs::OpenOptions;
use std::io::{self, Write};
use std::path::Path;

/// Environment variable with the path of the file that [`skip`] appends to.
pub const FILE_VARIABLE: &str = "CFQ_SKIPS";

/// Reports a skipped part: the reason on stderr, and a line `package<TAB>id<TAB>reason` in the file that `CFQ_SKIPS`
/// names, if it is set. `id` is the name of the test, with `/part` appended if the rest of the test runs.
///
/// # Panics
/// If the file cannot be written, because a skip must not be lost.
pub fn skip(id: &str, reason: &str) {
    // `eprintln!` would be captured and shown for failed tests only.
    drop(writeln!(io::stderr(), "skipped {id}: {reason}"));
    let Some(file) = std::env::var_os(FILE_VARIABLE) else { return };
    // cargo sets the package name for the tests that it runs.
    let package = std::env::var("CARGO_PKG_NAME").unwrap_or_else(|_| "unknown".to_owned());
    let appended = append(Path::new(&file), &line(&package, id, reason));
    assert!(appended.is_ok(), "cannot record a skip in {}: {appended:?}", Path::new(&file).display());
}

/// The line that reports a skipped part. Each run of white space in the reason (which may be another program's error
/// message) becomes one blank.
fn line(package: &str, id: &str, reason: &str) -> String {
    let reason: Vec<&str> = reason.split_whitespace().collect();
    format!("{package}\t{id}\t{}\n", reason.join(" "))
}

/// Appends the line with a single write, because tests in several threads and processes share the file.
fn append(file: &Path, line: &str) -> io::Result<()> {
    OpenOptions::new().create(true).append(true).open(file)?.write_all(line.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn skips_are_appended_one_per_line() {
        let file = std::env::temp_dir().join(format!("cfq-test-skip-{}", std::process::id()));
        for (id, reason) in [("first", "no mount:\n\tnot permitted\n"), ("second/part", "no AVX-512")] {
            append(&file, &line("cfq-tests", id, reason)).unwrap();
        }
        let text = std::fs::read_to_string(&file).unwrap();
        std::fs::remove_file(&file).unwrap();
        assert_eq!(text, "cfq-tests\tfirst\tno mount: not permitted\ncfq-tests\tsecond/part\tno AVX-512\n");
    }
}
