//! `cfq submit`: one task, or the tasks of a task file with a `tasks` list.

pub(super) mod dry_run;
mod editor;

use std::io::{IsTerminal, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::Context;
use cfq_agent_runner::workstream::{StartPoint, StopCondition, UncommittedRequest};
use cfq_deploy::Paths;
use cfq_proto::client::Client;
use cfq_proto::http::{BatchRequest, SubmitReply, TaskQuery, TaskSummary};
use cfq_proto::ids::{TaskKey, TaskNumber};
use cfq_proto::task::{TaskSpec, TaskState};
use cfq_proto::task_ref::TaskRef;

use crate::args::{SubmitArgs, TaskArgs};
use crate::commands::watch;
use crate::exit::{self, Code};
use crate::local_time;
use crate::output::{self, Output};
use crate::plain_words::plain;
use crate::repo;

/// Maximum time for which a working tree is compared with HEAD.
const MAX_COMPARE_TIME: Duration = Duration::from_secs(2);
/// Maximum number of tasks of a repository whose start is compared.
const MAX_COMPARED_TASKS: u32 = 50;

type Fields = serde_json::Map<String, serde_json::Value>;

pub async fn run(client: &Client, paths: &Paths, out: Output, args: SubmitArgs) -> anyhow::Result<Code> {
    let watch = args.watch;
    let submitted = match args.edit {
        true => submit_edited(client, paths, out, args).await?,
        false => submit(client, paths, out, args).await?,
    };
    match submitted {
        Submitted::Task(number) if watch => {
            watch::run(client, out, TaskKey::Number(number), 0, watch::WatchOptions::default()).await
        }
        Submitted::Task(_) => Ok(Code::Done),
        Submitted::Ended(code) => Ok(code),
    }
}

/// Submits a description that the user writes in an editor. Its file is kept unless a task was created.
async fn submit_edited(client: &Client, paths: &Paths, out: Output, args: SubmitArgs) -> anyhow::Result<Submitted> {
    // What can be wrong without the text is found before it is written.
    client.status().await?;
    repo::resolve(args.task.repo.as_deref().unwrap_or(Path::new(".")), args.task.base.as_deref(), &[])?;
    let description = editor::Description::write(args.task.text.as_deref().unwrap_or_default()).await?;
    let task = TaskArgs { text: Some(description.text.clone()), ..args.task };
    // The editor's Ctrl-C did not end this process, so its own must.
    let submitted = tokio::select! {
        submitted = submit(client, paths, out, SubmitArgs { task, ..args }) => submitted,
        () = cfq_link::stop::signalled() => Err(exit::CodedError {
            code: Code::Interrupted,
            message: "interrupted; `cfq ls` shows whether the task was submitted".to_owned(),
        }
        .into()),
    };
    if !matches!(submitted, Ok(Submitted::Task(_))) {
        description.keep();
    }
    submitted
}

/// How a submission ended.
enum Submitted {
    /// One task was created, and is not followed yet.
    Task(TaskNumber),
    /// Nothing is left to do: a dry run, or several tasks, which were followed if that was wanted.
    Ended(Code),
}

async fn submit(client: &Client, paths: &Paths, out: Output, args: SubmitArgs) -> anyhow::Result<Submitted> {
    // A generated idempotency key makes it safe to repeat this request after a broken connection.
    let key = args.idempotency_key.clone().unwrap_or_else(|| cfq_proto::ids::TaskId::fresh().to_string());
    let mut fields = fields(&args.task)?;
    if let Some(tasks) = fields.remove("tasks") {
        let specs = batch(&args, &fields, &tasks)?;
        if args.dry_run {
            return dry_run::run(client, paths, out, specs).await.map(Submitted::Ended);
        }
        return submit_batch(client, out, &args, &key, specs).await.map(Submitted::Ended);
    }
    let is_from_head = args.task.base.is_none() && !fields.contains_key("base");
    let spec = spec(&args, fields, &what(&args.task))?;
    if args.dry_run {
        return dry_run::run(client, paths, out, vec![spec]).await.map(Submitted::Ended);
    }
    let reply = client.submit(&spec, Some(&key)).await?;
    out.print(&reply, accepted)?;
    print_warnings(out, &reply);
    if !out.json {
        if is_from_head {
            warn_about_uncommitted(out, &spec);
        }
        warn_about_others(client, out, &spec, &reply).await;
    }
    if !args.watch {
        out.status(&format!("follow it: cfq watch {}", reply.number));
    }
    Ok(Submitted::Task(reply.number))
}

/// Says that changes which are not committed are not part of the task, which starts from HEAD.
fn warn_about_uncommitted(out: Output, spec: &TaskSpec) {
    let request = UncommittedRequest { dir: PathBuf::from(&spec.repo) };
    let (stop, _cancel) = StopCondition::after(MAX_COMPARE_TIME);
    // Only a hint: a working tree that cannot be compared in time delays nothing.
    let Ok(access) = repo::access() else { return };
    if let Ok(files @ 1..) = access.uncommitted(request, &stop) {
        let changes = output::count(files as usize, "uncommitted change");
        let verb = if files == 1 { "is" } else { "are" };
        out.status(&format!("warning: {changes} {verb} not part of the task, which starts from the last commit"));
    }
}

/// Names other tasks that start from the same commit: their results may conflict.
async fn warn_about_others(client: &Client, out: Output, spec: &TaskSpec, reply: &SubmitReply) {
    let may_conflict =
        |state: TaskState| !state.is_terminal() || matches!(state, TaskState::Merged | TaskState::Accepted);
    let query = TaskQuery { repo: Some(spec.repo.clone()), limit: MAX_COMPARED_TASKS, ..TaskQuery::default() };
    // Only a hint: the task is submitted.
    let Ok(list) = client.list_tasks(&query).await else { return };
    let same_start =
        |task: &&TaskSummary| task.base == spec.base && task.number != reply.number && may_conflict(task.state);
    let others: Vec<&TaskSummary> = list.tasks.iter().filter(same_start).collect();
    let Some(newest) = others.first().filter(|_| reply.created && spec.after.is_empty()) else { return };
    let names = output::list(&others.iter().take(3).rev().map(|task| task.number).collect::<Vec<_>>());
    let more = if others.len() > 3 { " and others" } else { "" };
    out.status(&format!(
        "note: {names}{more} {verb} from the same commit; if results change the same lines, the later one waits for you: `cfq \
         show {this}` names the conflict, `cfq pull {this}` takes the result. To build on {newest}, submit with `--base` and \
         the branch that `cfq show {newest}` names",
        verb = if others.len() == 1 { "starts" } else { "start" },
        this = reply.number,
        newest = newest.number,
    ));
}

/// The entries of `tasks`. The other fields of the file are those of every task that does not have them.
fn batch(args: &SubmitArgs, shared: &Fields, tasks: &serde_json::Value) -> anyhow::Result<Vec<TaskSpec>> {
    let what = what(&args.task);
    let Some(tasks) = tasks.as_array().filter(|tasks| !tasks.is_empty()) else {
        return Err(exit::usage(format!("{what}: tasks: must be a list with at least one task")));
    };
    let mut specs = Vec::with_capacity(tasks.len());
    for (n, task) in tasks.iter().enumerate() {
        let what = format!("{what}: tasks[{n}]");
        let Some(own) = task.as_object() else {
            return Err(exit::usage(format!("{what}: must be a mapping with at least `description`")));
        };
        let mut fields = shared.clone();
        fields.extend(own.clone());
        specs.push(spec(args, fields, &what)?);
    }
    Ok(specs)
}

async fn submit_batch(
    client: &Client,
    out: Output,
    args: &SubmitArgs,
    key: &str,
    specs: Vec<TaskSpec>,
) -> anyhow::Result<Code> {
    let names: Vec<String> =
        specs.iter().map(|spec| spec.name.as_ref().map(ToString::to_string).unwrap_or_default()).collect();
    let reply = client.submit_batch(&BatchRequest { tasks: specs }, Some(key)).await?;
    out.print(&reply, |reply| {
        let lines = reply.tasks.iter().zip(&names).map(|(task, name)| match name.as_str() {
            "" => accepted(task),
            name => format!("{} ({name})", accepted(task)),
        });
        lines.collect::<Vec<_>>().join("\n")
    })?;
    reply.tasks.iter().for_each(|task| print_warnings(out, task));
    if args.watch {
        let tasks: Vec<TaskKey> = reply.tasks.iter().map(|task| TaskKey::Number(task.number)).collect();
        return watch::follow_all(client, out, &tasks, watch::WatchOptions::default()).await;
    }
    out.status("list them: cfq ls");
    Ok(Code::Done)
}

/// What an error concerns: the task file, or the only task.
fn what(args: &TaskArgs) -> String {
    args.file.as_ref().map_or_else(|| "the task".to_owned(), |path| file_name(path))
}

pub(super) fn accepted(reply: &SubmitReply) -> String {
    let note = if reply.created { "" } else { " (already submitted with this key)" };
    format!("{} accepted{note}", reply.number)
}

pub(super) fn print_warnings(out: Output, reply: &SubmitReply) {
    for warning in &reply.warnings {
        out.status(&format!("warning: {}", output::sanitize(warning)));
    }
}

/// The fields of the task file, or the description.
fn fields(args: &TaskArgs) -> anyhow::Result<Fields> {
    match &args.file {
        Some(path) => read_task_file(path),
        None => {
            let mut fields = Fields::new();
            fields.insert("description".into(), description(args)?.into());
            Ok(fields)
        }
    }
}

/// The task to submit, with the commit from which it starts.
fn spec(args: &SubmitArgs, fields: Fields, what: &str) -> anyhow::Result<TaskSpec> {
    let mut spec = parse(&args.task, fields, what)?;
    spec.after.extend(args.after.iter().map(|task| TaskRef::Key(*task)));
    spec.run_at = args.run_at.map(jiff::Timestamp::as_second).or(spec.run_at);
    spec.deadline = args.deadline.map(jiff::Timestamp::as_second).or(spec.deadline);
    let start = check_start(&mut spec)?;
    spec.base = Some(start.base);
    Ok(spec)
}

/// The task of a schedule. Without a base in `args`, each task starts from the HEAD of its time.
pub(super) fn scheduled_spec(args: &TaskArgs) -> anyhow::Result<TaskSpec> {
    let fields = fields(args)?;
    let what = what(args);
    if fields.contains_key("tasks") {
        return Err(exit::usage(format!("{what}: a schedule has one task: write a task file without `tasks`")));
    }
    let mut spec = parse(args, fields, &what)?;
    let start = check_start(&mut spec)?;
    spec.base = spec.base.map(|_| start.base);
    Ok(spec)
}

/// Finds the repository and the base of a task, and checks its context files.
fn check_start(spec: &mut TaskSpec) -> anyhow::Result<StartPoint> {
    let start = repo::resolve(Path::new(&spec.repo), spec.base.as_deref(), &spec.context_files)?;
    spec.repo = start.root.to_string_lossy().into_owned();
    spec.context_files.clone_from(&start.context_files);
    Ok(start)
}

fn parse(args: &TaskArgs, mut fields: Fields, what: &str) -> anyhow::Result<TaskSpec> {
    // If neither the flags nor the task file name a repository, the task uses the one that contains the current folder.
    let repo = match (&args.repo, fields.get("repo").and_then(|r| r.as_str())) {
        (Some(dir), _) => dir.clone(),
        (None, Some(dir)) => repo_of_file(dir, args.file.as_deref()),
        (None, None) => std::env::current_dir().context("cannot determine the current folder; use --repo DIR")?,
    };
    fields.insert("repo".into(), repo.to_string_lossy().into());
    for field in ["run_at", "deadline"] {
        if let Some(serde_json::Value::String(text)) = fields.get(field) {
            let at = local_time::parse(text).map_err(|error| exit::usage(format!("{what}: {field}: {error}")))?;
            fields.insert(field.into(), at.as_second().into());
        }
    }
    let fields = serde_json::Value::from(fields);
    let mut spec: TaskSpec = serde_path_to_error::deserialize(fields)
        .map_err(|error| exit::usage(format!("{what}: {}", plain(&error.to_string()))))?;
    override_with_flags(&mut spec, args)?;
    if spec.description.trim().is_empty() {
        return Err(exit::usage(
            "the task's description is empty: give one as `cfq submit \"...\"`, on standard input, or as `description` \
             in a task file",
        ));
    }
    Ok(spec)
}

/// The repository that a task file names: `~/` is the home folder, and another relative path starts from the file's folder.
fn repo_of_file(repo: &str, file: Option<&Path>) -> PathBuf {
    if let (Some(rest), Some(home)) = (repo.strip_prefix("~/"), std::env::var_os("HOME")) {
        return PathBuf::from(home).join(rest);
    }
    let folder = file.filter(|file| !is_stdin(file)).and_then(Path::parent);
    folder.map_or_else(|| PathBuf::from(repo), |folder| folder.join(repo))
}

fn read_task_file(path: &Path) -> anyhow::Result<Fields> {
    let name = file_name(path);
    let text = match is_stdin(path) {
        true => read_stdin("the task file", "convert it")?,
        false => std::fs::read_to_string(path)
            .map_err(|error| exit::usage(format!("cannot read the task file {name}: {}", plain(&error.to_string()))))?,
    };
    let documents: Vec<serde_json::Value> = serde_saphyr::from_multiple(&text)
        .map_err(|error| exit::usage(format!("{name}: {}", plain(&error.to_string()))))?;
    let mut documents: Vec<_> = documents.into_iter().filter(|document| !document.is_null()).collect();
    let no_mapping =
        || exit::usage(format!("{name}: a task file must be a mapping with at least `description`, or a `tasks` list"));
    if documents.len() > 1 {
        if documents.iter().any(|document| document.get("tasks").is_some()) {
            let message = "use several documents with one task in each, or a `tasks` list, not both";
            return Err(exit::usage(format!("{name}: {message}")));
        }
        return Ok(Fields::from_iter([("tasks".to_owned(), documents.into())]));
    }
    match documents.pop() {
        Some(serde_json::Value::Object(fields)) => Ok(fields),
        _ => Err(no_mapping()),
    }
}

/// The task's description: the argument, or standard input.
fn description(args: &TaskArgs) -> anyhow::Result<String> {
    match args.text.as_deref() {
        Some("-") | None => {
            if args.text.is_none() && std::io::stdin().is_terminal() {
                return Err(exit::usage(
                    "missing description: use `cfq submit \"...\"`, `--edit` to write it in an editor, `-f task.yaml`, or standard \
                     input",
                ));
            }
            if std::io::stdin().is_terminal() {
                output::print_stderr("type the description; Ctrl-D ends it");
            }
            read_stdin("the description", "convert it, or add the file with --context")
        }
        Some(text) => Ok(text.to_owned()),
    }
}

fn is_stdin(path: &Path) -> bool {
    path == Path::new("-")
}

/// Name of a task file in messages.
fn file_name(path: &Path) -> String {
    if is_stdin(path) { "standard input".to_owned() } else { path.display().to_string() }
}

/// Reads a text; `advice` is the next step if it is not UTF-8.
fn read_stdin(what: &str, advice: &str) -> anyhow::Result<String> {
    let mut text = String::new();
    match std::io::stdin().lock().read_to_string(&mut text) {
        Ok(_) => Ok(text),
        Err(error) if error.kind() == std::io::ErrorKind::InvalidData => {
            Err(exit::usage(format!("{what} on standard input is not UTF-8 text: {advice}")))
        }
        Err(error) => Err(error).with_context(|| format!("cannot read {what} from standard input")),
    }
}

/// The paths and patterns of `--context`, with those of each `@FILE`.
fn context_paths(args: &[String]) -> anyhow::Result<Vec<String>> {
    let mut paths = Vec::new();
    for arg in args {
        let Some(file) = arg.strip_prefix('@').filter(|rest| !rest.starts_with('@')) else {
            // `@@types/a.ts` is the path `@types/a.ts`.
            paths.push(arg.strip_prefix('@').unwrap_or(arg).to_owned());
            continue;
        };
        let text = std::fs::read_to_string(file)
            .map_err(|error| exit::usage(format!("--context {arg}: cannot read {file}: {error}")))?;
        paths.extend(text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_owned));
    }
    Ok(paths)
}

fn override_with_flags(spec: &mut TaskSpec, args: &TaskArgs) -> anyhow::Result<()> {
    if let Some(language) = &args.language {
        spec.language.clone_from(language);
    }
    if args.base.is_some() {
        spec.base.clone_from(&args.base);
    }
    spec.context_files.extend(context_paths(&args.context)?);
    spec.constraints.extend(args.constraint.iter().cloned());
    spec.labels.extend(args.label.iter().cloned());
    if args.alpha.is_some() {
        spec.agents.alpha.model.clone_from(&args.alpha);
    }
    if args.beta.is_some() {
        spec.agents.beta.model.clone_from(&args.beta);
    }
    if args.seed.is_some() {
        spec.agents.alpha.seed = args.seed;
        spec.agents.beta.seed = args.seed;
    }
    spec.threshold = args.threshold.or(spec.threshold);
    spec.max_iterations = args.max_iterations.or(spec.max_iterations);
    spec.timeout_minutes = args.timeout_minutes.or(spec.timeout_minutes);
    if let Some(priority) = args.priority {
        spec.priority = priority;
    }
    Ok(())
}
