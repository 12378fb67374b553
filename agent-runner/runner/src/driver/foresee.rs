//! What the critic will be asked, while the creator still writes: a hint for the node that will be asked, so that it may
//! compute the prompt ahead.
//!
//! The critic's prompt begins with task and context, which are known from the start, then has the files, which come out of
//! the creator's reply. So the reply is read as it grows by what will read it when it is whole: whole lines through the
//! same parser, over the same files, into the same prompt, which is cut where the file that is being written ends for now.
//! A reply that goes on otherwise (a second version of the file, another file that sorts before it, a longer fence) makes
//! the guess wrong from that place on, and the place before it stays right. Checks add nothing: no finding stands in the
//! critic's prompt, and they take milliseconds, so what is written during them is too little to be worth a word.
//!
//! Nothing waits for any of this, and nothing of it is recorded.

use std::sync::Arc;

use cfq_convergence::{Base, History};
use cfq_proto::messages::WarmUp;
use cfq_proto::model::{ModelId, ModelSource};
use cfq_proto::task::{Agent, TaskSpec};

use super::drive::{Drive, Problem};
use super::generate::{basis, target_of};
use super::port::{Foresee, TaskPort};
use crate::edits::{apply, parse};
use crate::pipeline::{Budget, critic_ahead, max_tokens};
use crate::workstream::{Mirror, Snapshot};

impl<P: TaskPort> Drive<P> {
    /// `None` where nothing can be computed ahead: behind an endpoint every token is asked for once, and paid.
    pub(super) async fn foresee(&mut self) -> Result<Option<Foresee>, Problem> {
        let Some(model) = self.model_of(Agent::Beta) else { return Ok(None) };
        match model.source() {
            ModelSource::Path(_) | ModelSource::Hub { .. } | ModelSource::Pypi { .. } => {}
            ModelSource::OpenAi { .. } | ModelSource::Ollama { .. } => return Ok(None),
        }
        let (mirror, base) = (self.mirror().await?, self.base()?);
        let (task, spec, history) = (self.task, self.spec.clone(), self.history.clone());
        let foresee = move |written: &str| {
            let binding = spec.agents.of(Agent::Beta);
            let budget = Budget::first(max_tokens(Agent::Beta, binding));
            let messages = match messages(&mirror, &base, &spec, &history, &budget, written) {
                Ok(messages) => messages?,
                Err(problem) => {
                    tracing::debug!(%task, %problem, "nothing can be foreseen");
                    return None;
                }
            };
            Some(WarmUp {
                task,
                role: Agent::Beta,
                model: model.clone(),
                messages,
                max_tokens: budget.reply_tokens,
                deterministic: binding.deterministic.unwrap_or(false),
            })
        };
        Ok(Some(Arc::new(foresee)))
    }

    /// The model that `agent` is bound to now.
    pub(super) fn model_of(&self, agent: Agent) -> Option<ModelId> {
        self.history.switched_model(agent).or(self.spec.agents.of(agent).model.as_ref()).cloned()
    }
}

fn messages(
    mirror: &Mirror,
    base: &Base,
    spec: &TaskSpec,
    history: &History,
    budget: &Budget,
    written: &str,
) -> Result<Option<Vec<cfq_proto::job::ChatMessage>>, Problem> {
    let repository = mirror.repository()?;
    let snapshot = Snapshot::of(&repository, &base.commit)?;
    let before = basis(history).map(|i| i.artifact.files.as_slice()).unwrap_or_default();
    // Half a line may become anything.
    let lines = written.rfind('\n').map_or("", |end| &written[..=end]);
    // Words before the first block may read like code. Whatever a reply lacks so far, it may still come.
    let edits = match lines.contains("```") || lines.contains("~~~") {
        true => parse(lines, &target_of(spec, history), false).unwrap_or_default(),
        false => Vec::new(),
    };
    let files = apply(&edits, before, &snapshot).unwrap_or_default();
    let open = edits.last().map_or("", |edit| edit.path());
    Ok(critic_ahead(spec, history, (&files, open), &snapshot, budget)?)
}
