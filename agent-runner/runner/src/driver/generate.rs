//! From a creator's reply to an artifact: files applied to trees of the mirror, and a commit whose id is known before the
//! step that records it is committed.

use cfq_convergence::{Base, History, Iteration};
use cfq_proto::blob::BlobHash;
use cfq_proto::ids::{ArtifactId, JobId, TaskNumber};
use cfq_proto::job::{Completion, FinishReason};
use cfq_proto::looping::Artifact;
use cfq_proto::task::TaskSpec;

use crate::edits::{ReplyProblem, Target, apply, parse, target};
use crate::pipeline::is_basis;
use crate::workstream::{CommitPlan, GitError, Mirror, Snapshot, content_hash, unified};

/// Longest first line of a commit message, in characters: what git's own tools show.
const TITLE: usize = 64;

/// What was made, by whom.
#[derive(Debug, Clone)]
pub(super) struct Reply {
    pub completion: Completion,
    pub job: JobId,
    pub model: String,
}

/// The first line of a description, shortened.
pub(super) fn title(description: &str) -> String {
    let line = description.trim().lines().next().unwrap_or_default().trim();
    match line.char_indices().nth(TITLE) {
        None => line.to_owned(),
        Some((end, _)) => {
            let end = line[..end].rfind(' ').unwrap_or(end);
            format!("{}...", &line[..end])
        }
    }
}

/// The file a reply without names is about.
pub(super) fn target_of(spec: &TaskSpec, history: &History) -> Target {
    let previous: Vec<String> =
        basis(history).map(|i| i.artifact.files.iter().map(|f| f.path.clone()).collect()).unwrap_or_default();
    target(spec, &previous)
}

pub(super) fn basis(history: &History) -> Option<&Iteration> {
    history.iterations.iter().rev().find(|i| is_basis(i))
}

/// The commit a new one stands on: the last that may be handed off, so that nothing quarantined is ever among the
/// ancestors of a result.
fn parent<'h>(history: &'h History, base: &'h Base) -> &'h str {
    let presentable = history.iterations.iter().rev().find(|i| i.is_presentable());
    presentable.and_then(|i| i.artifact.commit.as_deref()).unwrap_or(&base.commit)
}

/// The artifact of the next iteration. A reply that cannot be turned into files makes one without commit; its message
/// then says why.
pub(super) fn make(
    mirror: &Mirror,
    spec: &TaskSpec,
    history: &History,
    base: &Base,
    number: TaskNumber,
    reply: &Reply,
) -> Result<Artifact, GitError> {
    let repository = mirror.repository()?;
    let snapshot = Snapshot::of(&repository, &base.commit)?;
    let iteration = history.next_iteration();
    let before = basis(history).map(|i| i.artifact.files.as_slice()).unwrap_or_default();
    let text = &reply.completion.text;
    let cut = reply.completion.finish == FinishReason::Length;
    let files = parse(text, &target_of(spec, history), cut).and_then(|edits| apply(&edits, before, &snapshot));
    let mut artifact = Artifact {
        id: ArtifactId::fresh(),
        iteration,
        content_hash: String::new(),
        commit: None,
        parent: parent(history, base).to_owned(),
        // The last step's time on the database's clock: the same when the step is made again.
        commit_time: history.last_at,
        commit_message: String::new(),
        files: Vec::new(),
        diff: String::new(),
        job: reply.job,
        model: reply.model.clone(),
        prompt_tokens: reply.completion.usage.prompt_tokens,
        output_tokens: reply.completion.usage.output_tokens,
    };
    match files {
        Ok(files) => {
            artifact.content_hash = content_hash(&files);
            artifact.commit_message =
                format!("{number}: {}\n\nIteration {iteration}, by {}.\n", title(&spec.description), reply.model);
            artifact.files = files;
            let plan = CommitPlan {
                base: &base.commit,
                files: &artifact.files,
                parent: &artifact.parent,
                message: &artifact.commit_message,
                time: artifact.commit_time,
            };
            let commit = mirror.commit(&plan)?;
            artifact.diff = unified(&repository, &base.commit, &commit)?;
            artifact.commit = Some(commit);
        }
        Err(problem) => {
            let cut = match (cut, &problem) {
                (true, ReplyProblem::Cut { .. }) | (false, _) => "",
                (true, _) => " (the reply was cut at its longest length: be shorter)",
            };
            artifact.content_hash = BlobHash::of(text.as_bytes()).to_string();
            artifact.commit_message = format!("{problem}{cut}");
        }
    }
    Ok(artifact)
}

/// The artifacts whose commits `number`'s stands on, oldest first, itself last.
pub(super) fn chain(history: &History, number: u32) -> Vec<Artifact> {
    let mut chain = Vec::new();
    let mut next = history.iteration(number);
    while let Some(iteration) = next {
        chain.push(iteration.artifact.clone());
        // A parent is always an earlier iteration, so this ends.
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
    fn a_title_is_one_short_line() {
        assert_eq!(title("  Add a parser\nwith tests"), "Add a parser");
        let long = title(&"word ".repeat(40));
        assert!(long.ends_with("word...") && long.len() <= TITLE + 3, "{long}");
        assert_eq!(title(""), "");
    }
}
