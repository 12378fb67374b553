//! Checks submitted tasks, and sets default values for the fields that a task leaves out. Each error names the invalid
//! field.

use cfq_proto::http::MAX_INSTRUCTIONS_BYTES;
use cfq_proto::label::Label;
use cfq_proto::plain_types::plain_types;
use cfq_proto::task::{Agent, TaskSpec};
use cfq_proto::task_ref::TaskRef;
use serde::de::DeserializeOwned;

use super::error::ApiError;
use crate::config::Defaults;

/// Maximum length of a task's title, in characters. The title is the description's first non-empty line, cut to this
/// length.
const MAX_TITLE_CHARS: usize = 80;
/// Maximum size of a task's description, in bytes; longer texts belong in a file of the repository.
const MAX_TASK_DESCRIPTION_BYTES: usize = 200_000;
/// Maximum number of entries of each list in a task.
const MAX_LIST_ENTRIES: usize = 200;
/// Maximum number of labels of a task.
const MAX_LABELS: usize = 20;
/// Number of hexadecimal digits of a SHA-1 commit id; libgit2 reads only SHA-1 repositories.
const COMMIT_ID_DIGITS: usize = 40;

/// Parses a request body; the error names the field.
pub fn parse_body<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, ApiError> {
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    let value = serde_path_to_error::deserialize(&mut reader).map_err(|error| {
        let path = error.path().to_string();
        let inner = error.into_inner();
        if inner.is_syntax() || inner.is_eof() {
            return ApiError::malformed(format!("the request body is not valid JSON: {inner}"));
        }
        let text = plain_types(&inner.to_string());
        // serde reports "unknown field `x`, expected ..." and "missing field `x`" at the path of their parent.
        let named =
            text.split_once("field `").and_then(|(_, rest)| rest.split_once('`')).map(|(name, _)| name.to_owned());
        let field = match (path.as_str(), named) {
            (".", Some(name)) => name,
            (path, Some(name)) if !path.ends_with(&name) => format!("{path}.{name}"),
            (path, _) => path.to_owned(),
        };
        ApiError::invalid(field.clone(), format!("{field}: {text}"))
    })?;
    reader.end().map_err(|_| ApiError::malformed("the request body has extra characters after its JSON value"))?;
    Ok(value)
}

/// Sets the fields that the task leaves out to the values in `defaults`, then validates the task.
pub fn with_defaults(mut spec: TaskSpec, defaults: &Defaults) -> Result<TaskSpec, ApiError> {
    spec.threshold = spec.threshold.or(Some(defaults.threshold));
    spec.max_iterations = spec.max_iterations.or(Some(defaults.max_iterations));
    spec.timeout_minutes = spec.timeout_minutes.or(Some(defaults.timeout_minutes));
    for agent in Agent::ALL {
        if let Some(text) = &spec.agents.of(agent).instructions {
            check_instructions(&format!("agents.{agent}.instructions"), text)?;
        }
        let default = defaults.agents.of(agent);
        let binding = spec.agents.of_mut(agent);
        // A default fallback belongs to the default model: a task that names its model may not want another server.
        if binding.model.is_none() && binding.fallback.is_none() {
            binding.fallback.clone_from(&default.fallback);
        }
        binding.model = binding.model.take().or_else(|| default.model.clone());
        binding.temperature = binding.temperature.or(default.temperature);
        binding.seed = binding.seed.or(default.seed);
        binding.deterministic = binding.deterministic.or(default.deterministic);
        binding.max_tokens = binding.max_tokens.or(default.max_tokens);
    }
    spec.labels.sort();
    spec.labels.dedup();
    validate(&spec)?;
    Ok(spec)
}

/// Refuses instructions that are too long for a prompt.
pub fn check_instructions(field: &str, text: &str) -> Result<(), ApiError> {
    if text.len() <= MAX_INSTRUCTIONS_BYTES {
        return Ok(());
    }
    Err(ApiError::invalid(field, format!("{field}: at most {MAX_INSTRUCTIONS_BYTES} bytes, not {}", text.len())))
}

/// Refuses references that have a meaning only in a batch.
pub fn check_references(spec: &TaskSpec) -> Result<(), ApiError> {
    if spec.name.is_some() {
        return Err(ApiError::invalid("name", "name: only tasks of a batch have names; leave it out"));
    }
    check_retry_of(spec)?;
    match spec.after.iter().find(|task| matches!(task, TaskRef::Name(_))) {
        None => Ok(()),
        Some(task) => Err(ApiError::invalid(
            "after",
            format!("after: there is no task {task}: use a number as in t42 or a task id; `cfq ls` lists all tasks"),
        )),
    }
}

/// Refuses to retry a task of the same batch.
pub fn check_retry_of(spec: &TaskSpec) -> Result<(), ApiError> {
    match &spec.retry_of {
        None | Some(TaskRef::Key(_)) => Ok(()),
        Some(TaskRef::Name(name)) => Err(ApiError::invalid(
            "retry_of",
            format!("retry_of: there is no task {name}: use the number or id of a failed or cancelled task"),
        )),
    }
}

/// Refuses more labels than a task may have.
pub fn check_label_count(labels: &[Label]) -> Result<(), ApiError> {
    if labels.len() > MAX_LABELS {
        return Err(ApiError::invalid("labels", "labels: has more than 20 entries; remove some"));
    }
    Ok(())
}

fn validate(spec: &TaskSpec) -> Result<(), ApiError> {
    let bad = |field: &str, reason: &str| Err(ApiError::invalid(field, format!("{field}: {reason}")));
    if spec.description.trim().is_empty() {
        return bad("description", "is empty; describe the change that you want");
    }
    if spec.description.len() > MAX_TASK_DESCRIPTION_BYTES {
        return bad(
            "description",
            "is longer than 200,000 bytes; move it to a file and list the file in context_files",
        );
    }
    if !spec.repo.starts_with('/') {
        return bad("repo", "must be an absolute path, such as /home/me/project");
    }
    // Branch names are refused: a branch may move between two reads, and the repository may be on another machine.
    let is_commit_id = |id: &String| id.len() == COMMIT_ID_DIGITS && id.bytes().all(|c| c.is_ascii_hexdigit());
    let commit_id = "must be a full commit id of 40 hexadecimal digits, as `git rev-parse HEAD` prints it";
    if !spec.base.as_ref().is_none_or(is_commit_id) {
        return bad("base", commit_id);
    }
    if let Some(review) = &spec.review {
        if !is_commit_id(&review.head) {
            return bad("review.head", commit_id);
        }
        if spec.base.is_none() {
            return bad("base", "is missing; a review needs the commit before the change");
        }
        if spec.base.as_ref().is_some_and(|base| base.eq_ignore_ascii_case(&review.head)) {
            return bad("review.head", "is the same commit as base, so there is no change to review");
        }
    }
    let covered_files = spec.coverage.as_ref().map(|target| target.files.as_slice()).unwrap_or_default();
    let paths = spec.context_files.iter().map(|path| ("context_files", path));
    for (field, path) in paths.chain(covered_files.iter().map(|path| ("coverage.files", path))) {
        let is_plain = field != "coverage.files" || !path.split('/').any(|part| part.is_empty() || part == ".");
        if !is_plain || path.is_empty() || path.starts_with('/') || path.split('/').any(|part| part == "..") {
            return bad(field, &format!("{path:?} must be a path relative to the repository root, without `..`"));
        }
    }
    for (field, length) in [
        ("context_files", spec.context_files.len()),
        ("coverage.files", covered_files.len()),
        ("constraints", spec.constraints.len()),
        ("examples", spec.examples.len()),
        ("after", spec.after.len()),
    ] {
        if length > MAX_LIST_ENTRIES {
            return bad(field, "has more than 200 entries; remove some");
        }
    }
    check_label_count(&spec.labels)?;
    if spec.coverage.as_ref().is_some_and(|target| !(1..=100).contains(&target.percent)) {
        return bad("coverage.percent", "must be from 1 to 100");
    }
    if spec.threshold.is_none_or(|t| !(0.0..=100.0).contains(&t)) {
        return bad("threshold", "must be from 0 to 100");
    }
    if spec.max_iterations.is_none_or(|n| !(1..=1000).contains(&n)) {
        return bad("max_iterations", "must be from 1 to 1000");
    }
    if spec.timeout_minutes.is_none_or(|m| !(m > 0.0 && m <= 10_080.0)) {
        return bad("timeout_minutes", "must be above 0 and at most 10080 (a week)");
    }
    if spec.deadline.is_some_and(|d| !(0..=253_402_300_799).contains(&d)) {
        return bad("deadline", "must be a Unix time in seconds");
    }
    if spec.run_at.is_some_and(|at| !(0..=253_402_300_799).contains(&at)) {
        return bad("run_at", "must be a Unix time in seconds");
    }
    if spec.deadline.zip(spec.run_at).is_some_and(|(deadline, run_at)| deadline <= run_at) {
        return bad("deadline", "must be after run_at");
    }
    for agent in agents_called(spec) {
        let binding = spec.agents.of(*agent);
        let field = format!("agents.{agent}.model");
        if binding.model.is_none() {
            let reason = format!("is missing; name a model, or set model under [agents.{agent}] in the configuration");
            return bad(&field, &reason);
        }
        if binding.temperature.is_some_and(|t| !(0.0..=2.0).contains(&t)) {
            return bad(&format!("agents.{agent}.temperature"), "must be from 0 to 2");
        }
        if binding.max_tokens == Some(0) {
            return bad(&format!("agents.{agent}.max_tokens"), "must be at least 1");
        }
    }
    let texts = [("description", &spec.description), ("language", &spec.language), ("repo", &spec.repo)];
    let lists = spec
        .context_files
        .iter()
        .map(|t| ("context_files", t))
        .chain(covered_files.iter().map(|t| ("coverage.files", t)))
        .chain(spec.constraints.iter().map(|t| ("constraints", t)));
    let codes = spec.examples.iter().map(|e| ("examples", &e.code));
    if let Some((field, _)) = texts.into_iter().chain(lists).chain(codes).find(|(_, text)| text.contains('\0')) {
        return bad(field, "contains a NUL character; remove it");
    }
    Ok(())
}

/// The agents whose models the task calls.
pub fn agents_called(spec: &TaskSpec) -> &'static [Agent] {
    match spec.review {
        Some(_) => &[Agent::Beta],
        None => &Agent::ALL,
    }
}

/// The title of a task: its description's first line, after `Review: ` for a review.
pub fn title_of(spec: &TaskSpec) -> String {
    match spec.review {
        Some(_) => title(&format!("Review: {}", spec.description.trim_start())),
        None => title(&spec.description),
    }
}

/// The description's first non-empty line, shortened to `MAX_TITLE_CHARS`.
pub fn title(description: &str) -> String {
    let line = description.lines().map(str::trim).find(|l| !l.is_empty()).unwrap_or_default();
    if line.chars().count() <= MAX_TITLE_CHARS {
        return line.to_owned();
    }
    let cut: String = line.chars().take(MAX_TITLE_CHARS - 1).collect();
    format!("{}…", cut.trim_end())
}

#[cfg(test)]
mod tests {
    use cfq_proto::model::ModelId;
    use serde_json::json;

    use super::*;

    #[test]
    fn default_fallback_belongs_to_the_default_model() {
        let mut defaults = Defaults::default();
        let bindings = json!({ "model": "path:/own.gguf", "fallback": "openai:cloud/m" });
        defaults.agents.alpha = serde_json::from_value(bindings).unwrap();
        defaults.agents.beta = defaults.agents.alpha.clone();
        for (alpha, fallback) in [
            (json!({}), Some("openai:cloud/m")),
            (json!({ "model": "path:/private.gguf" }), None),
            (json!({ "fallback": "path:/small.gguf" }), Some("path:/small.gguf")),
        ] {
            let spec =
                json!({ "description": "x", "repo": "/repo", "base": "0".repeat(40), "agents": { "alpha": alpha } });
            let spec = with_defaults(serde_json::from_value(spec).unwrap(), &defaults).unwrap();
            let found = spec.agents.alpha.fallback.as_ref().map(ModelId::as_str);
            assert_eq!(found, fallback, "{alpha}");
        }
    }
}
