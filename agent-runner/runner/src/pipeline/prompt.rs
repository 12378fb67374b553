//! The prompts. Task and context come first and are the same for both roles and all iterations, role instructions come
//! last, so that all calls of one model share the longest prefix. The critic gets the files, the diff and the task; the
//! creator's own words are not in the artifact, so they cannot reach it.

use cfq_convergence::{History, Iteration};
use cfq_proto::job::{ChatMessage, ChatRole, OutputFormat};
use cfq_proto::looping::{Artifact, ArtifactFile};
use cfq_proto::review::{Quarantine, ReviewFeedback};
use cfq_proto::task::TaskSpec;
use minijinja::value::Serde;
use minijinja::{Environment, UndefinedBehavior, Value, context};
use serde::Serialize;

use super::budget::{Budget, cut};
use super::context::{ContextFile, context_files};
use crate::edits::{Target, is_single};
use crate::workstream::Snapshot;

const SYSTEM: &str = "You work on software together with others. Follow the instructions at the end exactly.";
const TASK: &str = include_str!("prompts/task.md");
const CREATOR: &str = include_str!("prompts/creator.md");
const CRITIC: &str = include_str!("prompts/critic.md");

/// A template that does not render: a bug in it, which the tests would show.
#[derive(Debug, thiserror::Error)]
#[error("cannot write the prompt of the {role}")]
pub struct PromptError {
    role: &'static str,
    #[source]
    source: minijinja::Error,
}

#[derive(Serialize)]
struct Shown {
    path: String,
    content: String,
}

impl From<ContextFile> for Shown {
    fn from(file: ContextFile) -> Self {
        Self { path: file.path, content: file.content }
    }
}

/// What the creator is asked for the next iteration.
pub fn creator(
    spec: &TaskSpec,
    history: &History,
    target: &Target,
    base: &Snapshot<'_>,
    budget: &Budget,
) -> Result<Vec<ChatMessage>, PromptError> {
    let before = history.iterations.iter().rev().find(|i| is_basis(i));
    let files = before.map(|i| shown(&i.artifact.files, budget.artifact)).unwrap_or_default();
    let feedback = history.last().map(|last| cut(&feedback(last), budget.feedback)).unwrap_or_default();
    // Not `...`: that is code in some languages, and small models copy what they are shown.
    let example = format!("{}the code of {}", comment(&target.path), target.path);
    let files = Value::from(Serde(&files));
    let paths: Vec<String> =
        before.map(|i| i.artifact.files.iter().map(|f| f.path.clone()).collect()).unwrap_or_default();
    let single = is_single(spec, &paths);
    let values = context! { files, feedback, example, single, target => target.path.as_str() };
    let part = render("creator", CREATOR, values)?;
    messages("creator", spec, history, base, budget, &part)
}

/// The files that the next iteration revises, whole and as a reply would send them: what a revision mostly repeats. Empty
/// where there are none.
pub fn previous(spec: &TaskSpec, history: &History) -> String {
    let Some(before) = history.iterations.iter().rev().find(|i| is_basis(i)) else { return String::new() };
    let files = &before.artifact.files;
    let paths: Vec<String> = files.iter().map(|f| f.path.clone()).collect();
    let single = is_single(spec, &paths);
    let sent = files.iter().filter_map(|file| {
        let block = fenced(file.content.as_deref()?, Some(&file.path));
        Some(if single { block } else { format!("{}\n{block}", file.path) })
    });
    sent.collect::<Vec<_>>().join("\n\n")
}

/// What the critic is asked about an iteration.
pub fn critic(
    spec: &TaskSpec,
    history: &History,
    iteration: &Iteration,
    base: &Snapshot<'_>,
    budget: &Budget,
) -> Result<Vec<ChatMessage>, PromptError> {
    let Artifact { files, diff, iteration, .. } = &iteration.artifact;
    work_to_review(spec, history, (files, diff, *iteration), base, budget)
}

/// Stands where a prompt ends for now; no language has it.
const END: char = '\u{f8ff}';

/// What the critic will be asked about the next iteration as far as it is known while that is still being written: up to the
/// end of `open`, the one of `files` that may still grow, or up to the first file where there are none. It is the beginning
/// of [`critic`]'s prompt, to the byte, if the rest of the reply leaves the other files as they are. `None` where the budget
/// cuts the file off before its end.
pub fn critic_ahead(
    spec: &TaskSpec,
    history: &History,
    (files, open): (&[ArtifactFile], &str),
    base: &Snapshot<'_>,
    budget: &Budget,
) -> Result<Option<Vec<ChatMessage>>, PromptError> {
    let mut files = files.to_vec();
    match files.iter_mut().find(|file| file.path == open).and_then(|file| file.content.as_mut()) {
        Some(content) => content.push(END),
        None => files = vec![ArtifactFile { path: END.to_string(), content: Some(String::new()) }],
    }
    let mut messages = work_to_review(spec, history, (&files, "", history.next_iteration()), base, budget)?;
    let Some(last) = messages.last_mut() else { return Ok(None) };
    let Some(end) = last.content.find(END) else { return Ok(None) };
    last.content.truncate(end);
    Ok(Some(messages))
}

fn work_to_review(
    spec: &TaskSpec,
    history: &History,
    (files, diff, iteration): (&[ArtifactFile], &str, u32),
    base: &Snapshot<'_>,
    budget: &Budget,
) -> Result<Vec<ChatMessage>, PromptError> {
    let replaces = files.iter().any(|f| base.read(&f.path).is_some());
    let room = if replaces { budget.artifact / 2 } else { budget.artifact };
    let diff = if replaces { cut(diff, room) } else { String::new() };
    let files = shown(files, room);
    let part = render("critic", CRITIC, context! { files => Value::from(Serde(&files)), diff, iteration })?;
    messages("critic", spec, history, base, budget, &part)
}

/// The schema that constrains a critic's decoding: the type that the answer is parsed into.
pub(crate) fn review_format() -> OutputFormat {
    OutputFormat::JsonSchema { schema: schemars::schema_for!(ReviewFeedback).to_value() }
}

/// Whether a revision starts from these files: also from what does not parse, never from what is dangerous.
pub(crate) fn is_basis(iteration: &Iteration) -> bool {
    iteration.artifact.commit.is_some() && iteration.quarantine != Some(Quarantine::Dangerous)
}

fn messages(
    role: &'static str,
    spec: &TaskSpec,
    history: &History,
    base: &Snapshot<'_>,
    budget: &Budget,
    part: &str,
) -> Result<Vec<ChatMessage>, PromptError> {
    let constraints: Vec<&String> = spec.constraints.iter().chain(&history.constraints).collect();
    let task = context! {
        description => spec.description.trim(),
        language => spec.language.as_str(),
        constraints => Value::from(Serde(&constraints)),
        examples => Value::from(Serde(&spec.examples)),
    };
    let context: Vec<Shown> =
        context_files(&spec.context_files, base, budget.context).into_iter().map(Shown::from).collect();
    let shared = render(role, TASK, context! { task, context => Value::from(Serde(&context)) })?;
    let content = format!("{}\n\n{}\n", shared.trim_end(), part.trim());
    Ok(vec![
        ChatMessage { role: ChatRole::System, content: SYSTEM.to_owned() },
        ChatMessage { role: ChatRole::User, content },
    ])
}

fn render(role: &'static str, template: &str, values: Value) -> Result<String, PromptError> {
    let mut environment = Environment::new();
    environment.set_undefined_behavior(UndefinedBehavior::Strict);
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.add_filter("fenced", fenced);
    environment.render_str(template, values).map_err(|source| PromptError { role, source })
}

/// A code block around `text`, with a fence longer than any inside, labelled with the language of `path`.
fn fenced(text: &str, path: Option<&str>) -> String {
    let inner = text.lines().filter_map(|line| {
        let line = line.trim_start();
        Some(line.len() - line.trim_start_matches('`').len()).filter(|n| *n >= 3)
    });
    let fence = "`".repeat(inner.max().map_or(3, |n| n + 1));
    let label = path.and_then(|p| p.rsplit_once('.')).map_or("", |(_, extension)| match extension {
        "py" | "pyi" => "python",
        "js" | "mjs" | "cjs" => "javascript",
        "ts" | "mts" => "typescript",
        "rs" => "rust",
        other => other,
    });
    format!("{fence}{label}\n{}\n{fence}", text.trim_end_matches('\n'))
}

/// How a comment begins in the language of `path`.
fn comment(path: &str) -> &'static str {
    match path.rsplit_once('.').map_or("", |(_, e)| e) {
        "js" | "mjs" | "cjs" | "jsx" | "ts" | "tsx" | "rs" | "go" | "c" | "h" | "cpp" | "hpp" | "java" | "kt"
        | "cs" | "swift" | "scala" | "php" | "css" => "// ",
        "sql" | "lua" => "-- ",
        "py" | "sh" | "rb" | "pl" | "yaml" | "yml" | "toml" => "# ",
        _ => "",
    }
}

/// Files within a budget of bytes together.
fn shown(files: &[ArtifactFile], bytes: usize) -> Vec<Shown> {
    let mut left = bytes;
    files
        .iter()
        .map(|file| {
            let content = match &file.content {
                Some(content) => cut(content, left),
                None => "[removed]".to_owned(),
            };
            left = left.saturating_sub(content.len());
            Shown { path: file.path.clone(), content }
        })
        .collect()
}

/// What checks and critic said about an iteration, the blocking parts first.
fn feedback(iteration: &Iteration) -> String {
    let mut lines = Vec::new();
    for finding in &iteration.findings {
        let place = match (finding.path.is_empty(), finding.line) {
            (true, _) => String::new(),
            (false, 0) => format!("{}: ", finding.path),
            (false, line) => format!("{}:{line}: ", finding.path),
        };
        lines.push(format!("- {place}{}", finding.message));
    }
    if let Some(review) = &iteration.review {
        lines.push(format!("A reviewer gave {:.0} of 100.", review.quality_score));
        let mut defects: Vec<_> = review.defects.iter().collect();
        defects.sort_by_key(|d| d.severity);
        for defect in defects {
            let fix = defect.suggested_fix.as_deref().map_or(String::new(), |fix| format!(" Fix: {fix}"));
            lines.push(format!("- {} ({}): {}{fix}", defect.severity.as_str(), defect.location, defect.description));
        }
        lines.extend(review.required_changes.iter().map(|change| format!("- must change: {change}")));
        lines.extend(review.suggestions.iter().map(|suggestion| format!("- suggestion: {suggestion}")));
    }
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::edits::{Edit, parse, target};
    use crate::workstream::testing::{UserRepo, artifact, file};
    use cfq_proto::prefix::{chain, shared};
    use cfq_proto::review::{CheckKind, Defect, Finding, Severity};

    struct Fixture {
        user: UserRepo,
        spec: TaskSpec,
    }

    fn fixture() -> Fixture {
        let user = UserRepo::new(&[
            ("util.py", &"def one():\n    return 1\n".repeat(30)),
            ("README.md", "# Title\n```\ncode\n```\n"),
        ]);
        let spec = serde_json::from_value(serde_json::json!({
            "description": "Write a Python function add(a, b) in add.py that returns the sum of two numbers.",
            "language": "python", "repo": "/r", "context_files": ["util.py", "README.md"], "constraints": ["no imports"],
            "examples": [{ "title": "adding", "code": "add(1, 2) == 3" }],
        }));
        Fixture { user, spec: spec.unwrap() }
    }

    impl Fixture {
        fn reviewed(&self) -> History {
            let repository = self.user.repo();
            let made = artifact(
                &repository,
                &self.user.base,
                &self.user.base,
                1,
                vec![file("add.py", "def add(a, b):\n    return a - b\n")],
            );
            let defect = Defect {
                severity: Severity::Major,
                category: "correctness".into(),
                location: "add.py:2".into(),
                description: "subtracts".into(),
                suggested_fix: Some("add".into()),
            };
            let review = ReviewFeedback {
                quality_score: 30.0,
                defects: vec![defect],
                suggestions: vec!["add a docstring".into()],
                required_changes: vec!["return the sum".into()],
            };
            let iteration = Iteration {
                artifact: made,
                checked: true,
                findings: vec![],
                quarantine: None,
                review: Some(review),
                decided: None,
            };
            History { iterations: vec![iteration], ..History::default() }
        }

        fn creator(&self, history: &History) -> Vec<ChatMessage> {
            let repository = self.user.repo();
            let base = Snapshot::of(&repository, &self.user.base).unwrap();
            creator(&self.spec, history, &target(&self.spec, &[]), &base, &Budget::first(100)).unwrap()
        }

        fn critic(&self, history: &History) -> Vec<ChatMessage> {
            let repository = self.user.repo();
            let base = Snapshot::of(&repository, &self.user.base).unwrap();
            critic(&self.spec, history, history.last().unwrap(), &base, &Budget::first(100)).unwrap()
        }
    }

    #[test]
    fn the_prompts_are_as_expected() {
        let f = fixture();
        insta::assert_snapshot!("creator_first", f.creator(&History::default())[1].content);
        insta::assert_snapshot!("creator_revision", f.creator(&f.reviewed())[1].content);
        insta::assert_snapshot!("critic", f.critic(&f.reviewed())[1].content);
    }

    #[test]
    fn what_is_revised_reads_as_the_reply_that_would_send_it() {
        let mut f = fixture();
        assert_eq!(previous(&f.spec, &History::default()), "");
        let history = f.reviewed();
        let sent = previous(&f.spec, &history);
        assert_eq!(sent, "add.py\n```python\ndef add(a, b):\n    return a - b\n```");
        let edits = parse(&sent, &target(&f.spec, &[]), false).unwrap();
        assert_eq!(
            edits,
            [Edit::Write { path: "add.py".into(), content: "def add(a, b):\n    return a - b\n".into() }]
        );
        f.spec.context_files.clear();
        assert_eq!(previous(&f.spec, &history), "```python\ndef add(a, b):\n    return a - b\n```");
    }

    #[test]
    fn a_task_of_one_file_is_asked_for_in_the_simplest_form() {
        let mut f = fixture();
        f.spec.context_files.clear();
        let asked = &f.creator(&History::default())[1].content;
        assert!(asked.contains("one code block") && !asked.contains("its path"), "{asked}");
        f.spec.description.push_str(" Test it in test_add.py.");
        let asked = &f.creator(&History::default())[1].content;
        assert!(asked.contains("its path"), "{asked}");
    }

    #[test]
    fn both_roles_share_task_and_context_as_a_prefix() {
        let f = fixture();
        let history = f.reviewed();
        let (alpha, beta) = (f.creator(&history), f.critic(&history));
        let common = alpha[1].content.bytes().zip(beta[1].content.bytes()).take_while(|(a, b)| a == b).count();
        assert!(alpha[1].content[..common].contains("def one()"), "context is shared");
        assert!(shared(&chain("m", &alpha), &chain("m", &beta)) >= 1);
        assert!(!alpha[1].content[..common].contains("What to do"), "instructions come last");
    }

    #[test]
    fn what_is_known_of_a_review_ahead_is_its_beginning_to_the_byte() {
        let f = fixture();
        let repository = f.user.repo();
        let base = Snapshot::of(&repository, &f.user.base).unwrap();
        let whole = "def add(a, b):\n    \"\"\"Adds.\"\"\"\n    return a + b\n";
        let ahead = |files: &[ArtifactFile], open: &str| {
            let messages = critic_ahead(&f.spec, &History::default(), (files, open), &base, &Budget::first(100));
            messages.unwrap().unwrap().pop().unwrap().content
        };
        for (path, content) in [("add.py", whole.to_owned()), ("util.py", format!("{whole}{whole}"))] {
            let made = vec![file("a.md", "# A\n"), file(path, &content)];
            let made = artifact(&repository, &f.user.base, &f.user.base, 1, made);
            let mut history = f.reviewed();
            history.iterations[0].artifact = made.clone();
            let asked = &f.critic(&history)[1].content;
            let known: Vec<String> = std::iter::once(ahead(&[], ""))
                .chain([0, 15, content.len()].map(|end| {
                    let mut files = made.files.clone();
                    files[1].content = Some(content[..end].to_owned());
                    ahead(&files, path)
                }))
                .collect();
            assert!(known.iter().all(|known| asked.starts_with(known.as_str())), "{known:#?} of {asked}");
            assert!(known.is_sorted_by_key(String::len) && known[3].ends_with(&content), "{known:#?}");
            assert!(known[0].contains("def one()") && asked.len() - known[3].len() < 2000);
        }
        let much = "x = 1\n".repeat(20_000);
        let cut_off = [file("add.py", &much)];
        let cut_off = critic_ahead(&f.spec, &History::default(), (&cut_off, "add.py"), &base, &Budget::first(100));
        assert_eq!(cut_off.unwrap(), None);
    }

    #[test]
    fn a_creator_that_follows_the_form_is_understood() {
        let f = fixture();
        let asked = &f.creator(&History::default())[1].content;
        let edits = parse(&asked[asked.find("# What to do").unwrap()..], &target(&f.spec, &[]), false).unwrap();
        assert_eq!(edits, [Edit::Write { path: "add.py".into(), content: "# the code of add.py\n".into() }]);
    }

    #[test]
    fn dangerous_code_is_not_shown_again_but_its_findings_are() {
        let f = fixture();
        let mut history = f.reviewed();
        let last = &mut history.iterations[0];
        last.quarantine = Some(Quarantine::Dangerous);
        last.review = None;
        let finding =
            Finding { check: CheckKind::Dangerous, path: "add.py".into(), line: 2, message: "drops a table".into() };
        last.findings = vec![finding];
        history.constraints = vec!["touch no database".into()];
        let text = &f.creator(&history)[1].content;
        assert!(
            !text.contains("a - b") && text.contains("add.py:2: drops a table") && text.contains("touch no database")
        );
    }

    #[test]
    fn a_fence_is_longer_than_those_inside() {
        assert_eq!(fenced("a\n````\nb\n````\n", Some("x.md")), "`````md\na\n````\nb\n````\n`````");
        assert_eq!(fenced("x = `1`\n", None), "```\nx = `1`\n```");
    }

    #[test]
    fn the_schema_is_the_parsers_type() {
        let OutputFormat::JsonSchema { schema } = review_format() else { panic!("a schema") };
        for field in ["quality_score", "defects", "suggestions", "required_changes"] {
            assert!(schema["properties"].get(field).is_some(), "{field}");
        }
        assert_eq!(schema["properties"]["quality_score"]["maximum"], 100);
        let order: Vec<&String> = schema["properties"].as_object().unwrap().keys().collect();
        assert_eq!(order[..2], ["quality_score", "defects"], "what decides is written first");
    }
}
