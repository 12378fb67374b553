//! Tests of checkouts that are used again.

use std::os::unix::fs::{PermissionsExt, symlink};

use super::*;
use crate::workstream::testing::{UserRepo, file};
use crate::workstream::{CommitPlan, Mirror, check_out};

struct Fixture {
    _user: UserRepo,
    data: tempfile::TempDir,
    mirror: Mirror,
    base: String,
    /// The base with a changed, an added and a removed file.
    other: String,
}

impl Fixture {
    fn new() -> Self {
        let all = [("a.py", "x = 1\n"), ("b.py", "y\n"), ("d/c.py", "z\n"), ("d/e/f.py", "w\n")];
        let user = UserRepo::new(&all);
        // Not on tmpfs, where nothing counts as unchanged.
        let data = tempfile::tempdir_in("/var/tmp").unwrap();
        let mirror = Mirror::open(data.path(), &user.path()).unwrap();
        mirror.fetch_base(&user.base).unwrap();
        let files =
            [file("a.py", "x = 2\n"), file("n/g.py", "v\n"), cfq_proto::loop_step::ArtifactFile::removed("d/c.py")];
        let plan = CommitPlan { base: &user.base, files: &files, parent: &user.base, message: "m", time: 5 };
        let other = mirror.commit(&plan).unwrap();
        Self { base: user.base.clone(), other, _user: user, data, mirror }
    }

    fn check_out(&self, commit: &str, before: CheckedOut) -> CheckedOut {
        check_out(&self.mirror, &self.folder(), commit, Some(before)).unwrap()
    }

    fn folder(&self) -> PathBuf {
        self.data.path().join("work")
    }

    /// Whether unchanged files are kept here.
    fn keeps_files(&self) -> bool {
        let kept = rustix::fs::statfs(self.data.path()).unwrap();
        TRUSTED_FILE_SYSTEMS.contains(&kept.f_type)
    }

    /// The content of the folder, and that of a new checkout.
    fn compare(&self, commit: &str) -> (Vec<String>, Vec<String>) {
        let new = self.data.path().join("new");
        check_out(&self.mirror, &new, commit, None).unwrap();
        let content = (content(&self.folder()), content(&new));
        fs::remove_dir_all(new).unwrap();
        content
    }
}

/// Path, mode, and content of everything below a folder.
fn content(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut open = vec![folder.to_owned()];
    while let Some(next) = open.pop() {
        for entry in fs::read_dir(&next).unwrap() {
            let path = entry.unwrap().path();
            let metadata = fs::symlink_metadata(&path).unwrap();
            let text = match metadata.is_dir() {
                true => String::new(),
                false => fs::read_to_string(&path).unwrap_or_else(|error| error.to_string()),
            };
            found.push(format!("{} {:o} {text}", path.strip_prefix(folder).unwrap().display(), metadata.mode()));
            if metadata.is_dir() {
                open.push(path);
            }
        }
    }
    found.sort();
    found
}

fn inode(path: &Path) -> u64 {
    fs::symlink_metadata(path).unwrap().ino()
}

/// Writes `content` of the same length to a file, and sets its former modification time again.
fn forge(path: &Path, content: &str) {
    let modified = fs::metadata(path).unwrap().modified().unwrap();
    fs::write(path, content).unwrap();
    fs::File::options().write(true).open(path).unwrap().set_modified(modified).unwrap();
}

#[test]
fn only_what_differs_between_commits_is_written() {
    let fixture = Fixture::new();
    let first = fixture.check_out(&fixture.base, CheckedOut::default());
    let (same, changed) = (fixture.folder().join("d/e/f.py"), fixture.folder().join("a.py"));
    let before = (inode(&same), inode(&changed));
    fixture.check_out(&fixture.other, first);
    let (found, new) = fixture.compare(&fixture.other);
    assert_eq!(found, new);
    if fixture.keeps_files() {
        assert_eq!(inode(&same), before.0, "an unchanged file is kept");
    }
    assert_eq!(fs::read_to_string(changed).unwrap(), "x = 2\n");
}

/// Everything that a program can do to a checkout is undone.
#[test]
fn changes_of_a_program_are_undone() {
    type Change = (&'static str, fn(&Path));
    let changes: [Change; 17] = [
        ("content", |root| fs::write(root.join("b.py"), "other\n").unwrap()),
        ("content of the same length", |root| fs::write(root.join("b.py"), "n\n").unwrap()),
        ("content with the former time", |root| forge(&root.join("b.py"), "n\n")),
        ("removed", |root| fs::remove_file(root.join("d/c.py")).unwrap()),
        ("another file", |root| fs::write(root.join("d/conftest.py"), "x").unwrap()),
        ("hidden file", |root| fs::write(root.join(".x"), "x").unwrap()),
        ("repository in a new folder", |root| {
            fs::create_dir_all(root.join("new/.git/objects")).unwrap();
            fs::write(root.join("new/.git/HEAD"), "ref: refs/heads/main\n").unwrap();
            fs::write(root.join("new/conftest.py"), "x").unwrap();
        }),
        ("ignored file", |root| {
            fs::write(root.join(".gitignore"), "*.x\n").unwrap();
            fs::write(root.join("d/i.x"), "x").unwrap();
        }),
        ("executable", |root| fs::set_permissions(root.join("b.py"), fs::Permissions::from_mode(0o755)).unwrap()),
        ("folder without rights", |root| {
            fs::set_permissions(root.join("d"), fs::Permissions::from_mode(0o000)).unwrap();
        }),
        ("folder with other rights", |root| {
            fs::set_permissions(root.join("d"), fs::Permissions::from_mode(0o2777)).unwrap();
        }),
        ("link instead of a file", |root| {
            fs::remove_file(root.join("b.py")).unwrap();
            symlink("a.py", root.join("b.py")).unwrap();
        }),
        ("link instead of a folder", |root| {
            fs::rename(root.join("d"), root.join("moved")).unwrap();
            symlink("moved", root.join("d")).unwrap();
        }),
        ("folder instead of a file", |root| {
            fs::remove_file(root.join("b.py")).unwrap();
            fs::create_dir(root.join("b.py")).unwrap();
        }),
        ("swapped files", |root| {
            fs::rename(root.join("a.py"), root.join("t")).unwrap();
            fs::rename(root.join("b.py"), root.join("a.py")).unwrap();
            fs::rename(root.join("t"), root.join("b.py")).unwrap();
        }),
        ("second name of a file", |root| fs::hard_link(root.join("b.py"), root.join("d/b.py")).unwrap()),
        ("everything removed", |root| {
            for entry in fs::read_dir(root).unwrap() {
                cfq_sandbox::remove_folder(&entry.unwrap().path()).ok();
            }
        }),
    ];
    let fixture = Fixture::new();
    let mut checked_out = fixture.check_out(&fixture.base, CheckedOut::default());
    for (what, change) in changes {
        for commit in [&fixture.base, &fixture.other, &fixture.base] {
            change(&fixture.folder());
            checked_out = fixture.check_out(commit, checked_out);
            let (found, new) = fixture.compare(commit);
            assert_eq!(found, new, "{what}");
            // The next change needs the files of the base.
            checked_out = fixture.check_out(&fixture.base, checked_out);
        }
    }
}

#[test]
fn what_a_program_added_is_not_kept() {
    let fixture = Fixture::new();
    let checked_out = fixture.check_out(&fixture.base, CheckedOut::default());
    fs::create_dir_all(fixture.folder().join("target/debug")).unwrap();
    fs::write(fixture.folder().join("target/debug/large"), "x").unwrap();
    fs::write(fixture.folder().join("a.py"), "changed").unwrap();
    checked_out.clean(&fixture.folder()).unwrap();
    let left = content(&fixture.folder());
    assert!(left.iter().all(|file| !file.contains("target") && !file.contains("a.py")), "{left:?}");
    assert_eq!(left.is_empty(), !fixture.keeps_files());
}

/// Names that libgit2 takes for patterns, and a tree without entries, for which git makes no folder.
#[test]
fn unusual_names_and_empty_trees_are_checked_out() {
    let names = ["foo\\x2dbar.service", "d\\e/f.txt", "*.txt", "[a]", "!x", "#y", "sp ace"];
    let all: Vec<(&str, &str)> = names.iter().map(|name| (*name, "1\n")).collect();
    let user = UserRepo::new(&all);
    let data = tempfile::tempdir_in("/var/tmp").unwrap();
    let mirror = Mirror::open(data.path(), &user.path()).unwrap();
    mirror.fetch_base(&user.base).unwrap();
    let repository = mirror.repository().unwrap();
    let base = repository.find_commit(user.base.parse().unwrap()).unwrap();
    let empty = repository.treebuilder(None).unwrap().write().unwrap();
    let mut tree = repository.treebuilder(Some(&base.tree().unwrap())).unwrap();
    tree.insert("empty", empty, 0o040_000).unwrap();
    let tree = repository.find_tree(tree.write().unwrap()).unwrap();
    let author = base.author();
    let with_empty = repository.commit(None, &author, &author, "m", &tree, &[&base]).unwrap().to_string();
    let (work, new) = (data.path().join("work"), data.path().join("new"));
    check_out(&mirror, &new, &with_empty, None).unwrap();
    let expected = content(&new);
    let mut checked_out = CheckedOut::default();
    for name in names {
        checked_out = check_out(&mirror, &work, &with_empty, Some(checked_out)).unwrap();
        assert_eq!(content(&work), expected);
        fs::remove_file(work.join(name)).unwrap();
    }
    check_out(&mirror, &work, &user.base, Some(checked_out)).unwrap();
    assert_eq!(content(&work), expected);
}

#[test]
fn folder_that_the_checkout_did_not_make_is_emptied() {
    let fixture = Fixture::new();
    let folder = fixture.folder();
    let checked_out = fixture.check_out(&fixture.base, CheckedOut::default());
    // All files are the same, but the folder is another one.
    fs::rename(&folder, fixture.data.path().join("moved")).unwrap();
    fs::create_dir(&folder).unwrap();
    fs::write(folder.join("stray"), "x").unwrap();
    fixture.check_out(&fixture.base, checked_out);
    let (found, new) = fixture.compare(&fixture.base);
    assert_eq!(found, new);
}
