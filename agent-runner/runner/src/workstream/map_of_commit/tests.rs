use super::*;
use crate::workstream::testing::UserRepo;

fn request(user: &UserRepo, cache: &Path, parse_within_ms: u64) -> RepoMapRequest {
    RepoMapRequest {
        start: StartPointRequest { dir: user.path(), base: None, context_files: Vec::new() },
        map: MapRequest {
            depth: None,
            include_tests: true,
            max_tokens: 1000,
            part: 1,
            focus: Vec::new(),
            mentioned_names: Vec::new(),
        },
        cache_dir: cache.to_owned(),
        parse_within_ms,
    }
}

fn answer(request: &RepoMapRequest) -> RepoMapReply {
    request.answer(&Parsers::start().unwrap(), &StopCondition::default()).unwrap()
}

fn text(reply: RepoMapReply) -> String {
    match reply {
        RepoMapReply::Map { map, .. } => map.text,
        other => panic!("{other:?}"),
    }
}

#[test]
fn map_is_made_from_the_commit_and_again_from_the_cache() {
    let user = UserRepo::new(&[("a.py", "def first(): pass\n"), ("b.md", "# Title\n")]);
    let cache = tempfile::tempdir().unwrap();
    let first = text(answer(&request(&user, cache.path(), 60_000)));
    assert_eq!(first, "a.py\n  1: def first(): pass\nb.md\n");
    // No time to parse: everything comes from the cache.
    assert_eq!(text(answer(&request(&user, cache.path(), 0))), first);
    let repository = user.repo();
    let edited = user.commit_files(&repository, &[("a.py", "def first(): pass\n"), ("c.py", "def second(): pass\n")]);
    let mut later = request(&user, cache.path(), 0);
    later.start.base = Some(edited);
    assert_eq!(answer(&later), RepoMapReply::Unfinished { parsed: 1, files: 2 });
    later.parse_within_ms = 60_000;
    assert!(text(answer(&later)).contains("c.py\n  1: def second(): pass\n"));
    let kept: Vec<_> = fs::read_dir(cache.path()).unwrap().collect();
    assert_eq!(kept.len(), 1, "{kept:?}");
}

#[test]
fn damaged_cache_is_made_again() {
    let user = UserRepo::new(&[("a.py", "def first(): pass\n")]);
    let cache = tempfile::tempdir().unwrap();
    let first = text(answer(&request(&user, cache.path(), 60_000)));
    let file = fs::read_dir(cache.path()).unwrap().next().unwrap().unwrap().path().join(CACHE_FILE);
    fs::write(&file, b"damaged").unwrap();
    assert_eq!(text(answer(&request(&user, cache.path(), 60_000))), first);
    assert_eq!(text(answer(&request(&user, cache.path(), 0))), first, "it is stored again");
}

/// With another cache, or none, the map is the same.
#[test]
fn link_and_missing_file_have_no_definitions() {
    let user = UserRepo::new(&[("a.py", "def first(): pass\n"), ("b.py", "def second(): pass\n")]);
    let repository = user.repo();
    let cache = tempfile::tempdir().unwrap();
    text(answer(&request(&user, cache.path(), 60_000)));
    let base = repository.revparse_single(&user.base).unwrap().peel_to_commit().unwrap();
    let same = base.tree().unwrap().get_name("a.py").unwrap().id();
    // As in a partial clone: git itself would not write a tree with a missing object.
    let mut tree = b"120000 link.py\0".to_vec();
    tree.extend(same.as_bytes());
    tree.extend(b"100644 missing.py\0");
    tree.extend([0x12; 20]);
    let tree = repository.odb().unwrap().write(git2::ObjectType::Tree, &tree).unwrap();
    let commit = crate::workstream::testing::commit_tree(&repository, tree);
    let mut later = request(&user, cache.path(), 60_000);
    later.start.base = Some(commit.to_string());
    assert_eq!(text(answer(&later)), "link.py\nmissing.py\n");
}

#[test]
fn old_partial_files_are_removed() {
    let folder = tempfile::tempdir().unwrap();
    let (old, new) = (folder.path().join("1-1.partial"), folder.path().join("2-2.partial"));
    fs::write(&new, "").unwrap();
    let opened = File::create(&old).unwrap();
    let created = opened.metadata().unwrap().modified().unwrap();
    opened.set_modified(created - 2 * MAX_PARTIAL_AGE).unwrap();
    remove_old_partial_files(&folder.path().join(CACHE_FILE));
    assert!(new.exists() && !old.exists());
}

#[test]
fn unknown_focus_is_refused_with_the_reason() {
    let user = UserRepo::new(&[("a.py", "def first(): pass\n")]);
    let cache = tempfile::tempdir().unwrap();
    let mut unknown = request(&user, cache.path(), 60_000);
    unknown.map.focus = vec!["second".to_owned()];
    let RepoMapReply::Refused { reason } = answer(&unknown) else { panic!() };
    assert!(reason.contains("\"second\""), "{reason}");
}
