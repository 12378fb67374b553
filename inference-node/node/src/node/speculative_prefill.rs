//! Speculative prefill: prefills the expected prompts of critics while the node is idle.
//!
//! While a creator generates, the node receives a hint with the beginning of the critic's prompt, and further hints as
//! more of the creator's text is known. The critic's call is placed later, like any other.
//!
//! Speculative prefill is on by default because it has almost no cost for other work:
//! - A chunk is computed only while no sequence runs on any model of the same device and no model is being loaded, so a
//!   call waits at most for the rest of one short pass.
//! - It reserves nothing and requests no load, so capacity, ledger and placement are unaffected.
//! - It holds an engine for one chunk at most, so it delays an unload by no more than that.
//! - It is not a job, so it is not counted, retried or reported.
//!
//! Its costs are energy, and, if the prediction is wrong and the pool is full, the least recently used KV blocks.
//!
//! Models behind an endpoint are not prefilled, and sequences on them do not count as running. If the endpoint is a
//! server on this machine, speculative prefill slows down a creator that runs there; set `speculative_prefill = false`
//! in this case.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cfq_engine::{Engine, ExpectedPrompt, PrefillProgress, SpeculativePrompt};
use cfq_proto::ids::TaskId;
use cfq_proto::job::JobRole;
use cfq_proto::messages::PrefillHint;
use tokio::sync::Notify;

use super::model_registry::{IdleStatus, ModelRegistry};

/// Maximum number of queued hints, one per task and role; when it is exceeded, the oldest hint is dropped.
const MAX_HINTS: usize = 16;
/// Maximum age of a hint. After that, its call will probably not arrive.
const HINT_LIFETIME: Duration = Duration::from_secs(120);
/// Wait before another chunk is requested from an engine that was busy although the registry reported it as idle.
const BUSY_RETRY_INTERVAL: Duration = Duration::from_millis(100);

struct QueuedHint {
    hint: Arc<PrefillHint>,
    since: Instant,
    /// The tokenized prompt; `None` until the hint has been tokenized.
    prompt: Option<Arc<SpeculativePrompt>>,
}

impl QueuedHint {
    fn is_for(&self, task: TaskId, role: JobRole) -> bool {
        self.hint.task == task && role == self.hint.role
    }
}

/// Queue of the hints whose calls have not arrived yet, oldest first.
pub(super) struct PrefillQueue {
    enabled: bool,
    hints: Mutex<VecDeque<QueuedHint>>,
    added: Notify,
}

/// A hint whose prompt may be prefilled now.
struct NextPrefill {
    hint: Arc<PrefillHint>,
    prompt: Option<Arc<SpeculativePrompt>>,
    engine: Arc<dyn Engine>,
}

impl PrefillQueue {
    pub(super) fn new(enabled: bool) -> Self {
        Self { enabled, hints: Mutex::default(), added: Notify::new() }
    }

    fn hints(&self) -> MutexGuard<'_, VecDeque<QueuedHint>> {
        // Poisoning is ignored: the data is consistent even if a thread panicked while it held the lock.
        self.hints.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds a hint, which replaces an earlier one for the same task and role.
    pub(super) fn add(&self, hint: PrefillHint) {
        if !self.enabled {
            return;
        }
        let mut hints = self.hints();
        hints.retain(|queued| !queued.is_for(hint.task, hint.role.into()));
        while hints.len() >= MAX_HINTS {
            hints.pop_front();
        }
        hints.push_back(QueuedHint { hint: Arc::new(hint), since: Instant::now(), prompt: None });
        drop(hints);
        self.added.notify_one();
    }

    /// Removes the hint for a call that has arrived.
    pub(super) fn remove(&self, task: TaskId, role: JobRole) {
        self.hints().retain(|queued| !queued.is_for(task, role));
    }

    /// Returns the oldest hint whose model is idle. Drops hints that are too old or whose model cannot be prefilled.
    fn next(&self, registry: &ModelRegistry) -> Option<NextPrefill> {
        let mut next = None;
        self.hints().retain(|queued| {
            if queued.since.elapsed() > HINT_LIFETIME {
                return false;
            }
            match registry.idle_status(&queued.hint.model) {
                IdleStatus::Never => return false,
                IdleStatus::Now(engine) if next.is_none() => {
                    next = Some(NextPrefill { hint: queued.hint.clone(), prompt: queued.prompt.clone(), engine });
                }
                IdleStatus::Now(_) | IdleStatus::Later => {}
            }
            true
        });
        next
    }

    /// Stores the tokenized prompt of a hint, or removes the hint if `prompt` is `None`. Does nothing if the hint was
    /// replaced in the meantime.
    fn update(&self, hint: &Arc<PrefillHint>, prompt: Option<Arc<SpeculativePrompt>>) {
        let mut hints = self.hints();
        let Some(at) = hints.iter().position(|queued| Arc::ptr_eq(&queued.hint, hint)) else { return };
        match prompt {
            Some(prompt) => hints[at].prompt = Some(prompt),
            None => drop(hints.remove(at)),
        }
    }
}

/// Prefills the prompts of the queued hints until the node stops.
pub(super) async fn run(queue: Arc<PrefillQueue>, registry: Arc<ModelRegistry>) {
    let mut changed = registry.changes().subscribe();
    loop {
        changed.mark_unchanged();
        let Some(NextPrefill { hint, prompt, engine }) = queue.next(&registry) else {
            tokio::select! {
                () = queue.added.notified() => {}
                _ = changed.changed() => {}
            }
            continue;
        };
        let Some(prompt) = prompt else {
            let prompt = engine.plan_prefill(&expected_prompt(&hint)).await.map(Arc::new);
            queue.update(&hint, prompt);
            continue;
        };
        let progress = engine.prefill_chunk(prompt.clone()).await;
        drop(engine);
        match progress {
            PrefillProgress::More => {}
            PrefillProgress::Busy => drop(tokio::time::timeout(BUSY_RETRY_INTERVAL, changed.changed()).await),
            PrefillProgress::Done => {
                let tokens = prompt.tokens.len();
                tracing::debug!(task = %hint.task, model = %hint.model, tokens, "prompt prefilled");
                queue.update(&hint, None);
            }
        }
    }
}

fn expected_prompt(hint: &PrefillHint) -> ExpectedPrompt {
    let PrefillHint { messages, max_tokens, deterministic, .. } = hint.clone();
    ExpectedPrompt { messages, max_tokens, deterministic }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use cfq_engine::{AdmitError, Admitted};
    use cfq_proto::job::{ChatMessage, ChatRole, GeneratedTokens, Prompt};
    use cfq_proto::node::{ModelState, Residency};
    use cfq_proto::task::Agent;
    use futures::future::BoxFuture;

    use super::*;
    use crate::node::model_registry::{ModelStatus, model_state};

    /// A fake engine on the given devices, with the given number of running sequences.
    struct EngineOn(&'static str, AtomicU32);

    impl Engine for EngineOn {
        fn state(&self) -> ModelState {
            let state = model_state(&"path:/any".parse().unwrap(), Residency::Resident);
            ModelState { device: self.0.to_owned(), running: self.1.load(Ordering::SeqCst), ..state }
        }

        fn admit_resumed(&self, _: Prompt, _: GeneratedTokens) -> BoxFuture<'_, Result<Admitted, AdmitError>> {
            Box::pin(async { Err(AdmitError::NotNow { need: None, have: 0 }) })
        }
    }

    fn registry_of(models: &[(&str, &'static str)]) -> (Arc<ModelRegistry>, Vec<Arc<EngineOn>>) {
        let names: Vec<&str> = models.iter().map(|(model, _)| *model).collect();
        let config = serde_json::from_value(serde_json::json!({
            "node": "den", "nats": { "url": "nats://127.0.0.1:1" }, "model_dir": "/none", "models": names,
        }));
        let (registry, _commands) = ModelRegistry::new(&config.unwrap(), Arc::default());
        let engines: Vec<Arc<EngineOn>> =
            models.iter().map(|(_, device)| Arc::new(EngineOn(device, AtomicU32::new(0)))).collect();
        for ((model, _), engine) in models.iter().zip(&engines) {
            registry.set_status(&model.parse().unwrap(), ModelStatus::Resident(engine.clone()));
        }
        (registry, engines)
    }

    fn hint(task: TaskId, model: &str, text: &str) -> PrefillHint {
        PrefillHint {
            task,
            role: Agent::Beta,
            model: model.parse().unwrap(),
            messages: vec![ChatMessage { role: ChatRole::User, content: text.to_owned() }],
            max_tokens: 100,
            deterministic: false,
        }
    }

    fn text(next: Option<NextPrefill>) -> Option<String> {
        next.map(|next| next.hint.messages[0].content.clone())
    }

    #[test]
    fn model_is_idle_only_if_no_sequence_runs_on_its_devices() {
        let models = [("path:/a", "cuda:0,cuda:1"), ("path:/b", "cuda:1"), ("path:/c", "cpu"), ("openai:x/d", "cpu")];
        let (registry, engines) = registry_of(&models);
        let may = |model: &str| match registry.idle_status(&model.parse().unwrap()) {
            IdleStatus::Now(_) => "now",
            IdleStatus::Later => "later",
            IdleStatus::Never => "never",
        };
        let all = || ["path:/a", "path:/b", "path:/c", "openai:x/d", "path:/e"].map(may);
        assert_eq!(all(), ["now", "now", "now", "never", "never"]);
        engines[1].1.store(1, Ordering::SeqCst);
        assert_eq!(all(), ["later", "later", "now", "never", "never"]);
        engines[1].1.store(0, Ordering::SeqCst);
        // A sequence on a model behind an endpoint is computed elsewhere and does not count.
        engines[3].1.store(1, Ordering::SeqCst);
        assert_eq!(all(), ["now", "now", "now", "never", "never"]);
        registry.set_status(&"path:/b".parse().unwrap(), ModelStatus::Loading);
        assert_eq!(all(), ["later", "never", "later", "never", "never"]);
        let unloading: Arc<dyn Engine> = engines[1].clone();
        registry.set_status(&"path:/b".parse().unwrap(), ModelStatus::Unloading(Arc::downgrade(&unloading)));
        assert_eq!(all(), ["now", "never", "now", "never", "never"]);
        registry.drain();
        assert_eq!(all(), ["never"; 5]);
    }

    #[test]
    fn latest_hint_counts_until_its_call_arrives() {
        let (registry, engines) = registry_of(&[("path:/a", "cuda:0"), ("path:/b", "cpu")]);
        let queue = PrefillQueue::new(true);
        let [one, two] = [TaskId::fresh(), TaskId::fresh()];
        queue.add(hint(one, "path:/a", "short"));
        let old = queue.next(&registry).unwrap().hint;
        queue.add(hint(one, "path:/a", "longer"));
        queue.add(hint(two, "path:/b", "other"));
        // Removing the replaced hint does not remove the newer one.
        queue.update(&old, None);
        assert_eq!(text(queue.next(&registry)), Some("longer".to_owned()));
        // A busy model does not delay the hints for others.
        engines[0].1.store(1, Ordering::SeqCst);
        assert_eq!(text(queue.next(&registry)), Some("other".to_owned()));
        engines[0].1.store(0, Ordering::SeqCst);
        queue.remove(one, JobRole::Alpha);
        assert_eq!(text(queue.next(&registry)), Some("longer".to_owned()), "a creator's call is not the critic's");
        queue.remove(one, JobRole::Beta);
        assert_eq!(text(queue.next(&registry)), Some("other".to_owned()));
        let done = queue.next(&registry).unwrap().hint;
        queue.update(&done, None);
        assert!(queue.next(&registry).is_none());
        // A hint for a model that is not loaded is dropped, and the queue is bounded.
        queue.add(hint(one, "path:/gone", "lost"));
        assert!(queue.next(&registry).is_none() && queue.hints().is_empty());
        (0..2 * MAX_HINTS).for_each(|_| queue.add(hint(TaskId::fresh(), "path:/a", "one of many")));
        assert_eq!(queue.hints().len(), MAX_HINTS);
        let disabled = PrefillQueue::new(false);
        disabled.add(hint(one, "path:/a", "short"));
        assert!(disabled.next(&registry).is_none());
    }
}
