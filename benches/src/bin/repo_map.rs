//! Time of `cfq map` on a repository of 10,000 files: without a cache, with it, and after an edit of one file. The
//! baseline is `git grep` for a word that does not occur, which reads the same files, in the same run. Then the map is
//! made 20 times and at growing budgets: the bytes must be the same, and the budget must be kept.
//!
//!     cargo build -p cfq -p cfq-benches
//!     target/debug/repo_map target/debug/cfq [REPOSITORY]
//!
//! Without REPOSITORY, files in five languages are generated that use each other's definitions. With it, the repository
//! gets a commit on a branch of its own for the edit: give it a copy.
#![allow(clippy::print_stdout)]

use std::fmt::Write;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Instant;

use anyhow::{Context, ensure};
use cfq_repo_map::estimated_tokens;

/// Files of the generated repository.
const FILES: usize = 10_000;
const RUNS: usize = 5;
const SAME_RUNS: usize = 20;
const BUDGETS: [usize; 6] = [256, 1000, 8000, 32_000, 128_000, 256_000];

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args().skip(1);
    let cfq = std::path::absolute(arguments.next().context("first argument: the cfq binary")?)?;
    let folder = tempfile::tempdir()?;
    let repository = match arguments.next() {
        Some(repository) => std::path::absolute(repository)?,
        None => {
            generate(folder.path())?;
            folder.path().to_owned()
        }
    };
    let cache = tempfile::tempdir()?;
    let map = |cache: &Path, more: &[&str]| -> anyhow::Result<(f64, Output)> {
        timed(Command::new(&cfq).arg("map").args(more).current_dir(&repository).env("CFQ_CACHE", cache))
    };
    let grep = || timed(Command::new("git").args(["grep", "-c", "no_such_word_anywhere"]).current_dir(&repository));
    let times = |measure: &dyn Fn() -> anyhow::Result<f64>| -> anyhow::Result<f64> {
        let mut times = (0..RUNS).map(|_| measure()).collect::<anyhow::Result<Vec<_>>>()?;
        times.sort_by(f64::total_cmp);
        Ok(times[RUNS / 2])
    };
    let read = times(&|| Ok(grep()?.0))?;
    let cold = times(&|| Ok(map(tempfile::tempdir()?.path(), &[])?.0))?;
    let first = map(cache.path(), &[])?.1.stdout;
    let warm = times(&|| Ok(map(cache.path(), &[])?.0))?;
    let edited = times(&|| {
        edit(&repository)?;
        Ok(map(cache.path(), &[])?.0)
    })?;
    println!("medians of {RUNS}, 8,000 tokens");
    println!("git grep (baseline)      {read:6.2} s");
    println!("without a cache          {cold:6.2} s   {:.1} times the baseline", cold / read);
    println!("with the cache           {warm:6.2} s   {:.1} times the baseline", warm / read);
    println!("after an edit of a file  {edited:6.2} s   {:.1} times the baseline", edited / read);
    let base = ["--base", "HEAD~5"];
    for _ in 0..SAME_RUNS {
        ensure!(map(cache.path(), &base)?.1.stdout == first, "the map of the same commit has other bytes");
    }
    println!("{SAME_RUNS} runs: the same bytes");
    for budget in BUDGETS {
        let made = map(cache.path(), &["--tokens", &budget.to_string()])?.1.stdout;
        let tokens = estimated_tokens(&String::from_utf8(made)?);
        ensure!(tokens <= budget, "{tokens} tokens exceed {budget}");
        println!("budget {budget:6}: {tokens} tokens");
    }
    Ok(())
}

fn timed(command: &mut Command) -> anyhow::Result<(f64, Output)> {
    let start = Instant::now();
    let output = command.output()?;
    // `git grep` exits with 1 if it finds nothing.
    let is_grep = command.get_program() == "git";
    ensure!(output.status.success() || is_grep, "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok((start.elapsed().as_secs_f64(), output))
}

fn git(repository: &Path, arguments: &[&str]) -> anyhow::Result<()> {
    let mut command = Command::new("git");
    command.args(["-c", "user.name=bench", "-c", "user.email=bench@example.org"]).args(arguments);
    let output = command.current_dir(repository).output()?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(())
}

/// Commits a change of one file.
fn edit(repository: &Path) -> anyhow::Result<()> {
    let file = repository.join("edited_by_the_benchmark.py");
    let mut text = std::fs::read_to_string(&file).unwrap_or_default();
    writeln!(text, "def edited_{}(): pass", text.len())?;
    std::fs::write(&file, text)?;
    git(repository, &["add", "edited_by_the_benchmark.py"])?;
    git(repository, &["commit", "--quiet", "--message", "edit"])
}

/// Files of about 5 KB, each with definitions that files with other numbers use.
fn generate(folder: &Path) -> anyhow::Result<()> {
    for number in 0..FILES {
        let (extension, text) = source(number)?;
        let package = folder.join(format!("package_{}/part_{}", number / 400, number / 20));
        std::fs::create_dir_all(&package)?;
        std::fs::write(package.join(format!("file_{number}.{extension}")), text)?;
    }
    git(folder, &["init", "--quiet"])?;
    git(folder, &["add", "."])?;
    git(folder, &["commit", "--quiet", "--message", "generated"])
}

fn source(number: usize) -> anyhow::Result<(&'static str, String)> {
    let mut text = String::new();
    for function in 0..40 {
        // Lower numbers are used more.
        let used = (number * 7 + function * 13) % (number / 2 + 1);
        let (name, uses) = (format!("compute_{number}_{function}"), format!("compute_{used}_{}", function / 2));
        match number % 5 {
            0 => writeln!(text, "def {name}(first, second):\n    total = {uses}(first)\n    return total + second\n")?,
            1 => writeln!(text, "pub fn {name}(first: u64, second: u64) -> u64 {{\n    {uses}(first) + second\n}}\n")?,
            2 => writeln!(text, "export function {name}(first, second) {{\n  return {uses}(first) + second;\n}}\n")?,
            3 => writeln!(text, "func {name}(first int, second int) int {{\n\treturn {uses}(first) + second\n}}\n")?,
            _ => writeln!(text, "long {name}(long first, long second) {{\n    return {uses}(first) + second;\n}}\n")?,
        }
    }
    Ok((["py", "rs", "ts", "go", "c"][number % 5], text))
}
