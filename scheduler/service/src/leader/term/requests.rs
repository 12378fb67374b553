//! What the leader does for others between two plans: it forwards prefill hints, and explains what it plans for a job.

use cfq_link::session::{Incoming, Received};
use cfq_proto::messages::{NodeCommand, PrefillHint};
use cfq_proto::subject;
use cfq_scheduler_core::prefill_node;
use serde::de::DeserializeOwned;

use super::Term;
use crate::leader::Leader;
use crate::leader::explain::{self, ExplainRequest};

/// Subscribes, and repeats that until it succeeds.
pub(super) async fn subscribe<T: DeserializeOwned>(leader: &Leader, subject: &str) -> Incoming<T> {
    loop {
        match leader.session.subscribe::<T>(subject).await {
            Ok(incoming) => return incoming,
            Err(error) => tracing::warn!(%error, "cannot subscribe to hints, retrying"),
        }
        tokio::time::sleep(leader.store.timing().sweep()).await;
    }
}

impl Term<'_> {
    /// Forwards a prefill hint to the node on which its job would be placed now. The hint is not stored, because losing
    /// it costs only time.
    pub(super) async fn forward_prefill_hint(&mut self, hint: PrefillHint) {
        let Some(now_ms) = self.now_ms() else { return };
        let Some(node) = prefill_node(&self.state, &hint, now_ms) else { return };
        self.state.on_prefill_hint_sent(&node, &hint);
        let command = NodeCommand::Prefill { hint };
        if let Err(error) = self.leader.session.publish(&subject::node_command(&node), &command).await {
            tracing::debug!(%node, %error, "prefill hint not sent");
        }
    }

    /// Answers a request for the plan of a job, and records the estimate that the user is shown.
    pub(super) async fn answer_explain(&mut self, request: Received<ExplainRequest>) {
        let Some(now_ms) = self.now_ms() else { return };
        if let Some((job, plan)) = explain::answer(&self.state, request, now_ms).await {
            self.waits.on_explained(job, &plan, now_ms);
        }
    }
}
