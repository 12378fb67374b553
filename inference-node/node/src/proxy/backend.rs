//! What answers the requests of a proxied model: a server or a program.

use std::sync::Arc;
use std::time::Instant;

use cfq_engine::Outbox;
use cfq_proto::job::{Completion, JobFailure, Prompt};
use cfq_proto::node::Residency;
use futures::FutureExt;
use futures::future::BoxFuture;

use super::EndpointClient;
use super::completion;
use super::protocol::RemoteModel;
use super::slots::RequestSlots;

/// One model of a server or program.
pub(super) trait Backend: Send + Sync {
    /// Name of the server or program in the configuration.
    fn name(&self) -> &str;

    /// Limit of concurrent requests.
    fn slots(&self) -> &RequestSlots;

    /// Context length of the model, in tokens.
    fn context_tokens(&self) -> u32;

    /// Whether the model can be used.
    fn residency(&self) -> Residency;

    /// Runs one chat completion that began at `started`; its text is sent to `outbox` as it arrives.
    fn complete<'a>(
        &'a self,
        prompt: &'a Prompt,
        outbox: &'a Outbox,
        started: Instant,
    ) -> BoxFuture<'a, Result<Completion, JobFailure>>;

    /// Records that a request was answered.
    fn record_answer(&self);

    /// Checks whether the server or program can be used.
    fn check(&self) -> BoxFuture<'_, ()>;
}

/// One model of a server.
pub(super) struct ServerModel {
    pub(super) client: Arc<EndpointClient>,
    pub(super) remote: RemoteModel,
}

impl Backend for ServerModel {
    fn name(&self) -> &str {
        &self.client.server.name
    }

    fn slots(&self) -> &RequestSlots {
        &self.client.slots
    }

    fn context_tokens(&self) -> u32 {
        self.client.context_tokens(&self.remote)
    }

    fn residency(&self) -> Residency {
        self.client.residency(&self.remote)
    }

    fn complete<'a>(
        &'a self,
        prompt: &'a Prompt,
        outbox: &'a Outbox,
        started: Instant,
    ) -> BoxFuture<'a, Result<Completion, JobFailure>> {
        completion::complete(&self.client, &self.remote, prompt, outbox, started).boxed()
    }

    fn record_answer(&self) {
        self.client.record_answer();
    }

    fn check(&self) -> BoxFuture<'_, ()> {
        self.client.check().boxed()
    }
}
