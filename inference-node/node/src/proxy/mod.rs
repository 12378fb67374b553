//! Models behind a server: another machine's engine, Ollama, vLLM, llama.cpp, a paid service. Servers with the OpenAI
//! protocol are supported, and Ollama in its own protocol.
//!
//! The reply is requested as a stream, so that tokens arrive as they are generated and a cancellation reaches the
//! server by closing the connection. Errors are classified by whether a retry can help, and the size of a reply is
//! limited. The health of a server is known from a check every few seconds and from the jobs themselves.

mod chunk;
mod client;
mod completion;
mod context_error;
mod context_limit;
mod control_names;
mod endpoint;
mod framing;
mod ollama;
mod openai;
mod peer;
mod probe;
mod protocol;
mod pull;
mod reply;
mod report;
mod server;
mod sse;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cfq_engine::{AdmitError, Admitted, Engine, Generation, GenerationError, Outbox, StateChanged};
use cfq_proto::job::{GeneratedTokens, JobFailure, Prompt};
use cfq_proto::model::ModelId;
use cfq_proto::node::{KvTiers, ModelState};
use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::sync::OwnedSemaphorePermit;

pub use client::EndpointClient;
pub use endpoint::{Endpoint, EndpointError};
pub use probe::{Probe, probe};
pub use protocol::{Protocol, RemoteModel};
pub use pull::{PullError, PullStep, pull};

/// Assumed number of tokens per byte of a prompt, since endpoints do not report this ratio.
const TOKENS_PER_BYTE: f64 = 0.3;
/// Longest health check after a failed call.
const FAILURE_CHECK_TIMEOUT: Duration = Duration::from_secs(2);
/// A reply must have more tokens than this to be used for measuring the decode rate.
const MIN_MEASURED_TOKENS: u32 = 8;

/// One model behind a server.
pub struct ProxyEngine {
    model: ModelId,
    remote: RemoteModel,
    server: Arc<EndpointClient>,
    /// Measured decode rate of one sequence, in tokens per second; 0 before the first measurement.
    decode_rate: Arc<Mutex<f64>>,
}

impl ProxyEngine {
    /// An engine for `model`, which `server` names `remote`.
    pub fn new(model: ModelId, remote: RemoteModel, server: Arc<EndpointClient>) -> Self {
        Self { model, remote, server, decode_rate: Arc::default() }
    }
}

impl Engine for ProxyEngine {
    fn state(&self) -> ModelState {
        let free = self.server.free_slots();
        let context_tokens = self.server.context_tokens(&self.remote);
        let rate = *self.decode_rate.lock().unwrap_or_else(PoisonError::into_inner);
        ModelState {
            model: self.model.clone(),
            residency: self.server.residency(&self.remote),
            device: "proxy".to_owned(),
            need_bytes: 0,
            context_tokens,
            kv_tokens_free: u64::from(context_tokens) * u64::from(free),
            kv_tiers: KvTiers::default(),
            running: self.server.max_sequences() - free.min(self.server.max_sequences()),
            max_sequences: self.server.max_sequences(),
            prefill_rate: 0.0,
            decode_rate: rate,
            load_rate: 0.0,
            tokens_per_byte: TOKENS_PER_BYTE,
        }
    }

    fn admit_resumed(
        &self,
        prompt: Prompt,
        _generated: GeneratedTokens,
    ) -> BoxFuture<'_, Result<Admitted, AdmitError>> {
        let slot = self.server.try_slot();
        let admitted = match slot {
            Some(slot) => {
                let slot = RequestSlot { permit: Some(slot), changes: self.server.changes() };
                slot.changes.send_replace(());
                let (server, remote) = (self.server.clone(), self.remote.clone());
                let rate = self.decode_rate.clone();
                Ok(Admitted::new(move || {
                    let (outbox, reader) = Generation::channel();
                    tokio::spawn(run(server, remote, prompt, outbox, slot, rate));
                    reader
                }))
            }
            // Only the number of requests is limited here, since tokens are counted by the server.
            None => Err(AdmitError::NotNow { need: None, have: 0 }),
        };
        async move { admitted }.boxed()
    }
}

/// A slot for one request. Dropping it frees the slot and notifies of the change.
struct RequestSlot {
    permit: Option<OwnedSemaphorePermit>,
    changes: Arc<StateChanged>,
}

impl Drop for RequestSlot {
    fn drop(&mut self) {
        self.permit.take();
        self.changes.send_replace(());
    }
}

async fn run(
    server: Arc<EndpointClient>,
    remote: RemoteModel,
    prompt: Prompt,
    outbox: Outbox,
    slot: RequestSlot,
    rate: Arc<Mutex<f64>>,
) {
    let started = Instant::now();
    let outcome = tokio::select! {
        outcome = completion::complete(&server, &remote, &prompt, &outbox, started) => {
            outcome.map_err(GenerationError::Failed)
        }
        () = outbox.cancelled() => Err(GenerationError::Cancelled),
    };
    match &outcome {
        Ok(done) => {
            server.record_answer();
            let decode_ms = done.usage.total_ms.saturating_sub(done.usage.first_token_ms);
            if decode_ms > 0 && done.usage.output_tokens > MIN_MEASURED_TOKENS {
                let measured = f64::from(done.usage.output_tokens) * 1e3 / decode_ms as f64;
                // Rounded, so that the reported state does not change with every job.
                *rate.lock().unwrap_or_else(PoisonError::into_inner) = (measured / 10.0).round() * 10.0;
            }
        }
        Err(GenerationError::Failed(JobFailure::Unavailable { reason })) => {
            tracing::warn!(endpoint = server.server.name, reason, "endpoint failed");
            // A failed reply does not prove that the server is down, so its health is checked. The job must end before its
            // lease does.
            drop(tokio::time::timeout(FAILURE_CHECK_TIMEOUT, server.check()).await);
        }
        Err(GenerationError::Failed(_) | GenerationError::Cancelled) => {}
    }
    drop(slot);
    outbox.end(outcome);
}
