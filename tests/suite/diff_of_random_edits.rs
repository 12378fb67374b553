//! Test of `cfq diff` with random edits of files of every kind: what it prints into a pipe recreates the exact bytes and
//! modes with `git apply`.

use std::io::Write;
use std::process::{Command, Output, Stdio};

use cfq_proto::task::{TaskSpec, TaskState};
use cfq_tests::binary;
use cfq_tests::cluster::{Cluster, TOKEN};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, review};

const TASKS: usize = 12;
const EDITS_PER_TASK: usize = 25;
/// Line ends, and characters that terminals interpret, that look like line ends, or that are beyond ASCII.
const ENDS: [&str; 4] = ["\n", "\r\n", "\n", "\r\n"];
const ODD: [&str; 8] = ["", "  ", "\t", "\u{c}", " \u{b}", "\u{1b}[2J", "é", "+++ b/x"];

/// A small generator of random numbers (xorshift), so that the same seed gives the same edits.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % n as u64) as usize
    }

    fn pick<'p>(&mut self, from: &[&'p str]) -> &'p str {
        from[self.below(from.len())]
    }
}

/// A file of the base commit.
struct File {
    path: String,
    /// Lines without their ends, with a unique word each.
    lines: Vec<String>,
    end: &'static str,
    has_final_end: bool,
    /// Whether the file is Windows-1252, and not UTF-8.
    is_windows_1252: bool,
    is_executable: bool,
}

impl File {
    fn random(random: &mut Random, n: usize) -> Self {
        let is_windows_1252 = random.below(4) == 0;
        let line =
            |random: &mut Random, line: usize| format!("{}word-{n}-{line}{}", random.pick(&ODD), random.pick(&ODD));
        let mut lines: Vec<String> = (0..3 + random.below(30)).map(|l| line(random, l)).collect();
        if is_windows_1252 {
            // Not UTF-8, whatever the other lines have.
            lines[0] = format!("word-{n}-0 na\u{ef}ve \u{201c}x\u{201d}");
        }
        let blanks = random.below(3);
        lines.extend(std::iter::repeat_n(String::new(), blanks));
        let folder = random.pick(&["", "src/", "a b/"]);
        Self {
            path: format!("{folder}file-{n}.txt"),
            lines,
            end: ENDS[random.below(ENDS.len())],
            has_final_end: random.below(3) > 0,
            is_windows_1252,
            is_executable: random.below(5) == 0,
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut text = self.lines.join(self.end);
        if self.has_final_end {
            text += self.end;
        }
        match self.is_windows_1252 {
            true => text.chars().map(windows_1252).collect(),
            false => text.into_bytes(),
        }
    }

    /// A random edit of the file as a model writes it.
    fn edit(&self, random: &mut Random, n: usize) -> String {
        let path = &self.path;
        match random.below(6) {
            0 => format!("*** Begin Patch\n*** Delete File: {path}\n*** End Patch\n"),
            1 if !path.contains(' ') => format!(
                "```diff\ndiff --git a/{path} b/{path}.new\nsimilarity index 100%\nrename from {path}\nrename to {path}.new\n```\n"
            ),
            2 if !path.contains(' ') => {
                let (old, new) = if self.is_executable { ("100755", "100644") } else { ("100644", "100755") };
                format!("```diff\ndiff --git a/{path} b/{path}\nold mode {old}\nnew mode {new}\n```\n")
            }
            _ => {
                let replaced: Vec<&String> = self.lines.iter().filter(|line| line.contains("word-")).collect();
                let line = replaced[random.below(replaced.len())];
                let new = match random.below(3) {
                    0 => format!("{line}{}", random.pick(&["  ", "\t", "\u{c}", " changed"])),
                    1 => format!("{line}\n\n+ added-{n}\n"),
                    _ => format!("changed-{n} {}", random.pick(&ODD)),
                };
                if path.contains(' ') {
                    let added: Vec<String> = new.split('\n').map(|line| format!("+{line}\n")).collect();
                    let change = format!("-{line}\n{}", added.concat());
                    return format!("*** Begin Patch\n*** Update File: {path}\n@@\n{change}*** End Patch\n");
                }
                format!("{path}\n<<<<<<< SEARCH\n{line}\n=======\n{new}\n>>>>>>> REPLACE\n")
            }
        }
    }
}

/// The byte of a character of the test files.
fn windows_1252(c: char) -> u8 {
    match c {
        '\u{201c}' => 0x93,
        '\u{201d}' => 0x94,
        c => u8::try_from(u32::from(c)).unwrap(),
    }
}

fn git(repo: &std::path::Path, args: &[&str], input: &[u8]) -> Output {
    let mut command = Command::new("git");
    command.arg("-C").arg(repo).args(["-c", "core.autocrlf=false", "-c", "core.fileMode=true"]).args(args);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(input).unwrap();
    let output = child.wait_with_output().unwrap();
    assert!(output.status.success(), "git {args:?}: {}", String::from_utf8_lossy(&output.stderr));
    output
}

fn tree(repo: &std::path::Path, name: &str) -> String {
    let output = git(repo, &["rev-parse", &format!("{name}^{{tree}}")], &[]);
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn git_apply_recreates_the_bytes_of_every_edit() {
    let seed = std::env::var("CFQ_TEST_SEED").map_or(20_261_128, |seed| seed.parse().unwrap());
    let mut random = Random(seed);
    let cluster = Cluster::start().await;
    let (mut edits, mut windows_1252_files) = (0, 0);
    for task in 0..TASKS {
        let repo = UserRepo::with_uncommitted_changes();
        let files: Vec<File> = (0..EDITS_PER_TASK).map(|n| File::random(&mut random, n)).collect();
        let bytes: Vec<Vec<u8>> = files.iter().map(File::bytes).collect();
        let committed: Vec<(&str, &[u8], bool)> = files
            .iter()
            .zip(&bytes)
            .map(|(file, bytes)| (file.path.as_str(), &bytes[..], file.is_executable))
            .collect();
        repo.commit_bytes(&committed);
        // The first iteration edits every second file, the next one the others.
        let reply: Vec<String> = files.iter().enumerate().map(|(n, file)| file.edit(&mut random, n)).collect();
        let half = |odd: usize| reply.iter().skip(odd).step_by(2).cloned().collect::<Vec<_>>().join("\n");
        cluster.models.script("alpha", vec![Reply::Text(half(0)), Reply::Text(half(1))]);
        cluster.models.script("beta", vec![Reply::Text(review(40, &[])), Reply::Text(review(95, &[]))]);
        let spec = TaskSpec {
            description: format!("Edit the files, task {task}"),
            language: String::new(),
            ..cluster.spec(&repo)
        };
        let key = cluster.submit(&spec).await;
        let detail = cluster.wait_until_settled(key).await;
        assert_eq!(detail.summary.state, TaskState::Merged, "seed {seed}: {detail:?}\n{}", reply.join("\n"));

        let diff = |args: &[&str]| {
            let mut command = Command::new(binary::cfq());
            command.args(["diff", &detail.summary.number.to_string()]).args(args);
            command.env("CFQ_URL", cluster.client.url()).env("CFQ_TOKEN", TOKEN);
            let diff = tokio::task::block_in_place(|| command.output().unwrap());
            assert!(diff.status.success(), "{diff:?}");
            diff.stdout
        };
        let (whole, first) = (diff(&[]), diff(&["--iteration", "1"]));
        let (forth, back) = (diff(&["--from", "1"]), diff(&["--from", "2", "--iteration", "1"]));
        let clone = tempfile::tempdir().unwrap();
        let path = repo.path();
        let branch = detail.delivered_branch.clone().unwrap();
        tokio::task::block_in_place(|| {
            git(clone.path(), &["clone", "-q", path.to_str().unwrap(), "."], &[]);
            let apply = |diff: &[u8]| {
                git(clone.path(), &["apply", "--whitespace=nowarn", "--index", "-"], diff);
                let written = git(clone.path(), &["write-tree"], &[]);
                String::from_utf8(written.stdout).unwrap().trim().to_owned()
            };
            let after_first = apply(&first);
            let written = apply(&forth);
            assert_eq!(apply(&back), after_first, "seed {seed}, task {task}");
            git(clone.path(), &["reset", "-q", "--hard"], &[]);
            assert_eq!(apply(&whole), written, "seed {seed}, task {task}");
            assert_eq!(written, tree(&path, &branch), "seed {seed}, task {task}:\n{}", String::from_utf8_lossy(&whole));
        });
        edits += detail.iterations[1].paths.len();
        windows_1252_files += files.iter().filter(|file| file.is_windows_1252).count();
        assert!(tree(&path, &branch) != tree(&path, "HEAD"));
    }
    assert!(edits >= TASKS * EDITS_PER_TASK && windows_1252_files > 20, "{edits} {windows_1252_files}");
    cluster.finish().await;
}
