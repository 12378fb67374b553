//! Watching a run on a terminal: the text a model writes and the status line under it do not garble each other, and what is
//! left behind is clean.

use std::process::Command;
use std::time::Duration;

use cfq_proto::task::TaskState;
use cfq_tests::binary;
use cfq_tests::cluster::{Cluster, PATIENCE, TOKEN};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, file, review};
use cfq_tests::terminal::Terminal;
use cfq_tests::wait;

/// Lines of all lengths, some wider than the terminal.
fn code() -> String {
    let numbered = |n: usize| format!("    # {n} {}\n", "counting words ".repeat(n % 9));
    format!("def add(a, b):\n{}    return a + b", (1..30).map(numbered).collect::<String>())
}

async fn writing(wait: Duration) -> (Cluster, UserRepo) {
    let cluster = Cluster::start().await;
    cluster.models.script("alpha", vec![Reply::Slow(file("add.py", &code()), wait)]);
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

/// Its spinner is drawn with braille patterns, which nothing else here uses.
fn has_status(text: &str) -> bool {
    text.contains(|c| ('\u{2800}'..='\u{28ff}').contains(&c))
}

#[tokio::test(flavor = "multi_thread")]
async fn a_run_leaves_its_lines_and_no_status_behind() {
    for columns in [40, 100] {
        let (cluster, repo) = writing(Duration::from_millis(5)).await;
        let path = repo.path();
        let submit = ["submit", "Write add", "--language", "python", "--watch", "--repo", path.to_str().unwrap()];
        let terminal = Terminal::run(cfq(&cluster, &submit), columns);
        wait::until("a status with the tokens written", PATIENCE, || async {
            let rows = terminal.rows();
            if rows.iter().any(|row| has_status(row) && row.contains("tok")) { Ok(()) } else { Err(rows.join("\n")) }
        })
        .await;
        let (code_of_exit, rows) = terminal.end(PATIENCE).await;
        let all = rows.join("\n");
        assert_eq!(code_of_exit, Some(0), "{all}");
        // Every word of both models once, in order, between the lines before and after.
        let of = |role: &str| {
            let begin = rows.iter().position(|row| row.trim_start().starts_with(&format!("{role} "))).unwrap();
            let rest = rows[begin + 1..].iter().take_while(|row| row.starts_with("        |"));
            let first = rows[begin].split_once('|').unwrap().1.to_owned();
            let rest = rest.map(|row| row.split_once('|').unwrap().1.to_owned());
            std::iter::once(first).chain(rest).collect::<Vec<_>>().join("\n")
        };
        let alpha = file("add.py", &code());
        assert_eq!(words(&of("alpha")), words(&alpha), "{all}");
        let squeezed = |text: &str| text.split_whitespace().collect::<String>();
        assert_eq!(squeezed(&of("beta")), squeezed(&review(95, &[])), "{all}");
        assert!(rows.iter().all(|row| row.chars().count() <= usize::from(columns)), "{all}");
        assert!(!has_status(&all), "{all}");
        assert!(all.contains("delivered as branch"), "{all}");
        assert!(rows.last().unwrap().contains("cfq show t1"), "{all}");
        cluster.finish().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn ctrl_c_ends_the_watching_and_not_the_task() {
    let (cluster, repo) = writing(Duration::from_millis(25)).await;
    let task = cluster.submit(&cluster.spec(&repo)).await;
    let mut terminal = Terminal::run(cfq(&cluster, &["watch", "t1"]), 80);
    terminal.shows("generating ~", PATIENCE).await;
    terminal.press(b"\x03");
    let (code_of_exit, rows) = terminal.end(PATIENCE).await;
    let all = rows.join("\n");
    assert_eq!(code_of_exit, Some(130), "{all}");
    let said = rows.iter().position(|row| row.contains("no longer watching")).unwrap();
    assert!(rows[said - 1].starts_with("        |") || rows[said - 1].starts_with("  alpha |"), "{all}");
    assert!(!has_status(&all) && !all.contains("^C"), "{all}");
    assert_eq!(cluster.rests(task).await.summary.state, TaskState::Merged);
    cluster.finish().await;
}
