use super::*;
use crate::workstream::testing::UserRepo;

fn request(user: &UserRepo, cache: &Path, parse_within_ms: u64) -> RepoMapRequest {
    RepoMapRequest {
        start: StartPointRequest { dir: user.path(), base: None, context_files: Vec::new() },
        map: MapRequest { depth: None, include_tests: true, max_tokens: 1000, part: 1, focus: Vec::new() },
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
    let file = fs::read_dir(cache.path()).unwrap().next().unwrap().unwrap().path();
    fs::write(&file, b"damaged").unwrap();
    assert_eq!(text(answer(&request(&user, cache.path(), 60_000))), first);
    assert_eq!(text(answer(&request(&user, cache.path(), 0))), first, "it is stored again");
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
