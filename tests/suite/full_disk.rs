//! The data folder's file system is full: from the start, and in the middle of the work. What was accepted is kept, what
//! cannot be is refused in words, and work goes on when there is room again.

use std::io::Write;
use std::path::Path;
use std::time::Duration;

use cfq_proto::client::Client;
use cfq_proto::http::TaskDetail;
use cfq_proto::ids::{TaskId, TaskKey};
use cfq_proto::looping::EscalationAction;
use cfq_proto::task::{TaskSpec, TaskState};
use cfq_tests::cluster::PATIENCE;
use cfq_tests::repo::UserRepo;
use cfq_tests::room::Room;
use cfq_tests::scripted::{Reply, file, review};
use cfq_tests::up::{Home, Up};
use cfq_tests::{binary, wait};

const ADD: &str = "def add(a, b):\n    return a + b";

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_too_small_from_the_start_is_said_with_the_way_out() {
    let home = Home::new().await;
    let disk = home.path("disk");
    std::fs::create_dir(&disk).unwrap();
    // Nothing fits; initdb's work does not; initdb's does, and the database does not.
    for mib in [1, 24, 40] {
        let Some(room) = Room::small(&disk, mib) else { return };
        let data = disk.join("data");
        let refused = home.up_fails(Some(room.command(&binary::cfq())), &data, &[]);
        let said = String::from_utf8_lossy(&refused.stderr);
        assert_eq!(refused.status.code(), Some(4), "{mib} MiB: {said}");
        assert!(said.contains("no space is left") && said.contains("CFQ_DATA"), "{mib} MiB: {said}");
        assert!(!said.contains("panicked"), "{mib} MiB: {said}");
        let left = std::fs::read_dir(room.path(&data).join("run")).map_or(0, |run| {
            run.flatten().filter(|entry| entry.path().extension().is_some_and(|e| e == "pid")).count()
        });
        assert_eq!(left, 0, "{mib} MiB: a process was left");
    }
}

/// Longer than a lease and than the generation: its result comes while nothing can be written.
const FULL_FOR: Duration = Duration::from_secs(4);

/// Writes until nothing more fits.
fn fill(path: &Path) {
    let mut file = std::fs::File::create(path).unwrap();
    for size in [1 << 20, 4096] {
        while file.write_all(&vec![7; size]).is_ok() {}
    }
}

/// 2^64 divided by the golden ratio: its multiples look random.
const ODD: u64 = 0x9e37_79b9_7f4a_7c15;

fn spec(repo: &UserRepo, more: &str) -> TaskSpec {
    serde_json::from_value(serde_json::json!({
        "description": format!("Write add(a, b) in add.py. {more}"), "language": "python", "repo": repo.path(),
        "base": repo.fingerprint().commit,
    }))
    .unwrap()
}

async fn rests(up: &Up, api: &Client, task: TaskId) -> TaskDetail {
    wait::until("an accepted task to rest", PATIENCE, || async {
        let detail = api.task(TaskKey::Id(task)).await.map_err(|e| e.to_string())?;
        let rests = detail.summary.state.is_resting();
        if rests { Ok(detail) } else { Err(format!("{:?}\n{}", detail.summary, up.story())) }
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_fills_up_in_the_middle_loses_nothing_that_was_accepted() {
    let home = Home::new().await;
    let disk = home.path("disk");
    std::fs::create_dir(&disk).unwrap();
    let Some(room) = Room::small(&disk, 160) else { return };
    home.models.script("alpha", vec![Reply::Slow(file("add.py", ADD), Duration::from_millis(100))]);
    home.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    let data = disk.join("data");
    let up = Up::start(&home, Some(room.command(&binary::cfq())), &data, room.path(&data));
    let api = up.client().await;
    let repo = UserRepo::with_uncommitted_changes();
    let before = repo.fingerprint();
    let mut accepted = vec![api.submit(&spec(&repo, ""), Some("first")).await.unwrap().id];
    wait::until("a call to the model", PATIENCE, || async {
        if home.models.calls("alpha") > 0 { Ok(()) } else { Err("none".to_owned()) }
    })
    .await;

    let ballast = room.path(&disk.join("ballast"));
    fill(&ballast);
    let mut refused = None;
    for n in 0..200_u64 {
        // Does not shrink when it is compressed.
        let words: String = (1..400).map(|i| format!("{:016x}", (n * 400 + i).wrapping_mul(ODD))).collect();
        match api.submit(&spec(&repo, &words), Some(&format!("k{n}"))).await {
            Ok(reply) => accepted.push(reply.id),
            Err(error) => {
                refused = Some((n, words, error.to_string()));
                break;
            }
        }
    }
    let (n, words, said) = refused.expect("a full disk takes no more");
    assert!(said.contains("cfq doctor"), "{said}");
    tokio::time::sleep(FULL_FOR).await;

    std::fs::remove_file(&ballast).unwrap();
    let again = wait::until("the refused one to be accepted", PATIENCE, || async {
        api.submit(&spec(&repo, &words), Some(&format!("k{n}"))).await.map_err(|e| format!("{e}\n{}", up.story()))
    })
    .await;
    accepted.push(again.id);
    for id in &accepted {
        let mut detail = rests(&up, &api, *id).await;
        if detail.summary.state == TaskState::Escalated {
            // Its files did not fit either, for longer than the runner tries by itself: a human is told what was wrong, and
            // now that it is mended says to go on.
            assert!(detail.reason.contains("No space left"), "{}", detail.reason);
            let action =
                EscalationAction::RetryWithConstraints { additional_constraints: vec!["no imports".to_owned()] };
            api.resolve(TaskKey::Id(*id), action).await.unwrap();
            detail = rests(&up, &api, *id).await;
        }
        assert_eq!(detail.summary.state, TaskState::Merged, "{}: {}", detail.summary.number, detail.reason);
    }
    assert_eq!(api.tasks(None, 500).await.unwrap().tasks.len(), accepted.len(), "no task was made twice");
    assert_eq!(repo.fingerprint(), before);
    let status = up.stop().await;
    assert!(status.success(), "{status}");
}
