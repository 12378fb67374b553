//! The reports of a check: of its tests, a file or a folder with one file for each group of tests, and of the coverage,
//! a file. They are in a checkout whose content is not trusted: links are not followed, so nothing outside the checkout
//! is read or removed.

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, Dir, FileType, Mode, OFlags, ResolveFlags, fstat, openat, openat2, unlinkat};
use rustix::io::Errno;
use rustix::path::Arg;

use super::coverage_report::CoverageReport;
use super::environment::CHECKOUT_PATH;
use super::test_report::{MAX_REPORT_BYTES, ReportError, TestReport};

/// Maximum number of files of one report.
const MAX_FILES: usize = 5_000;

/// Opens a path below `folder` without following a link.
fn open(folder: impl AsFd, path: impl Arg, flags: OFlags) -> Result<OwnedFd, Errno> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    openat2(folder, path, flags | OFlags::CLOEXEC, Mode::empty(), resolve)
}

fn open_checkout(checkout: &Path) -> Result<OwnedFd, Errno> {
    openat(CWD, checkout, OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
}

/// The names of the XML files in a folder, sorted.
fn xml_files(folder: &OwnedFd) -> Result<Vec<CString>, Errno> {
    let mut names = Vec::new();
    for entry in Dir::read_from(folder)? {
        let name = entry?.file_name().to_owned();
        if name.to_bytes().ends_with(b".xml") {
            names.push(name);
        }
    }
    names.sort();
    Ok(names)
}

/// Removes the report that the commit contains, so that a check that writes none has none.
pub(super) fn remove(checkout: &Path, report: &str) -> Result<(), Errno> {
    let removed = match report.strip_suffix('/') {
        Some(folder) => open(open_checkout(checkout)?, folder, OFlags::DIRECTORY)
            .and_then(|folder| xml_files(&folder)?.into_iter().try_for_each(|name| remove_file(&folder, name))),
        None => {
            let (folder, name) = report.rsplit_once('/').unwrap_or((".", report));
            open(open_checkout(checkout)?, folder, OFlags::DIRECTORY).and_then(|folder| remove_file(&folder, name))
        }
    };
    match removed {
        // Without the folder there is no file, and behind a link none is read.
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::XDEV) => Ok(()),
        other => other,
    }
}

fn remove_file(folder: &OwnedFd, name: impl Arg) -> Result<(), Errno> {
    match unlinkat(folder, name, AtFlags::empty()) {
        // What is not a file is never read.
        Err(Errno::NOENT | Errno::ISDIR) => Ok(()),
        other => other,
    }
}

/// Reads the report that a check wrote. In a folder, XML files of another format are left out.
pub(super) fn read(checkout: &Path, report: &str) -> Result<TestReport, ReportError> {
    let path = checkout.to_string_lossy();
    let checkout = open_checkout(checkout).map_err(not_opened)?;
    let Some(folder) = report.strip_suffix('/') else {
        return TestReport::parse(&read_file(&checkout, report, MAX_REPORT_BYTES)?, &path);
    };
    let folder = open(&checkout, folder, OFlags::DIRECTORY).map_err(not_opened)?;
    let names = xml_files(&folder).map_err(not_opened)?;
    if names.len() > MAX_FILES {
        return Err(ReportError::TooManyFiles(MAX_FILES));
    }
    let (mut report, mut remaining_bytes, mut other_format) = (None, MAX_REPORT_BYTES, ReportError::Missing);
    for name in names {
        let in_file = |error| ReportError::InFile { name: visible_name(&name), error: Box::new(error) };
        let bytes = match read_file(&folder, &name, remaining_bytes) {
            // The name of a folder may end so, too.
            Err(ReportError::Folder) => continue,
            read => read.map_err(in_file)?,
        };
        remaining_bytes = remaining_bytes.saturating_sub(bytes.len() as u64);
        match TestReport::parse(&bytes, &path) {
            Ok(tests) => report.get_or_insert_with(TestReport::default).add(tests)?,
            Err(error @ (ReportError::OtherFormat(_) | ReportError::DocumentType)) => other_format = in_file(error),
            Err(error) => return Err(in_file(error)),
        }
    }
    report.ok_or(other_format)
}

/// Reads the coverage report that a check wrote.
pub(super) fn read_coverage(checkout: &Path, report: &str) -> Result<CoverageReport, ReportError> {
    let bytes = read_file(&open_checkout(checkout).map_err(not_opened)?, report, MAX_REPORT_BYTES);
    let bytes = bytes.map_err(|error| if error == ReportError::Folder { ReportError::NotAFile } else { error })?;
    CoverageReport::parse(&bytes, &[&checkout.to_string_lossy(), CHECKOUT_PATH])
}

/// A file's name that can be shown.
fn visible_name(name: &CStr) -> String {
    name.to_string_lossy().chars().filter(|c| !c.is_control()).take(100).collect()
}

fn read_file(folder: &OwnedFd, path: impl Arg, max_bytes: u64) -> Result<Vec<u8>, ReportError> {
    // Opening a pipe or device must not wait.
    let file = open(folder, path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY).map_err(not_opened)?;
    let stat = fstat(&file).map_err(not_opened)?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile => {}
        FileType::Directory => return Err(ReportError::Folder),
        _ => return Err(ReportError::NotAFile),
    }
    let mut bytes = Vec::new();
    let read = File::from(file).take(max_bytes + 1).read_to_end(&mut bytes);
    read.map_err(|error| ReportError::Unreadable(error.to_string()))?;
    if bytes.len() as u64 > max_bytes {
        return Err(ReportError::TooLarge);
    }
    Ok(bytes)
}

fn not_opened(error: Errno) -> ReportError {
    match error {
        Errno::NOENT | Errno::NOTDIR => ReportError::Missing,
        Errno::LOOP | Errno::XDEV | Errno::NXIO => ReportError::NotAFile,
        error => ReportError::Unreadable(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn only_a_regular_file_of_the_checkout_is_read() {
        let (outside, checkout) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let at = |name: &str| checkout.path().join(name);
        let report = "<testsuite><testcase name=\"a\"/></testsuite>";
        fs::write(outside.path().join("r.xml"), report).unwrap();
        assert_eq!(read(checkout.path(), "r.xml"), Err(ReportError::Missing));
        assert_eq!(read(checkout.path(), "none/r.xml"), Err(ReportError::Missing));
        symlink(outside.path().join("r.xml"), at("link.xml")).unwrap();
        symlink(outside.path(), at("folder")).unwrap();
        symlink("/dev/zero", at("zero.xml")).unwrap();
        fs::create_dir(at("d.xml")).unwrap();
        rustix::fs::mknodat(CWD, at("pipe.xml"), FileType::Fifo, Mode::from_raw_mode(0o600), 0).unwrap();
        for path in ["link.xml", "folder/r.xml", "zero.xml", "pipe.xml"] {
            assert_eq!(read(checkout.path(), path), Err(ReportError::NotAFile), "{path}");
        }
        assert_eq!(read(checkout.path(), "d.xml"), Err(ReportError::Folder));
        let large = File::create(at("large.xml")).unwrap();
        large.set_len(MAX_REPORT_BYTES + 1).unwrap();
        assert_eq!(read(checkout.path(), "large.xml"), Err(ReportError::TooLarge));
        fs::create_dir(at("out")).unwrap();
        fs::write(at("out/r.xml"), report).unwrap();
        assert_eq!(read(checkout.path(), "out/r.xml").unwrap().tests.len(), 1);
        assert_eq!(read_coverage(checkout.path(), "link.xml"), Err(ReportError::NotAFile));
        fs::write(at("lcov.info"), "SF:a\nDA:1,1\nend_of_record\n").unwrap();
        assert_eq!(read_coverage(checkout.path(), "lcov.info").unwrap().total().total, 1);
        assert_eq!(read(checkout.path(), "folder/"), Err(ReportError::NotAFile), "a link to a folder");
        assert_eq!(read(checkout.path(), "r.xml/"), Err(ReportError::Missing));
    }

    #[test]
    fn report_may_be_a_folder_of_files() {
        let checkout = tempfile::tempdir().unwrap();
        let out = checkout.path().join("out");
        fs::create_dir(&out).unwrap();
        assert_eq!(read(checkout.path(), "out/"), Err(ReportError::Missing), "no file");
        let write = |file: &str, test: &str| {
            let text = format!("<testsuite><testcase name=\"{test}\"/></testsuite>");
            fs::write(out.join(file), text).unwrap();
        };
        write("TEST-a.xml", "a");
        write("TEST-b.xml", "b");
        fs::write(out.join("notes.txt"), "x").unwrap();
        let report = read(checkout.path(), "out/").unwrap();
        assert_eq!(report.tests.keys().collect::<Vec<_>>(), ["a", "b"]);
        fs::write(out.join("testng-results.xml"), "<!DOCTYPE x><x/>").unwrap();
        assert_eq!(read(checkout.path(), "out/").unwrap().tests.len(), 2, "another format");
        symlink("/dev/zero", out.join("c.xml")).unwrap();
        let error = read(checkout.path(), "out/").unwrap_err().to_string();
        assert_eq!(error, "has an unusable file c.xml: it is not a regular file");
        remove(checkout.path(), "out/").unwrap();
        assert_eq!(read(checkout.path(), "out/"), Err(ReportError::Missing));
        assert!(out.join("notes.txt").exists() && Path::new("/dev/zero").exists());
    }

    #[test]
    fn report_of_the_commit_is_removed_and_nothing_outside() {
        let (outside, checkout) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let at = |name: &str| checkout.path().join(name);
        let target = outside.path().join("r.xml");
        fs::write(&target, "x").unwrap();
        symlink(outside.path(), at("folder")).unwrap();
        symlink(&target, at("link.xml")).unwrap();
        fs::create_dir_all(at("out/d.xml")).unwrap();
        fs::write(at("out/r.xml"), "x").unwrap();
        for path in ["folder/r.xml", "link.xml", "out/r.xml", "out/d.xml", "none/r.xml", "none.xml", "folder/"] {
            remove(checkout.path(), path).unwrap();
        }
        assert!(target.exists() && at("out/d.xml").exists());
        assert!(!at("out/r.xml").exists() && at("link.xml").symlink_metadata().is_err());
    }
}
