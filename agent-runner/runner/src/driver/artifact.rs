//! Builds an artifact from a creator's reply: the reply's files are applied to a git tree in the mirror and committed
//! there. The git commit exists, and its id is known, before the step that records the artifact is committed.

use cfq_convergence::{Base, History, Iteration};
use cfq_edits::{ReplyProblem, ReplyTarget};
use cfq_proto::blob::BlobHash;
use cfq_proto::ids::{ArtifactId, JobId, TaskNumber};
use cfq_proto::job::{Completion, FinishReason};
use cfq_proto::loop_step::Artifact;
use cfq_proto::task::TaskSpec;

use crate::edits::{edited_files, target_file};
use crate::pipeline::{is_revision_base, named_files};
use crate::workstream::{CommitPlan, GitError, Mirror, Snapshot, content_hash, unified};

/// Maximum length of the first line of a commit message, in characters: git's own tools show about this much.
const MAX_COMMIT_TITLE_CHARS: usize = 64;

/// Reply of the creator, with the job and the model that produced it.
#[derive(Debug, Clone)]
pub(super) struct CreatorReply {
    pub completion: Completion,
    pub job: JobId,
    pub model: String,
}

/// Returns the first line of a description, shortened to a commit title.
pub(super) fn commit_title(description: &str) -> String {
    let line = description.trim().lines().next().unwrap_or_default().trim();
    match line.char_indices().nth(MAX_COMMIT_TITLE_CHARS) {
        None => line.to_owned(),
        Some((end, _)) => {
            let end = line[..end].rfind(' ').unwrap_or(end);
            format!("{}...", &line[..end])
        }
    }
}

/// Returns the target file of a reply: the file that its content belongs to if the reply gives no file name.
pub(super) fn reply_target(spec: &TaskSpec, history: &History, base: &Snapshot<'_>) -> ReplyTarget {
    let previous: Vec<String> =
        revision_base(history).map(|i| i.artifact.files.iter().map(|f| f.path.clone()).collect()).unwrap_or_default();
    target_file(spec, &previous, &named_files(spec, base))
}

/// Returns the iteration whose files the next iteration revises.
pub(super) fn revision_base(history: &History) -> Option<&Iteration> {
    history.iterations.iter().rev().find(|i| is_revision_base(i))
}

/// Returns the parent of a new commit: the commit of the last iteration that passed the checks, else the base. A
/// quarantined commit is thus never an ancestor of another result.
fn parent_commit<'h>(history: &'h History, base: &'h Base) -> &'h str {
    let passed = history.iterations.iter().rev().find(|i| i.is_deliverable() && i.quarantine.is_none());
    passed.and_then(|i| i.artifact.commit.as_deref()).unwrap_or(&base.commit)
}

/// Creates the artifact of the next iteration. If the reply cannot be turned into files, the artifact has no commit,
/// and its `commit_message` states the reason.
pub(super) fn make_artifact(
    mirror: &Mirror,
    spec: &TaskSpec,
    history: &History,
    base: &Base,
    number: TaskNumber,
    reply: &CreatorReply,
) -> Result<Artifact, GitError> {
    let repository = mirror.repository()?;
    let snapshot = Snapshot::of(&repository, &base.commit)?;
    let iteration = history.next_iteration();
    let before = revision_base(history).map(|i| i.artifact.files.as_slice()).unwrap_or_default();
    let text = &reply.completion.text;
    let truncated = reply.completion.finish == FinishReason::Length;
    let edited = edited_files(text, &reply_target(spec, history, &snapshot), truncated, before, &snapshot);
    let mut artifact = Artifact {
        id: ArtifactId::fresh(),
        iteration,
        content_hash: String::new(),
        commit: None,
        parent: parent_commit(history, base).to_owned(),
        // The last step's time on the database's clock, so that a repeated step gives the same commit.
        commit_time: history.last_at,
        commit_message: String::new(),
        files: Vec::new(),
        diff: String::new(),
        windows_1252_in_diff: Vec::new(),
        job: reply.job,
        model: reply.model.clone(),
        prompt_tokens: reply.completion.usage.prompt_tokens,
        output_tokens: reply.completion.usage.output_tokens,
    };
    let edited = edited.map_err(|problem| problem.with_same_name(|path| snapshot.find_by_file_name(path)));
    match edited.map(|edited| edited.files) {
        Ok(files) => {
            artifact.content_hash = content_hash(&files);
            let title = commit_title(&spec.description);
            artifact.commit_message = format!("{number}: {title}\n\nIteration {iteration}, by {}.\n", reply.model);
            artifact.files = files;
            let plan = CommitPlan {
                base: &base.commit,
                files: &artifact.files,
                parent: &artifact.parent,
                message: &artifact.commit_message,
                time: artifact.commit_time,
            };
            let commit = mirror.commit(&plan)?;
            let diff = unified(&repository, &base.commit, &commit)?;
            (artifact.diff, artifact.windows_1252_in_diff) = (diff.text, diff.windows_1252);
            artifact.commit = Some(commit);
        }
        Err(problem) => {
            let note = match (truncated, &problem) {
                (true, ReplyProblem::Truncated { .. } | ReplyProblem::TruncatedEdit) | (false, _) => "",
                (true, _) => " (the reply reached its maximum length: be shorter)",
            };
            artifact.content_hash = BlobHash::of(text.as_bytes()).to_string();
            artifact.commit_message = format!("{problem}{note}");
        }
    }
    Ok(artifact)
}

/// Returns the artifact of iteration `number` and the artifacts whose commits are its ancestors, oldest first.
pub(super) fn artifact_chain(history: &History, number: u32) -> Vec<Artifact> {
    let mut chain = Vec::new();
    let mut next = history.iteration(number);
    while let Some(iteration) = next {
        chain.push(iteration.artifact.clone());
        // A parent is always an earlier iteration, so the loop ends.
        let earlier = &history.iterations[..(iteration.artifact.iteration as usize).saturating_sub(1)];
        next = earlier.iter().rev().find(|i| i.artifact.commit.as_ref() == Some(&iteration.artifact.parent));
    }
    chain.reverse();
    chain
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commit_title_is_one_short_line() {
        assert_eq!(commit_title("  Add a parser\nwith tests"), "Add a parser");
        let long = commit_title(&"word ".repeat(40));
        assert!(long.ends_with("word...") && long.len() <= MAX_COMMIT_TITLE_CHARS + 3, "{long}");
        assert_eq!(commit_title(""), "");
    }
}
