//! Watchdog of the engines: finds an engine whose forward pass does not end, for example because the GPU hangs without an
//! error of its driver. Heartbeats continue in this case, so without the watchdog the node would stay alive, and every
//! job placed on the model would stall until it is a dead letter.
//!
//! The limit is the job step timeout. A pass takes a quarter of a second by design, because long prompts are prefilled in
//! chunks, and seconds on a slow machine. After the job step timeout, the scheduler ends the jobs of the pass in any
//! case.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use cfq_engine::EngineFailure;
use cfq_proto::model::ModelId;
use tokio::time::{Instant, MissedTickBehavior};

use super::model_registry::ModelRegistry;

/// Number of observations within the limit.
const OBSERVATIONS_PER_LIMIT: u32 = 20;
/// Maximum interval of observations.
const MAX_INTERVAL: Duration = Duration::from_secs(2);

/// Observes the engines, and records [`EngineFailure::Hung`] for an engine whose work takes longer than `limit`.
pub(super) async fn run(registry: Arc<ModelRegistry>, limit: Duration) {
    let interval = (limit / OBSERVATIONS_PER_LIMIT).clamp(Duration::from_millis(1), MAX_INTERVAL);
    let mut watchdog = Watchdog { limit, max_elapsed: 2 * interval, works: BTreeMap::new() };
    let mut tick = tokio::time::interval(interval);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut observed_at = Instant::now();
    loop {
        tick.tick().await;
        let elapsed = observed_at.elapsed();
        observed_at = Instant::now();
        for model in watchdog.observe(registry.unfinished_work(), elapsed) {
            tracing::error!(%model, limit_s = limit.as_secs_f64(), "engine hangs: its work does not end");
            registry.set_engine_failure(&model, EngineFailure::Hung { limit });
        }
    }
}

/// Time for which each engine's current work has been observed.
struct Watchdog {
    limit: Duration,
    /// Maximum time that one observation adds. A longer time since the last one means that the process was stopped or
    /// the machine slept, so that the engines could not work either.
    max_elapsed: Duration,
    /// Number of each engine's unfinished work, and the time for which it has been observed.
    works: BTreeMap<ModelId, (u64, Duration)>,
}

impl Watchdog {
    /// Returns the engines that hang. `unfinished` is the number of each engine's unfinished work, and `elapsed` the time
    /// since the last observation.
    fn observe(&mut self, unfinished: BTreeMap<ModelId, u64>, elapsed: Duration) -> Vec<ModelId> {
        let elapsed = elapsed.min(self.max_elapsed);
        let observed = |(model, work): (ModelId, u64)| {
            let time = match self.works.get(&model) {
                Some((last, time)) if *last == work => *time + elapsed,
                Some(_) | None => Duration::ZERO,
            };
            (model, (work, time))
        };
        self.works = unfinished.into_iter().map(observed).collect();
        self.works.iter().filter(|(_, (_, time))| *time >= self.limit).map(|(model, _)| model.clone()).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::Mutex;
    use std::sync::mpsc::sync_channel;

    use cfq_engine::{Engine, LocalEngine};
    use cfq_proto::job::{ChatMessage, ChatRole, OutputFormat, Prompt, Sampling};
    use tokio::sync::watch;

    use super::*;
    use crate::config::Config;
    use crate::node::error::{Error, ModelFault};
    use crate::node::model_registry::ModelStatus;

    const LIMIT: Duration = Duration::from_secs(10);
    const SECOND: Duration = Duration::from_secs(1);

    fn model() -> ModelId {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/fixtures/models/llama");
        format!("path:{}", file.display()).parse().unwrap()
    }

    fn watchdog() -> Watchdog {
        Watchdog { limit: LIMIT, max_elapsed: 2 * SECOND, works: BTreeMap::new() }
    }

    #[test]
    fn only_work_that_does_not_end_counts() {
        let mut watchdog = watchdog();
        let work = |number| BTreeMap::from([(model(), number)]);
        for number in 0..100 {
            assert!(watchdog.observe(work(number), SECOND).is_empty(), "each pass ends within a second");
        }
        for _ in 0..100 {
            assert!(watchdog.observe(BTreeMap::new(), SECOND).is_empty(), "nothing to do");
        }
        let seconds = (0..100).take_while(|_| watchdog.observe(work(100), SECOND).is_empty()).count();
        assert_eq!(seconds, 10);
        assert_eq!(watchdog.observe(work(100), SECOND), [model()]);
        assert!(watchdog.observe(work(101), SECOND).is_empty());
    }

    #[test]
    fn time_in_which_the_process_was_stopped_does_not_count() {
        let mut watchdog = watchdog();
        let work = || BTreeMap::from([(model(), 1)]);
        watchdog.observe(work(), SECOND);
        assert!(watchdog.observe(work(), Duration::from_secs(3600)).is_empty());
        assert_eq!((0..100).take_while(|_| watchdog.observe(work(), SECOND).is_empty()).count(), 7);
    }

    /// A forward pass of a real engine blocks until the test ends. The engine is idle before, for longer than the limit.
    #[tokio::test]
    async fn blocked_pass_ends_the_node() {
        let limit = Duration::from_millis(300);
        let folder = tempfile::tempdir().unwrap();
        let config: Config = serde_json::from_value(serde_json::json!({
            "node": "den", "nats": { "url": "nats://127.0.0.1:1" }, "model_dir": folder.path(), "models": [model()],
        }))
        .unwrap();
        let changes = Arc::new(watch::Sender::new(()));
        let (registry, _commands) = ModelRegistry::new(&config, changes.clone());
        let (end_test, blocked) = sync_channel::<()>(1);
        let blocked = Mutex::new(blocked);
        let path = model().as_str().strip_prefix("path:").unwrap().to_owned();
        let builder = LocalEngine::builder(model(), Path::new(&path)).changes(changes.clone());
        let builder = builder.before_step(Arc::new(move || blocked.lock().unwrap().recv().unwrap_or(())));
        let engine = Arc::new(tokio::task::spawn_blocking(|| builder.load()).await.unwrap().unwrap());
        registry.set_status(&model(), ModelStatus::Resident(engine.clone()));
        let watchdog = tokio::spawn(run(registry.clone(), limit));
        let breakdown = crate::node::breakdown(&registry, changes.subscribe());
        tokio::pin!(breakdown);
        assert!(tokio::time::timeout(3 * limit, &mut breakdown).await.is_err(), "an idle engine does not hang");

        let prompt = Prompt {
            messages: vec![ChatMessage { role: ChatRole::User, content: "a".to_owned() }],
            sampling: Sampling { max_tokens: 2, ..Sampling::default() },
            format: OutputFormat::Text,
            ..Prompt::default()
        };
        let generation = engine.admit(prompt).await.unwrap().start();
        let ended = tokio::time::timeout(Duration::from_secs(60), &mut breakdown).await.unwrap();
        let Error::Engine { model: broken, failure } = &ended else { panic!("{ended}") };
        assert_eq!((broken, failure), (&model(), &ModelFault::Engine(EngineFailure::Hung { limit })));
        assert!(ended.to_string().contains("has not ended after 0.3 s; the node exits"), "{ended}");
        assert_eq!(registry.engine_failure(&model()), Some(EngineFailure::Hung { limit }));
        watchdog.abort();
        drop((generation, end_test));
    }
}
