//! Runs the review loop on small problems with tests, which are declared as a check:
//!
//! ```sh
//! cargo run -p cfq-tests --bin checked_loop -- PROBLEMS.jsonl SEED           # scripted agents
//! cargo run -p cfq-tests --bin checked_loop -- PROBLEMS.jsonl SEED --model   # both agents are the small model
//! ```
//!
//! Each line of the file is a problem in HumanEval's format (`prompt`, `entry_point`, `canonical_solution`, `test`).
//!
//! Scripted: the creator's replies are mutants of the solution, made from the seed, and then the solution itself; the
//! critic finds everything excellent. The program runs the tests of every reply itself, and fails if cfq decided
//! otherwise. With the small model it prints what the loop achieves; the replies run only in cfq's sandbox.
#![allow(clippy::print_stdout)]

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use cfq_proto::review::Quarantine;
use cfq_proto::task::{TaskSpec, TaskState};
use cfq_tests::cluster::{Cluster, Options};
use cfq_tests::repo::UserRepo;
use cfq_tests::scripted::{Reply, file, review};
use cfq_tests::small_model::SMALL_MODEL;
use serde::Deserialize;

/// Number of mutants before the solution.
const MUTANTS: usize = 3;

/// Replacements that change what a program computes.
const MUTATIONS: [(&str, &str); 16] = [
    (" < ", " <= "),
    (" > ", " >= "),
    (" <= ", " < "),
    (" >= ", " > "),
    (" == ", " != "),
    (" != ", " == "),
    (" + ", " - "),
    (" - ", " + "),
    (" * ", " + "),
    (" and ", " or "),
    (" or ", " and "),
    ("True", "False"),
    ("False", "True"),
    ("0", "1"),
    ("1", "2"),
    ("return ", "return not "),
];

#[derive(Deserialize)]
struct Problem {
    task_id: String,
    prompt: String,
    entry_point: String,
    canonical_solution: String,
    test: String,
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % n.max(1) as u64) as usize
    }
}

/// Different mutants of the solution, at most [`MUTANTS`].
fn mutants(solution: &str, random: &mut Random) -> Vec<String> {
    let mut places: Vec<(usize, &str, &str)> = MUTATIONS
        .iter()
        .flat_map(|(from, to)| solution.match_indices(from).map(move |(at, _)| (at, *from, *to)))
        .collect();
    let mut mutants = Vec::new();
    while mutants.len() < MUTANTS && !places.is_empty() {
        let (at, from, to) = places.swap_remove(random.below(places.len()));
        let mutant = format!("{}{to}{}", &solution[..at], &solution[at + from.len()..]);
        if !mutants.contains(&mutant) {
            mutants.push(mutant);
        }
    }
    mutants
}

/// Whether the tests pass with this solution, found out without cfq. The problems are a published data set, so their
/// code runs here without a sandbox, with a time limit.
fn passes(folder: &Path, solution: &str, tests: &str) -> anyhow::Result<bool> {
    std::fs::write(folder.join("solution.py"), solution)?;
    std::fs::write(folder.join("test_solution.py"), tests)?;
    let mut command = Command::new("timeout");
    command.args(["20", "python3", "-B", "test_solution.py"]).current_dir(folder);
    Ok(command.stdout(Stdio::null()).stderr(Stdio::null()).status().context("cannot run python3")?.success())
}

/// The file with the problem's tests, which fails unless all pass.
fn tests_of(problem: &Problem) -> String {
    let entry = &problem.entry_point;
    // Some tests use other functions of the solution.
    format!("{}\n\nfrom solution import *\n\ncheck({entry})\n", problem.test)
}

/// A repository with the problem and its tests.
fn repository(problem: &Problem, tests: &str) -> UserRepo {
    let repo = UserRepo::with_uncommitted_changes();
    let stub = format!("{}    raise NotImplementedError\n", problem.prompt);
    let checks = "protected = [\"test_solution.py\"]\n\n[[check]]\nname = \"tests\"\n\
                  run = [\"python3\", \"-B\", \"test_solution.py\"]\ntimeout_s = 20\n";
    repo.commit(&[("solution.py", &stub), ("test_solution.py", tests), (".cfq/checks.toml", checks)]);
    repo
}

fn spec(cluster: &Cluster, problem: &Problem, repo: &UserRepo) -> TaskSpec {
    let mut spec = cluster.spec(repo);
    spec.description =
        format!("Complete the function {} in solution.py:\n\n{}", problem.entry_point, problem.prompt.trim_end());
    spec
}

#[derive(Default)]
struct Totals {
    tasks: usize,
    replies: usize,
    rejected: usize,
    accepted_mutants: usize,
    dangerous: usize,
}

async fn run_problem(
    cluster: &Cluster,
    problem: &Problem,
    random: &mut Random,
    totals: &mut Totals,
) -> anyhow::Result<()> {
    let name = &problem.task_id;
    let solution = format!("{}{}", problem.prompt, problem.canonical_solution);
    let tests = tests_of(problem);
    let mut replies: Vec<String> = mutants(&problem.canonical_solution, random)
        .into_iter()
        .map(|mutant| format!("{}{mutant}", problem.prompt))
        .collect();
    replies.push(solution);
    cluster.models.script("alpha", replies.iter().map(|reply| Reply::Text(file("solution.py", reply))).collect());
    cluster.models.script("beta", vec![Reply::Text(review(99, &[]))]);
    let repo = repository(problem, &tests);
    let detail = cluster.wait_until_settled(cluster.submit(&spec(cluster, problem, &repo)).await).await;
    let folder = tempfile::tempdir()?;
    let mut first_green = None;
    for (index, iteration) in detail.iterations.iter().enumerate() {
        let reply = replies.get(index).with_context(|| format!("{name}: more iterations than replies"))?;
        let is_green = passes(folder.path(), &format!("{}\n", reply.trim_end()), &tests)?;
        match iteration.quarantine {
            Some(Quarantine::FailedChecks) => {
                ensure!(!is_green, "{name}: iteration {} passes its tests, but was rejected", index + 1);
                totals.rejected += 1;
            }
            // A mutant that does not parse, or that is dangerous, is not run.
            Some(Quarantine::Syntax | Quarantine::Dangerous | Quarantine::Unparsable) => totals.rejected += 1,
            None => {
                ensure!(is_green, "{name}: iteration {} fails its tests, but was not rejected", index + 1);
                first_green.get_or_insert(index);
            }
        }
    }
    totals.tasks += 1;
    totals.replies += detail.iterations.len();
    if first_green.is_none() && detail.reason.starts_with("dangerous_output_detected") {
        println!("{name}: escalated, {}", detail.reason);
        totals.dangerous += 1;
        return Ok(());
    }
    let Some(green) = first_green else { bail!("{name}: no reply passed; it ended as {}", detail.reason) };
    ensure!(detail.summary.state == TaskState::Merged, "{name} is {:?}: {}", detail.summary.state, detail.reason);
    totals.accepted_mutants += usize::from(green + 1 < replies.len());
    println!("{name}: merged at iteration {} of {} replies", green + 1, replies.len());
    Ok(())
}

/// Scripted agents: fails if cfq accepted a reply with a failing test, or rejected one that passes.
async fn run_scripted(problems: &[Problem], seed: u64) -> anyhow::Result<()> {
    let cluster = Cluster::start().await;
    let (mut random, mut totals, start) = (Random(seed), Totals::default(), Instant::now());
    for problem in problems {
        run_problem(&cluster, problem, &mut random, &mut totals).await?;
    }
    cluster.finish().await;
    let Totals { tasks, replies, rejected, accepted_mutants, dangerous } = totals;
    println!(
        "{tasks} tasks, {replies} replies, {rejected} rejected, {dangerous} tasks escalated because of dangerous code, \
         {accepted_mutants} merged with a mutant that passes the \
         tests; seed {seed}, {:.0} s; no result with a failing test was accepted, and none that passes was rejected",
        start.elapsed().as_secs_f64()
    );
    Ok(())
}

/// Both agents are the small model: prints what the loop achieves.
async fn run_model(problems: &[Problem], seed: u64) -> anyhow::Result<()> {
    let (alpha, beta) = (SMALL_MODEL.to_owned(), SMALL_MODEL.to_owned());
    let mut options = Options { models: vec![SMALL_MODEL.parse()?], alpha, beta, ..Options::default() };
    options.timing.job_step_timeout_ms = 60_000;
    let cluster = Cluster::start_with(options).await;
    let (mut first, mut ever, mut merged, mut iterations, mut tokens, start) = (0, 0, 0, 0, 0, Instant::now());
    for problem in problems {
        let repo = repository(problem, &tests_of(problem));
        let mut spec = spec(&cluster, problem, &repo);
        for agent in [&mut spec.agents.alpha, &mut spec.agents.beta] {
            (agent.seed, agent.max_tokens) = (Some(seed), Some(600));
        }
        let began = Instant::now();
        let detail = cluster.wait_until_settled(cluster.submit(&spec).await).await;
        let passed: Vec<bool> =
            detail.iterations.iter().map(|i| i.quarantine.is_none() && i.ran.iter().any(|run| run.passed)).collect();
        let generated: u32 = detail.jobs.iter().filter_map(|job| job.usage).map(|usage| usage.output_tokens).sum();
        let is_merged = detail.summary.state == TaskState::Merged;
        ensure!(!is_merged || passed.contains(&true), "{}: merged with a failing test", problem.task_id);
        first += usize::from(passed.first() == Some(&true));
        ever += usize::from(passed.contains(&true));
        merged += usize::from(is_merged);
        iterations += passed.len();
        tokens += generated;
        println!(
            "{}: {} after {} iterations, tests pass: {passed:?}, {generated} tokens, {:.0} s",
            problem.task_id,
            detail.summary.state.as_str(),
            passed.len(),
            began.elapsed().as_secs_f64()
        );
    }
    cluster.finish().await;
    println!(
        "{} tasks, all ended; tests pass with the first reply: {first}, with any reply: {ever}; merged: {merged}; \
         {iterations} iterations, {tokens} generated tokens, seed {seed}, {:.0} s",
        problems.len(),
        start.elapsed().as_secs_f64()
    );
    Ok(())
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let (path, seed, with_model) = match args.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        [path, seed] => (path, seed, false),
        [path, seed, "--model"] => (path, seed, true),
        _ => bail!("usage: checked_loop PROBLEMS.jsonl SEED [--model]"),
    };
    let seed = seed.parse().context("SEED is not a number")?;
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
    let problems: Vec<Problem> =
        text.lines().filter(|line| !line.trim().is_empty()).map(serde_json::from_str).collect::<Result<_, _>>()?;
    match with_model {
        false => run_scripted(&problems, seed).await,
        true => run_model(&problems, seed).await,
    }
}
