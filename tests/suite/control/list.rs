//! Test of `cfq ls`: filters, order and pages.

use cfq_proto::http::TaskList;

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn list_is_filtered_sorted_and_continued_page_by_page() {
    let cluster = Cluster::start().await;
    let home = tempfile::tempdir().unwrap();
    let run = |args: &[&str]| cfq(&cluster, home.path(), args);
    cluster.stop("runner").await;
    assert!(stdout(&run(&["ls"])).contains("cfq submit"));
    // t1 to t12: every third one is paused, the priorities alternate between P0 and P1.
    cluster
        .database
        .raw(
            "insert into tasks (id, body_hash, spec, title, state, priority, threshold, max_iterations)
             select gen_random_uuid(), 'h', '{}', 'many', case n % 3 when 0 then 'paused' else 'ready' end, n % 2, 85, 5
             from generate_series(1, 12) as n",
        )
        .await;
    let numbers = |args: &[&str]| -> Vec<i64> {
        let list: TaskList = cfq_tests::cli_json::parse(&stdout(&run(&[&["--json", "ls"], args].concat())));
        list.tasks.iter().map(|task| task.number.0).collect()
    };
    assert_eq!(numbers(&[]), (1..=12).rev().collect::<Vec<_>>());
    assert_eq!(numbers(&["--state", "paused"]), [12, 9, 6, 3]);
    assert_eq!(numbers(&["--state", "paused,ready", "--priority", "P0", "--sort", "oldest"]), [2, 4, 6, 8, 10, 12]);
    assert_eq!(numbers(&["--sort", "priority"]), [2, 4, 6, 8, 10, 12, 1, 3, 5, 7, 9, 11]);
    assert!(stdout(&run(&["ls", "--state", "merged"])).contains("no such tasks"));

    // Each page names the command that prints the next one.
    let (mut args, mut seen) = (vec!["ls".to_owned(), "--sort=priority".into(), "--limit=5".into()], Vec::new());
    for left in ["5 of 12 tasks, next:", "2 more, next:", ""] {
        let page = run(&args.iter().map(String::as_str).collect::<Vec<_>>());
        seen.extend(stdout(&page).lines().skip(1).map(|line| line.split(' ').next().unwrap().to_owned()));
        let errors = String::from_utf8_lossy(&page.stderr).into_owned();
        assert!(errors.starts_with(left) && errors.is_empty() == left.is_empty(), "{errors}");
        if let Some((_, command)) = errors.trim().split_once("next: cfq ") {
            args = command.split(' ').map(str::to_owned).collect();
        }
    }
    assert_eq!(seen, ["t2", "t4", "t6", "t8", "t10", "t12", "t1", "t3", "t5", "t7", "t9", "t11"]);
    refused(&run(&["ls", "--sort", "title"]), 2, &["title", "newest, oldest or priority"]);
    refused(&run(&["ls", "--after", "t3"]), 2, &["t3", "P2.t42"]);
    refused(&run(&["ls", "--state", "runing"]), 2, &["runing"]);
    cluster.finish().await;
}
