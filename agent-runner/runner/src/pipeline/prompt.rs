//! Prompts of the creator and the critic. Task and context come first and are identical for both roles and all
//! iterations; role instructions come last. All calls of one model thus share the longest possible prefix, which the
//! prefix cache of a node can reuse. The critic gets the files, the diff and the task. The creator's explanations are
//! not part of the artifact, so the critic never sees them.

use cfq_convergence::{History, Iteration};
use cfq_edits::ReplyTarget;
use cfq_proto::job::{ChatMessage, ChatRole, OutputFormat};
use cfq_proto::loop_step::{Artifact, ArtifactFile};
use cfq_proto::review::{Quarantine, ReviewFeedback};
use cfq_proto::task::TaskSpec;
use minijinja::value::Serde;
use minijinja::{Value, context};
use serde::Serialize;

use super::budget::{Budget, truncate};
use super::context::{ContextFile, context_files};
use super::feedback::feedback;
use super::render::{PromptError, comment_prefix, fenced, render};
use crate::edits::is_single_file;
use crate::workstream::Snapshot;

const SYSTEM: &str = "You are a software engineer on a team. Follow the instructions at the end exactly.";
const TASK: &str = include_str!("prompts/task.md");
const CREATOR: &str = include_str!("prompts/creator.md");
const CRITIC: &str = include_str!("prompts/critic.md");

/// Size of a file in bytes above which the creator may return only the places that change: about 200 lines.
const LARGE_FILE_BYTES: usize = 8 * 1024;

/// One file in the form in which a prompt template shows it.
#[derive(Serialize)]
struct ShownFile {
    path: String,
    content: String,
}

impl From<ContextFile> for ShownFile {
    fn from(file: ContextFile) -> Self {
        Self { path: file.path, content: file.content }
    }
}

/// Returns the creator's prompt for the next iteration.
///
/// # Errors
/// [`PromptError`] if a template does not render.
pub fn creator_prompt(
    spec: &TaskSpec,
    history: &History,
    target: &ReplyTarget,
    base: &Snapshot<'_>,
    budget: &Budget,
) -> Result<Vec<ChatMessage>, PromptError> {
    let before = history.iterations.iter().rev().find(|i| is_revision_base(i));
    let files = before.map(|i| shown_files(&i.artifact.files, budget.artifact)).unwrap_or_default();
    let feedback = history.last().map(|last| truncate(&feedback(last), budget.feedback)).unwrap_or_default();
    // The example is a comment, not `...`, because `...` is code in some languages and small models copy the example.
    let example = format!("{}the code of {}", comment_prefix(&target.path), target.path);
    let files = Value::from(Serde(&files));
    let paths: Vec<String> =
        before.map(|i| i.artifact.files.iter().map(|f| f.path.clone()).collect()).unwrap_or_default();
    let single = is_single_file(spec, &paths);
    let is_large = |path: &String| base.size(path).is_some_and(|bytes| bytes > LARGE_FILE_BYTES);
    let large = spec.context_files.iter().chain(&paths).any(is_large);
    let values = context! { files, feedback, example, single, large, target => target.path.as_str() };
    let part = render("creator", CREATOR, values)?;
    messages("creator", spec, history, base, budget, &part)
}

/// Returns the files that the next iteration revises, in the form of a complete reply. A revision mostly repeats them,
/// so the node drafts tokens from this text. Empty if there are no such files.
pub fn previous_as_reply(spec: &TaskSpec, history: &History) -> String {
    let Some(before) = history.iterations.iter().rev().find(|i| is_revision_base(i)) else { return String::new() };
    let files = &before.artifact.files;
    let paths: Vec<String> = files.iter().map(|f| f.path.clone()).collect();
    let single = is_single_file(spec, &paths);
    let blocks = files.iter().filter_map(|file| {
        let block = fenced(file.content.as_deref()?, Some(&file.path));
        Some(if single { block } else { format!("{}\n{block}", file.path) })
    });
    blocks.collect::<Vec<_>>().join("\n\n")
}

/// Returns the critic's prompt for an iteration.
///
/// # Errors
/// [`PromptError`] if a template does not render.
pub fn critic_prompt(
    spec: &TaskSpec,
    history: &History,
    iteration: &Iteration,
    base: &Snapshot<'_>,
    budget: &Budget,
) -> Result<Vec<ChatMessage>, PromptError> {
    let Artifact { files, diff, iteration, .. } = &iteration.artifact;
    critic_messages(spec, history, (files, diff, *iteration), base, budget)
}

/// Marks the end of the known part of a prompt. A private-use character, which no language uses.
const END_MARK: char = '\u{f8ff}';

/// Returns the known beginning of the critic's prompt for the next iteration while the creator is still generating it:
/// up to the current end of the open file, the one that may still grow, or up to the first file if there is no open
/// one. `open` is the path of the open file in `files`. The result is a prefix of [`critic_prompt`], byte for byte,
/// unless the rest of the reply changes the other files. `None` if the budget truncates the open file before its
/// current end.
///
/// # Errors
/// [`PromptError`] if a template does not render.
pub fn critic_prompt_prefix(
    spec: &TaskSpec,
    history: &History,
    (files, open): (&[ArtifactFile], &str),
    base: &Snapshot<'_>,
    budget: &Budget,
) -> Result<Option<Vec<ChatMessage>>, PromptError> {
    let mut files = files.to_vec();
    match files.iter_mut().find(|file| file.path == open).and_then(|file| file.content.as_mut()) {
        Some(content) => content.push(END_MARK),
        None => files = vec![ArtifactFile::text(END_MARK, "")],
    }
    let mut messages = critic_messages(spec, history, (&files, "", history.next_iteration()), base, budget)?;
    let Some(last) = messages.last_mut() else { return Ok(None) };
    let Some(end) = last.content.find(END_MARK) else { return Ok(None) };
    last.content.truncate(end);
    Ok(Some(messages))
}

fn critic_messages(
    spec: &TaskSpec,
    history: &History,
    (files, diff, iteration): (&[ArtifactFile], &str, u32),
    base: &Snapshot<'_>,
    budget: &Budget,
) -> Result<Vec<ChatMessage>, PromptError> {
    let replaces = files.iter().any(|f| base.read(&f.path).is_some());
    let bytes = if replaces { budget.artifact / 2 } else { budget.artifact };
    let diff = if replaces { truncate(diff, bytes) } else { String::new() };
    let files = shown_files(files, bytes);
    let part = render("critic", CRITIC, context! { files => Value::from(Serde(&files)), diff, iteration })?;
    messages("critic", spec, history, base, budget, &part)
}

/// Returns the JSON schema that constrains the critic's decoding: the schema of the type that the reply is parsed into.
pub(crate) fn review_format() -> OutputFormat {
    OutputFormat::JsonSchema { schema: schemars::schema_for!(ReviewFeedback).to_value() }
}

/// Whether a revision may start from the iteration's files. Unparsable files are allowed; dangerous files are not.
pub(crate) fn is_revision_base(iteration: &Iteration) -> bool {
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
    let context: Vec<ShownFile> =
        context_files(&spec.context_files, base, budget.context).into_iter().map(ShownFile::from).collect();
    let shared = render(role, TASK, context! { task, context => Value::from(Serde(&context)) })?;
    let content = format!("{}\n\n{}\n", shared.trim_end(), part.trim());
    Ok(vec![
        ChatMessage { role: ChatRole::System, content: SYSTEM.to_owned() },
        ChatMessage { role: ChatRole::User, content },
    ])
}

/// Returns the files with at most `bytes` of content in total.
fn shown_files(files: &[ArtifactFile], bytes: usize) -> Vec<ShownFile> {
    let mut left = bytes;
    files
        .iter()
        .map(|file| {
            let content = match &file.content {
                Some(content) => truncate(content, left),
                None => "[removed]".to_owned(),
            };
            left = left.saturating_sub(content.len());
            ShownFile { path: file.path.clone(), content }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::edits::{edited_files, target_file};
    use crate::workstream::testing::{UserRepo, artifact, file};
    use cfq_proto::prefix::{chain, shared_len};
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
            creator_prompt(&self.spec, history, &target_file(&self.spec, &[]), &base, &Budget::first(100)).unwrap()
        }

        fn critic(&self, history: &History) -> Vec<ChatMessage> {
            let repository = self.user.repo();
            let base = Snapshot::of(&repository, &self.user.base).unwrap();
            critic_prompt(&self.spec, history, history.last().unwrap(), &base, &Budget::first(100)).unwrap()
        }
    }

    #[test]
    fn prompts_match_the_snapshots() {
        let f = fixture();
        insta::assert_snapshot!("creator_first", f.creator(&History::default())[1].content);
        insta::assert_snapshot!("creator_revision", f.creator(&f.reviewed())[1].content);
        insta::assert_snapshot!("critic", f.critic(&f.reviewed())[1].content);
    }

    #[test]
    fn previous_files_have_the_form_of_a_reply() {
        let mut f = fixture();
        assert_eq!(previous_as_reply(&f.spec, &History::default()), "");
        let history = f.reviewed();
        let sent = previous_as_reply(&f.spec, &history);
        assert_eq!(sent, "add.py\n```python\ndef add(a, b):\n    return a - b\n```");
        let repository = f.user.repo();
        let base = Snapshot::of(&repository, &f.user.base).unwrap();
        let edited = edited_files(&sent, &target_file(&f.spec, &[]), false, &[], &base).unwrap();
        assert_eq!(edited.files, [file("add.py", "def add(a, b):\n    return a - b\n")]);
        f.spec.context_files.clear();
        assert_eq!(previous_as_reply(&f.spec, &history), "```python\ndef add(a, b):\n    return a - b\n```");
    }

    #[test]
    fn single_file_task_asks_for_one_code_block() {
        let mut f = fixture();
        f.spec.context_files.clear();
        let asked = &f.creator(&History::default())[1].content;
        assert!(asked.contains("one code block") && !asked.contains("its path"), "{asked}");
        f.spec.description.push_str(" Test it in test_add.py.");
        let asked = &f.creator(&History::default())[1].content;
        assert!(asked.contains("its path"), "{asked}");
    }

    #[test]
    fn places_of_a_long_file_may_be_replaced() {
        let mut f = fixture();
        assert!(!f.creator(&History::default())[1].content.contains("SEARCH"));
        f.user = UserRepo::new(&[("util.py", &"x = 1\n".repeat(LARGE_FILE_BYTES / 6 + 1))]);
        let asked = &f.creator(&History::default())[1].content;
        assert!(asked.contains("<<<<<<< SEARCH\n") && asked.trim_end().ends_with("Return nothing else."), "{asked}");
    }

    #[test]
    fn both_roles_share_task_and_context_as_a_prefix() {
        let f = fixture();
        let history = f.reviewed();
        let (alpha, beta) = (f.creator(&history), f.critic(&history));
        let common = alpha[1].content.bytes().zip(beta[1].content.bytes()).take_while(|(a, b)| a == b).count();
        assert!(alpha[1].content[..common].contains("def one()"), "context is shared");
        assert!(shared_len(&chain("m", &alpha), &chain("m", &beta)) >= 1);
        assert!(!alpha[1].content[..common].contains("# Instructions"), "instructions come last");
    }

    #[test]
    fn critic_prompt_prefix_is_a_prefix_of_the_critic_prompt() {
        let f = fixture();
        let repository = f.user.repo();
        let base = Snapshot::of(&repository, &f.user.base).unwrap();
        let whole = "def add(a, b):\n    \"\"\"Adds.\"\"\"\n    return a + b\n";
        let ahead = |files: &[ArtifactFile], open: &str| {
            let (history, budget) = (History::default(), Budget::first(100));
            let messages = critic_prompt_prefix(&f.spec, &history, (files, open), &base, &budget);
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
        let truncated = [file("add.py", &much)];
        let truncated =
            critic_prompt_prefix(&f.spec, &History::default(), (&truncated, "add.py"), &base, &Budget::first(100));
        assert_eq!(truncated.unwrap(), None);
    }

    #[test]
    fn reply_in_the_requested_form_is_parsed() {
        let f = fixture();
        let asked = &f.creator(&History::default())[1].content;
        let repository = f.user.repo();
        let base = Snapshot::of(&repository, &f.user.base).unwrap();
        let instructions = &asked[asked.find("# Instructions").unwrap()..];
        let edited = edited_files(instructions, &target_file(&f.spec, &[]), false, &[], &base).unwrap();
        assert_eq!(edited.files, [file("add.py", "# the code of add.py\n")]);
    }

    #[test]
    fn dangerous_code_is_hidden_but_its_findings_are_shown() {
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
    fn review_schema_matches_the_parsed_type() {
        let OutputFormat::JsonSchema { schema } = review_format() else { panic!("a schema") };
        for field in ["quality_score", "defects", "suggestions", "required_changes"] {
            assert!(schema["properties"].get(field).is_some(), "{field}");
        }
        assert_eq!(schema["properties"]["quality_score"]["maximum"], 100);
        let order: Vec<&String> = schema["properties"].as_object().unwrap().keys().collect();
        assert_eq!(order[..2], ["quality_score", "defects"], "the fields that determine the decision come first");
    }
}
