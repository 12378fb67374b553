//! Tests of `cfq submit --watch` and `cfq watch` on a terminal: the generated text and the status line below it do not
//! overwrite each other, and no status line is left at the end.

use std::process::Command;
use std::time::Duration;

use cfq_proto::task::TaskState;
use cfq_tests::binary;
use cfq_tests::cluster::{Cluster, TOKEN, WAIT_LIMIT};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, file, review};
use cfq_tests::terminal::Terminal;
use cfq_tests::wait;

/// Code with lines of different lengths, some wider than the terminal.
fn code() -> String {
    let numbered = |n: usize| format!("    # {n} {}\n", "counting words ".repeat(n % 9));
    format!("def add(a, b):\n{}    return a + b", (1..30).map(numbered).collect::<String>())
}

async fn generating(delay: Duration) -> (Cluster, UserRepo) {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![Reply::Slow(file("add.py", &code()), delay)]);
    cluster.models.script("beta", vec![Reply::Text(review(95, &[]))]);
    (cluster, UserRepo::with_uncommitted_changes())
}

fn cfq(cluster: &Cluster, args: &[&str]) -> Command {
    let mut command = Command::new(binary::cfq());
    command.args(args).env("CFQ_URL", cluster.client.url()).env("CFQ_TOKEN", TOKEN).env_remove("CFQ_LOG");
    command
}

fn words(text: &str) -> Vec<&str> {
    text.split_whitespace().filter(|word| *word != "|").collect()
}

/// Whether the text contains a status line, by the braille patterns of its spinner, which no other text here has.
fn has_status(text: &str) -> bool {
    text.contains(|c| ('\u{2800}'..='\u{28ff}').contains(&c))
}

#[tokio::test(flavor = "multi_thread")]
async fn watch_leaves_its_lines_and_no_status_line() {
    for columns in [40, 100] {
        let (cluster, repo) = generating(Duration::from_millis(5)).await;
        let path = repo.path();
        let submit = ["submit", "Write add", "--language", "python", "--watch", "--repo", path.to_str().unwrap()];
        let terminal = Terminal::run(cfq(&cluster, &submit), columns);
        wait::until("a status with the tokens written", WAIT_LIMIT, || async {
            let rows = terminal.rows();
            if rows.iter().any(|row| has_status(row) && row.contains("tok")) { Ok(()) } else { Err(rows.join("\n")) }
        })
        .await;
        let (code_of_exit, rows) = terminal.wait_for_exit(WAIT_LIMIT).await;
        let all = rows.join("\n");
        assert_eq!(code_of_exit, Some(0), "{all}");
        // Every word of each model's text appears once and in order, between the line of its role and the next line of
        // another kind.
        let of = |role: &str| {
            let begin = rows.iter().position(|row| row.trim_start().starts_with(&format!("{role} "))).unwrap();
            let rest = rows[begin + 1..].iter().take_while(|row| row.starts_with("        |"));
            let first = rows[begin].split_once('|').unwrap().1.to_owned();
            let rest = rest.map(|row| row.split_once('|').unwrap().1.to_owned());
            std::iter::once(first).chain(rest).collect::<Vec<_>>().join("\n")
        };
        let alpha = file("add.py", &code());
        assert_eq!(words(&of("alpha")), words(&alpha), "{all}");
        // The report as lines: its score and its suggestion.
        assert_eq!(words(&of("beta")), ["score", "95", "suggested", "explain", "more"], "{all}");
        assert!(rows.iter().all(|row| row.chars().count() <= usize::from(columns)), "{all}");
        assert!(!has_status(&all), "{all}");
        assert!(all.contains("delivered as branch"), "{all}");
        assert!(rows[rows.len() - 3..].iter().any(|row| row.contains("cfq show t1")), "{all}");
        assert!(
            all.contains("merge them: git merge cfq/t1-") || all.contains("merge them:\ngit merge cfq/t1-"),
            "{all}"
        );
        cluster.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_ends_watch_and_not_the_task() {
    let (cluster, repo) = generating(Duration::from_millis(25)).await;
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let mut terminal = Terminal::run(cfq(&cluster, &["watch", "t1"]), 80);
    terminal.wait_for_text("generating ~", WAIT_LIMIT).await;
    terminal.send_keys(b"\x03");
    let (code_of_exit, rows) = terminal.wait_for_exit(WAIT_LIMIT).await;
    let all = rows.join("\n");
    assert_eq!(code_of_exit, Some(130), "{all}");
    let notice = rows.iter().position(|row| row.contains("no longer watching")).unwrap();
    assert!(rows[notice - 1].starts_with("        |") || rows[notice - 1].starts_with("  alpha |"), "{all}");
    assert!(!has_status(&all) && !all.contains("^C"), "{all}");
    assert_eq!(cluster.wait_until_settled(task).await.summary.state, TaskState::Merged);
    cluster.finish().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn top_follows_the_cluster_and_leaves_the_terminal_as_it_was() {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![Reply::Hang]);
    let repo = UserRepo::with_uncommitted_changes();
    let top = |columns| Terminal::run(cfq(&cluster, &["top"]), columns);
    let (mut wide, mut narrow) = (top(100), top(40));
    wide.wait_for_text("none open", WAIT_LIMIT).await;
    let task = cluster.submit(&cluster.spec(&repo)).await;
    cluster.wait_until_generating(task).await;
    for terminal in [&wide, &narrow] {
        terminal.wait_for_text("1 running, 0 waiting", WAIT_LIMIT).await;
        terminal.wait_for_text("t1 ", WAIT_LIMIT).await;
    }
    cluster.stop("scheduler").await;
    wide.wait_for_text("no server responds", WAIT_LIMIT).await;
    // Keys are read while the server does not respond. An unknown key has no effect.
    narrow.send_keys(b"x\x03");
    let (code, rows) = narrow.wait_for_exit(WAIT_LIMIT).await;
    assert_eq!((code, rows), (Some(130), vec![]));
    cluster.start_service("scheduler");
    wide.wait_for_text("is ready, up for", WAIT_LIMIT).await;
    wide.send_keys(b"q");
    let (code, rows) = wide.wait_for_exit(WAIT_LIMIT).await;
    assert_eq!((code, rows), (Some(0), vec![]));
    cluster.finish().await;
}
