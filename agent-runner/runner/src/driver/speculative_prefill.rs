//! Prediction of the critic's prompt while the creator is generating. The predicted part is sent as a hint to the node
//! that will run the critic, so that the node can prefill it speculatively.
//!
//! The critic's prompt starts with the task and the repository's files, which are known from the start. Then come the
//! artifact's files, which the creator's reply determines. To predict them, the complete lines of the growing reply are
//! processed like a complete reply: they are parsed, the edits are applied, and the critic's prompt is rendered, up to
//! the current end of the file that is being generated. The rest of the reply may contradict the prediction: it may
//! contain a second version of the file, another file whose path sorts before it, or a code fence inside the file, so
//! that the prompt needs a longer fence around the file. Then the prediction is wrong from that place on, and the part
//! before it stays valid. No hint is sent while the checks run: they take only milliseconds, and the critic's prompt
//! contains none of their findings.
//!
//! Hints are best effort: nothing waits for them, and they are not recorded.

use std::sync::Arc;

use cfq_convergence::{Base, History};
use cfq_proto::messages::PrefillHint;
use cfq_proto::model::ModelId;
use cfq_proto::task::{Agent, TaskSpec};

use super::artifact::{reply_target, revision_base};
use super::port::{PrefillPredictor, TaskPort};
use super::prompt_sources::SharedSources;
use super::task_driver::{ActionError, TaskDriver};
use crate::edits::edited_files;
use crate::pipeline::{Budget, critic_prompt_prefix, max_tokens};
use crate::workstream::{Mirror, Snapshot};

impl<P: TaskPort> TaskDriver<P> {
    /// Returns the predictor of the critic's prompt. `None` if the critic has no model, or if its model is behind a server
    /// or program: those bill every request, so nothing is prefilled speculatively.
    pub(super) async fn prefill_predictor(&mut self) -> Result<Option<PrefillPredictor>, ActionError> {
        let Some(model) = self.bound_model(Agent::Beta) else { return Ok(None) };
        if !model.is_file() {
            return Ok(None);
        }
        let (mirror, base, sources) = (self.prepare_mirror().await?, self.base()?, self.shared_sources().await?);
        let (task, spec, history) = (self.task, self.spec.clone(), self.history.clone());
        let predictor = move |generated: &str| {
            let binding = spec.agents.of(Agent::Beta);
            let budget = Budget::first(max_tokens(Agent::Beta, binding));
            let messages = match predicted_messages(&mirror, (&base, &sources), &spec, &history, &budget, generated) {
                Ok(messages) => messages?,
                Err(error) => {
                    tracing::debug!(%task, %error, "cannot predict the critic's prompt");
                    return None;
                }
            };
            Some(PrefillHint {
                task,
                role: Agent::Beta,
                model: model.clone(),
                messages,
                max_tokens: budget.reply_tokens,
                deterministic: binding.deterministic.unwrap_or(false),
            })
        };
        Ok(Some(Arc::new(predictor)))
    }

    /// Current model of `agent`: the model that a human switched it to, else the model that the task names.
    pub(super) fn bound_model(&self, agent: Agent) -> Option<ModelId> {
        self.history.switched_model(agent).or(self.spec.agents.of(agent).model.as_ref()).cloned()
    }
}

/// Returns the known beginning of the critic's prompt, from the part of the creator's reply that is generated so far.
fn predicted_messages(
    mirror: &Mirror,
    (base, sources): (&Base, &SharedSources),
    spec: &TaskSpec,
    history: &History,
    budget: &Budget,
    generated: &str,
) -> Result<Option<Vec<cfq_proto::job::ChatMessage>>, ActionError> {
    let repository = mirror.repository()?;
    let snapshot = Snapshot::of(&repository, &base.commit)?;
    let before = revision_base(history).map(|i| i.artifact.files.as_slice()).unwrap_or_default();
    // Only complete lines are parsed: the missing part of a line can change its meaning.
    let lines = generated.rfind('\n').map_or("", |end| &generated[..=end]);
    // Before the first fence nothing is parsed, because prose may look like code. A parse error only means that the
    // rest of the reply is still missing.
    let edited = match lines.contains("```") || lines.contains("~~~") {
        true => edited_files(lines, &reply_target(spec, history, &snapshot), false, before, &snapshot).ok(),
        false => None,
    };
    let (files, open) = edited.map(|edited| (edited.files, edited.open)).unwrap_or_default();
    Ok(critic_prompt_prefix(spec, history, (&files, &open), &sources.with(snapshot), budget)?)
}
