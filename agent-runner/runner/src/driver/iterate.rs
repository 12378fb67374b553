//! Actions of the review loop: create, check, review, decide.

use cfq_convergence::{Iteration, decide};
use cfq_proto::blob::Payload;
use cfq_proto::job::OutputFormat;
use cfq_proto::loop_step::Step;
use cfq_proto::review::{CheckKind, Finding, Quarantine};
use cfq_proto::task::Agent;

use super::artifact::{CreatorReply, make_artifact, reply_target};
use super::port::{DriveError, Stopped, TaskPort};
use super::task_driver::{ActionError, TaskDriver};
use crate::checks::check;
use crate::pipeline::{
    Budget, creator_prompt, critic_prompt, early_stopped_review, parse_review, review_format, salvage_review,
};
use crate::workstream::Snapshot;

impl<P: TaskPort> TaskDriver<P> {
    /// Asks the creator for an artifact and records the artifact.
    pub(super) async fn create(&mut self) -> Result<(), ActionError> {
        let mirror = self.prepare_mirror().await?;
        let base = self.base()?;
        let prompt = {
            let (mirror, base, spec, history) = (mirror.clone(), base.clone(), self.spec.clone(), self.history.clone());
            move |budget: Budget| {
                let (mirror, base, spec, history) = (mirror.clone(), base.clone(), spec.clone(), history.clone());
                tokio::task::spawn_blocking(move || {
                    let repository = mirror.repository()?;
                    let snapshot = Snapshot::of(&repository, &base.commit)?;
                    Ok(creator_prompt(&spec, &history, &reply_target(&spec, &history), &snapshot, &budget)?)
                })
            }
        };
        let Some(answer) = self.request_answer(Agent::Alpha, OutputFormat::Text, prompt, |_, _| Ok(())).await? else {
            return Ok(());
        };
        let reply = CreatorReply { completion: answer.completion, job: answer.job, model: answer.model.to_string() };
        let (spec, history, number) = (self.spec.clone(), self.history.clone(), self.number);
        let artifact_mirror = mirror.clone();
        let made = tokio::task::spawn_blocking(move || {
            make_artifact(&artifact_mirror, &spec, &history, &base, number, &reply)
        });
        let artifact = made.await??;
        let commit = artifact.commit.clone();
        let sent = Step::Generated { artifact: self.port.send_artifact(artifact.clone()).await? };
        let kept = Step::Generated { artifact: Payload::Inline(artifact) };
        self.commit_step_as(sent, kept, answer.spent_ms).await?;
        match commit {
            Some(commit) => self.update_worktree(&mirror, commit).await,
            None => Ok(()),
        }
    }

    /// Runs the built-in static checks on the last artifact and records their findings.
    pub(super) async fn check(&mut self) -> Result<(), ActionError> {
        let mirror = self.prepare_mirror().await?;
        let base = self.base()?;
        let artifact = self.last()?.artifact.clone();
        let iteration = artifact.iteration;
        let (findings, quarantine) = if artifact.commit.is_none() {
            let finding =
                Finding { check: CheckKind::Reply, path: String::new(), line: 0, message: artifact.commit_message };
            (vec![finding], Some(Quarantine::Unparsable))
        } else {
            let checked = tokio::task::spawn_blocking(move || {
                let repository = mirror.repository()?;
                let snapshot = Snapshot::of(&repository, &base.commit)?;
                Ok::<_, ActionError>(check(&artifact.files, |path| snapshot.read_text(path)))
            });
            checked.await??
        };
        Ok(self.commit_step(Step::Checked { iteration, findings, quarantine }, 0).await?)
    }

    /// Asks the critic to review the last artifact and records the review.
    pub(super) async fn review(&mut self) -> Result<(), ActionError> {
        let mirror = self.prepare_mirror().await?;
        let base = self.base()?;
        let last = self.last()?.clone();
        let iteration = last.artifact.iteration;
        let prompt = {
            let (spec, history) = (self.spec.clone(), self.history.clone());
            move |budget: Budget| {
                let (mirror, base, last) = (mirror.clone(), base.clone(), last.clone());
                let (spec, history) = (spec.clone(), history.clone());
                tokio::task::spawn_blocking(move || {
                    let repository = mirror.repository()?;
                    let snapshot = Snapshot::of(&repository, &base.commit)?;
                    Ok(critic_prompt(&spec, &history, &last, &snapshot, &budget)?)
                })
            }
        };
        let conditions = self.early_stops();
        let read = |completion: &cfq_proto::job::Completion, last_try: bool| {
            let read = if last_try { salvage_review } else { parse_review };
            read(&completion.text, completion.finish)
                .or_else(|error| early_stopped_review(&completion.text, &conditions).ok_or(error))
        };
        let Some(answer) = self.request_answer(Agent::Beta, review_format(), prompt, read).await? else {
            return Ok(());
        };
        let step = Step::Reviewed { iteration, review: answer.value, job: answer.job, model: answer.model.to_string() };
        Ok(self.commit_step(step, answer.spent_ms).await?)
    }

    /// Decides whether the last iteration converged, must be revised or is escalated, and records the decision.
    pub(super) async fn decide(&mut self) -> Result<(), ActionError> {
        // The decision depends on the records alone, so that it can be replayed. Whether the result can be merged into
        // the mirror's `main` is determined later, at the merge, and does not change the result.
        let decided = decide(&self.limits, &self.history).map_err(|error| Stopped::CannotDrive(error.into()))?;
        Ok(self.commit_decision(decided, 0).await?)
    }

    fn last(&self) -> Result<&Iteration, Stopped> {
        self.history.last().ok_or(Stopped::CannotDrive(DriveError::NoArtifact))
    }
}
