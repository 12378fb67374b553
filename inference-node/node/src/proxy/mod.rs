//! Models behind a server: another machine's engine, Ollama, vLLM, llama.cpp, a paid service; and behind a program, such
//! as the command line of a coding agent. Servers with the OpenAI protocol are supported, and Ollama in its own protocol.
//!
//! The reply of a server is requested as a stream, so that tokens arrive as they are generated and a cancellation reaches the
//! server by closing the connection. Errors are classified by whether a retry can help, and the size of a reply is
//! limited. The health of a server is known from a check every few seconds and from the jobs themselves.

mod backend;
mod chunk;
mod client;
mod command;
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
mod slots;
mod sse;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use cfq_engine::{AdmitError, Admitted, Engine, Generation, GenerationError, Outbox};
use cfq_proto::job::{GeneratedTokens, JobFailure, Prompt};
use cfq_proto::model::ModelId;
use cfq_proto::node::{KvTiers, ModelState};
use futures::FutureExt;
use futures::future::BoxFuture;

use backend::{Backend, ServerModel};
use command::CommandModel;
use slots::RequestSlot;

pub use client::EndpointClient;
pub use command::{CommandClient, CommandConfig, CommandError, StdoutFormat, coding_agents};
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

/// One model behind a server or a program.
pub struct ProxyEngine {
    model: ModelId,
    backend: Arc<dyn Backend>,
    /// Measured decode rate of one sequence, in tokens per second; 0 before the first measurement.
    decode_rate: Arc<Mutex<f64>>,
}

impl ProxyEngine {
    /// An engine for `model`, which `server` names `remote`.
    pub fn of_server(model: ModelId, remote: RemoteModel, server: Arc<EndpointClient>) -> Self {
        Self { model, backend: Arc::new(ServerModel { client: server, remote }), decode_rate: Arc::default() }
    }

    /// An engine for `model`, which `program` answers; it names the model `remote`, or uses its default model.
    pub fn of_command(model: ModelId, remote: Option<String>, program: Arc<CommandClient>) -> Self {
        Self { model, backend: Arc::new(CommandModel { client: program, name: remote }), decode_rate: Arc::default() }
    }
}

impl Engine for ProxyEngine {
    fn state(&self) -> ModelState {
        let slots = self.backend.slots();
        let (max_sequences, free) = (slots.max(), slots.free());
        let context_tokens = self.backend.context_tokens();
        let rate = *self.decode_rate.lock().unwrap_or_else(PoisonError::into_inner);
        ModelState {
            model: self.model.clone(),
            residency: self.backend.residency(),
            device: "proxy".to_owned(),
            need_bytes: 0,
            context_tokens,
            kv_tokens_free: u64::from(context_tokens) * u64::from(free),
            kv_tiers: KvTiers::default(),
            running: max_sequences - free.min(max_sequences),
            max_sequences,
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
        let admitted = match self.backend.slots().try_take() {
            Some(slot) => {
                let (backend, rate) = (self.backend.clone(), self.decode_rate.clone());
                Ok(Admitted::new(move || {
                    let (outbox, reader) = Generation::channel();
                    tokio::spawn(run(backend, prompt, outbox, slot, rate));
                    reader
                }))
            }
            // Only the number of requests is limited here, since tokens are counted by the server or program.
            None => Err(AdmitError::NotNow { need: None, have: 0 }),
        };
        async move { admitted }.boxed()
    }
}

async fn run(backend: Arc<dyn Backend>, prompt: Prompt, outbox: Outbox, slot: RequestSlot, rate: Arc<Mutex<f64>>) {
    let started = Instant::now();
    let outcome = tokio::select! {
        outcome = backend.complete(&prompt, &outbox, started) => outcome.map_err(GenerationError::Failed),
        () = outbox.cancelled() => Err(GenerationError::Cancelled),
    };
    match &outcome {
        Ok(done) => {
            backend.record_answer();
            let decode_ms = done.usage.total_ms.saturating_sub(done.usage.first_token_ms);
            if decode_ms > 0 && done.usage.output_tokens > MIN_MEASURED_TOKENS {
                let measured = f64::from(done.usage.output_tokens) * 1e3 / decode_ms as f64;
                // Rounded, so that the reported state does not change with every job.
                *rate.lock().unwrap_or_else(PoisonError::into_inner) = (measured / 10.0).round() * 10.0;
            }
        }
        Err(GenerationError::Failed(JobFailure::Unavailable { reason })) => {
            tracing::warn!(proxy = backend.name(), reason, "call failed");
            // A failed reply does not prove that the server is down, so its health is checked. The job must end before its
            // lease does.
            drop(tokio::time::timeout(FAILURE_CHECK_TIMEOUT, backend.check()).await);
        }
        Err(GenerationError::Failed(_) | GenerationError::Cancelled) => {}
    }
    drop(slot);
    outbox.end(outcome);
}
