//! Helpers of the tests of files that have other owners.

use std::os::unix::fs::MetadataExt;
use std::path::Path;

pub fn owner(path: &Path) -> u32 {
    std::fs::symlink_metadata(path).unwrap().uid()
}

/// True if this test runs as root; otherwise reports the test as skipped.
pub fn is_root(test: &str) -> bool {
    let root = rustix::process::geteuid().is_root();
    if !root {
        cfq_test_skip::skip(test, "only root can change the owner of a file");
    }
    root
}
