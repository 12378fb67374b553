//! `cfq checks`: the checks that a project declares, without a task.

mod detect;
pub(super) mod view;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cfq_agent_runner::checks::{
    CHECKS_FILE_PATH, CheckRunError, CheckRunner, CheckedCommits, DeclaredChecks, PreparationRun, ProjectCheck,
    changed_lock_files, checks_of_commit,
};
use cfq_agent_runner::workstream::{Mirror, StopCondition};
use cfq_deploy::Paths;
use tokio::signal::unix::{Signal, SignalKind, signal};
use view::{
    ChecksFileView, ComparedView, NotRunView, PREPARATION, PreparedView, compared, describe, describe_preparation,
    preparation_view, single, single_view, view,
};

use crate::args::{ChecksCommand, CommitArgs};
use crate::commands::serve::sandbox_launcher;
use crate::config::Config;
use crate::exit::{self, Code};
use crate::output::{self, Line, Output, View};
use crate::repo;

/// Start of the name of a checkout, before the id of the process.
const BY_HAND: &str = "by-hand-";

/// A commit and the checks by which it is judged.
struct Declared {
    mirror: Mirror,
    commit: String,
    /// The commit that it is compared with.
    base: Option<String>,
    declaration: DeclaredChecks,
}

pub async fn run(out: Output, paths: &Paths, config: &Config, command: ChecksCommand) -> anyhow::Result<Code> {
    match command {
        ChecksCommand::Init { repo, print } => init(out, repo, print),
        ChecksCommand::Show { at } => {
            let declared = declared(paths, &at)?;
            let DeclaredChecks { checks, preparations, .. } = &declared.declaration;
            for (preparation, _) in preparations {
                out.print_lines(&preparation_view(preparation), |_| as_one(&describe_preparation(preparation)))?;
            }
            for check in checks {
                out.print_lines(&view(check), |_| as_one(&describe(check)))?;
            }
            Ok(Code::Done)
        }
        ChecksCommand::Run { names, at, base } => {
            // A result is judged by the checks of its base commit.
            let mut declared = match base {
                None => declared(paths, &at)?,
                Some(base) => {
                    let of_base = CommitArgs { repo: at.repo.clone(), commit: Some(base) };
                    let declared = declared(paths, &of_base)?;
                    let start = repo::resolve(&folder(at.repo.as_deref())?, at.commit.as_deref(), &[])?;
                    fetch(&declared.mirror, &data_dir(paths), &start.base)?;
                    Declared { commit: start.base, base: Some(declared.commit), ..declared }
                }
            };
            select(&mut declared.declaration.checks, &names)?;
            let runner = CheckRunner::new(sandbox_launcher(), config.checks.clone(), &data_dir(paths));
            let mut signals = StopSignals::new()?;
            let cancelled = Arc::new(AtomicBool::new(false));
            let stop = cancelled.clone();
            let mut running = tokio::task::spawn_blocking(move || run_all(out, &runner, &declared, &stop));
            tokio::select! {
                ended = &mut running => ended?,
                () = signals.received() => {
                    cancelled.store(true, Ordering::Relaxed);
                    // The checkout is removed before the program ends.
                    drop(running.await?);
                    out.status("interrupted");
                    Ok(Code::Interrupted)
                }
            }
        }
    }
}

/// Ctrl-C, SIGTERM, and the end of the terminal.
struct StopSignals([Signal; 3]);

impl StopSignals {
    /// From now on, these signals no longer end the process.
    fn new() -> std::io::Result<Self> {
        let [a, b, c] = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()].map(signal);
        Ok(Self([a?, b?, c?]))
    }

    async fn received(&mut self) {
        let [a, b, c] = &mut self.0;
        tokio::select! {
            _ = a.recv() => {}
            _ = b.recv() => {}
            _ = c.recv() => {}
        }
    }
}

fn init(out: Output, repo: Option<PathBuf>, print: bool) -> anyhow::Result<Code> {
    let root = repo::resolve(&folder(repo.as_deref())?, None, &[])?.root;
    let Some(text) = detect::checks_file(&root) else {
        return Err(exit::usage(format!(
            "no known test runner was found at the top of {}: write {CHECKS_FILE_PATH} yourself, with a [[check]] that has \
             `name` and `run`",
            root.display()
        )));
    };
    if print {
        let proposal = ChecksFileView { path: CHECKS_FILE_PATH.into(), content: text };
        out.print(&proposal, |proposal| proposal.content.trim_end().to_owned())?;
        return Ok(Code::Done);
    }
    let path = root.join(CHECKS_FILE_PATH);
    write_new(&path, &text).map_err(|error| match error.kind() {
        std::io::ErrorKind::AlreadyExists => {
            exit::usage(format!("{} exists already; `cfq checks init --print` prints a proposal", path.display()))
        }
        _ => exit::failed(format!(
            "cannot write {}: {error}; `cfq checks init --print` prints the file instead",
            path.display()
        )),
    })?;
    out.print(&ChecksFileView { path, content: text }, |file| {
        format!("wrote {}; read it, commit it, then try it with `cfq checks run`", file.path.display())
    })?;
    Ok(Code::Done)
}

/// The lines of one text of a repository; those after the first are indented.
fn as_one(text: &str) -> Vec<Line> {
    let mut view = View::default();
    view.push(text);
    view.lines
}

/// Writes a file that must not exist, not even as a link. Its folder may not be a link either.
fn write_new(path: &Path, text: &str) -> std::io::Result<()> {
    if let Some(folder) = path.parent() {
        match std::fs::create_dir(folder) {
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
                if !folder.symlink_metadata()?.is_dir() {
                    return Err(std::io::Error::other(format!("{} is not a folder: remove it", folder.display())));
                }
            }
            created => created?,
        }
    }
    let mut file = std::fs::File::create_new(path)?;
    std::io::Write::write_all(&mut file, text.as_bytes())
}

fn folder(repo: Option<&Path>) -> anyhow::Result<PathBuf> {
    Ok(match repo {
        Some(folder) => folder.to_owned(),
        None => std::env::current_dir()?,
    })
}

/// Folder of the copies and checkouts, apart from those of a running runner.
fn data_dir(paths: &Paths) -> PathBuf {
    paths.cache.join("checks")
}

fn declared(paths: &Paths, at: &CommitArgs) -> anyhow::Result<Declared> {
    let start = repo::resolve(&folder(at.repo.as_deref())?, at.commit.as_deref(), &[])?;
    let data_dir = data_dir(paths);
    let mirror = Mirror::open(&data_dir, &start.root).map_err(|error| exit::failed(error.with_causes()))?;
    fetch(&mirror, &data_dir, &start.base)?;
    let declaration = checks_of_commit(&mirror, &start.base).map_err(of_check_error)?;
    let commit = short(&start.base).to_owned();
    if declaration.checks.is_empty() {
        return Err(exit::usage(format!(
            "commit {commit} of {} declares no checks: {}",
            start.root.display(),
            match declaration.preparations.as_slice() {
                [] => format!("`cfq checks init` writes {CHECKS_FILE_PATH}; commit it"),
                _ => format!("add a [[check]] to {CHECKS_FILE_PATH}, and commit it"),
            }
        )));
    }
    Ok(Declared { mirror, commit: start.base, base: None, declaration })
}

fn fetch(mirror: &Mirror, data_dir: &Path, commit: &str) -> anyhow::Result<()> {
    let (stop, _cancel) = StopCondition::after(repo::MAX_ACCESS);
    repo::access()?.fetch(mirror, data_dir, commit, &stop).map_err(|error| exit::failed(error.with_causes()))
}

fn of_check_error(error: CheckRunError) -> anyhow::Error {
    match error {
        CheckRunError::InvalidFile { reason } => {
            exit::usage(format!("{CHECKS_FILE_PATH} is invalid: {reason}; correct it and commit it"))
        }
        CheckRunError::NoBaselineReport { check, report, problem, end, output } => exit::failed(format!(
            "cannot compare the check `{check}`: on the base commit its report {report} {problem} ({end}); run the checks \
             on that commit alone, without --base{output}"
        )),
        CheckRunError::NotPrepared { name, end, problems, output } => {
            exit::failed(format!("the preparation `{name}` failed: {end}{problems}{output}"))
        }
        error => exit::failed(error.with_causes()),
    }
}

/// Keeps the checks with these names; all if there are no names.
fn select(checks: &mut Vec<ProjectCheck>, names: &[String]) -> anyhow::Result<()> {
    if let Some(unknown) = names.iter().find(|name| checks.iter().all(|check| check.name != **name)) {
        let known: Vec<&str> = checks.iter().map(|check| check.name.as_str()).collect();
        return Err(exit::usage(format!("there is no check {unknown:?}; the commit declares: {}", known.join(", "))));
    }
    if !names.is_empty() {
        checks.retain(|check| names.contains(&check.name));
    }
    Ok(())
}

fn run_all(out: Output, runner: &CheckRunner, declared: &Declared, cancelled: &AtomicBool) -> anyhow::Result<Code> {
    let Declared { mirror, commit, base, declaration } = declared;
    let checks = &declaration.checks;
    // A killed process leaves its checkout behind.
    let is_abandoned = |name: &str| name.strip_prefix(BY_HAND).is_some_and(|id| !Path::new("/proc").join(id).exists());
    if let Err(error) = runner.remove_abandoned(is_abandoned) {
        tracing::warn!(error = error.with_causes(), "cannot remove the checkout of an earlier check");
    }
    let name = format!("{BY_HAND}{}", std::process::id());
    if !runner.is_prepared(declaration) {
        let names: Vec<_> =
            declaration.preparations.iter().map(|(preparation, _)| format!("`{}`", preparation.name)).collect();
        let names = output::sanitize(&names.join(", "));
        out.status(&format!("preparing the checks ({names}); this can take minutes, and is kept"));
        let prepared_on = base.as_ref().unwrap_or(commit);
        let ran = runner.prepare(&name, declaration, prepared_on, mirror, cancelled).map_err(of_check_error)?;
        for run in ran {
            let ms = u64::try_from(run.wall.as_millis()).unwrap_or(u64::MAX);
            let seconds = run.wall.as_secs_f64();
            let PreparationRun { name, path, problems, .. } = &run;
            out.print(&PreparedView { kind: PREPARATION, name, ms, path, problems }, |_| {
                let problems: String = problems.iter().map(|problem| format!("\n  {problem}")).collect();
                output::sanitize(&format!("{name} prepared in {seconds:.1} s, in {}{problems}", path.display()))
            })?;
        }
    }
    if base.is_some() {
        for path in changed_lock_files(mirror, declaration, commit).map_err(of_check_error)? {
            out.status(&output::sanitize(&format!(
                "{path} differs from the base commit, whose packages the checks use; if a task changes it, no check runs, \
                 and a human decides"
            )));
        }
    }
    let mut failed = 0;
    for check in checks {
        let passed = match base {
            Some(base) => {
                let commits = CheckedCommits { result: commit.clone(), base: base.clone() };
                let one = DeclaredChecks { checks: vec![check.clone()], ..declaration.clone() };
                match runner.run(&name, &one, &commits, mirror, cancelled) {
                    Ok((runs, findings)) => {
                        for run in &runs {
                            let view = ComparedView { commit, base, run, findings: &findings };
                            out.print(&view, |_| compared(run, &findings))?;
                        }
                        runs.iter().all(|run| run.passed)
                    }
                    Err(error) => print_missing_program(out, commit, check, error)?,
                }
            }
            None => match runner.run_single(&name, declaration, check, commit, mirror, cancelled) {
                Ok(run) => {
                    out.print(&single_view(commit, check, &run), |_| single(check, &run))?;
                    run.passed
                }
                Err(error) => print_missing_program(out, commit, check, error)?,
            },
        };
        failed += usize::from(!passed);
    }
    let of = output::count(checks.len(), "check");
    if failed > 0 {
        out.status(&format!("{failed} of {of} failed or did not run at commit {}", short(commit)));
        return Ok(Code::Failed);
    }
    out.status(&format!("{of} passed at commit {}", short(commit)));
    Ok(Code::Done)
}

/// Prints that a check did not run, if its program is missing: the other checks can run. Returns that it did not pass.
fn print_missing_program(
    out: Output,
    commit: &str,
    check: &ProjectCheck,
    error: CheckRunError,
) -> anyhow::Result<bool> {
    let CheckRunError::Program { .. } = error else { return Err(of_check_error(error)) };
    let reason = error.with_causes();
    let text = output::sanitize(&format!("{} did not run: {reason}", check.name));
    out.print(&NotRunView { commit, name: &check.name, passed: false, problem: &reason }, |_| text)?;
    Ok(false)
}

fn short(commit: &str) -> &str {
    commit.get(..12).unwrap_or(commit)
}
