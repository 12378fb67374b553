//! The loop's own actions: create, check, review, decide.

use cfq_convergence::{Iteration, decide};
use cfq_proto::blob::Carried;
use cfq_proto::job::OutputFormat;
use cfq_proto::looping::Step;
use cfq_proto::review::{CheckKind, Finding, Quarantine};
use cfq_proto::task::Agent;

use super::drive::{Drive, Problem};
use super::generate::{Reply, make, target_of};
use super::port::{Stopped, TaskPort};
use crate::checks::check;
use crate::pipeline::{Budget, creator, critic, ended_review, parse_review, review_format, salvage_review};
use crate::workstream::Snapshot;

impl<P: TaskPort> Drive<P> {
    pub(super) async fn create(&mut self) -> Result<(), Problem> {
        let mirror = self.mirror().await?;
        let base = self.base()?;
        let prompt = {
            let (mirror, base, spec, history) = (mirror.clone(), base.clone(), self.spec.clone(), self.history.clone());
            move |budget: Budget| {
                let (mirror, base, spec, history) = (mirror.clone(), base.clone(), spec.clone(), history.clone());
                tokio::task::spawn_blocking(move || {
                    let repository = mirror.repository()?;
                    let snapshot = Snapshot::of(&repository, &base.commit)?;
                    Ok(creator(&spec, &history, &target_of(&spec, &history), &snapshot, &budget)?)
                })
            }
        };
        let Some(answer) = self.answer(Agent::Alpha, OutputFormat::Text, prompt, |_, _| Ok(())).await? else {
            return Ok(());
        };
        let reply = Reply { completion: answer.completion, job: answer.job, model: answer.model.to_string() };
        let (spec, history, number) = (self.spec.clone(), self.history.clone(), self.number);
        let making = mirror.clone();
        let made = tokio::task::spawn_blocking(move || make(&making, &spec, &history, &base, number, &reply));
        let artifact = made.await??;
        let commit = artifact.commit.clone();
        let sent = Step::Generated { artifact: self.port.send_artifact(artifact.clone()).await? };
        let kept = Step::Generated { artifact: Carried::Inline(artifact) };
        self.commit_as(sent, kept, answer.spent_ms).await?;
        match commit {
            Some(commit) => self.show(&mirror, commit).await,
            None => Ok(()),
        }
    }

    pub(super) async fn check(&mut self) -> Result<(), Problem> {
        let mirror = self.mirror().await?;
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
                Ok::<_, Problem>(check(&artifact.files, |path| snapshot.read_text(path)))
            });
            checked.await??
        };
        Ok(self.commit(Step::Checked { iteration, findings, quarantine }, 0).await?)
    }

    pub(super) async fn review(&mut self) -> Result<(), Problem> {
        let mirror = self.mirror().await?;
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
                    Ok(critic(&spec, &history, &last, &snapshot, &budget)?)
                })
            }
        };
        let settled = self.settled();
        let read = |completion: &cfq_proto::job::Completion, last_try: bool| {
            let read = if last_try { salvage_review } else { parse_review };
            read(&completion.text, completion.finish)
                .or_else(|error| ended_review(&completion.text, &settled).ok_or(error))
                .map_err(|error| error.to_string())
        };
        let Some(answer) = self.answer(Agent::Beta, review_format(), prompt, read).await? else { return Ok(()) };
        let step = Step::Reviewed { iteration, review: answer.value, job: answer.job, model: answer.model.to_string() };
        Ok(self.commit(step, answer.spent_ms).await?)
    }

    pub(super) async fn decide(&mut self) -> Result<(), Problem> {
        let not_now = |error: cfq_convergence::NotDecidable| Stopped::Refused { reason: error.to_string() };
        // From the records alone, so that it can be replayed: whether the mirror's main can take the result is seen at the
        // merge, and changes nothing about the result.
        let decided = decide(&self.limits, &self.history).map_err(not_now)?;
        Ok(self.decided(decided, 0).await?)
    }

    fn last(&self) -> Result<&Iteration, Stopped> {
        self.history.last().ok_or_else(|| Stopped::Refused { reason: "there is no artifact".to_owned() })
    }
}
