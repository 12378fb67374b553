//! The node's models: what each is doing, and the ledger made of it.
//!
//! Files are loaded one after the other in the background, so that the node can be seen, with its models loading, from
//! the first second. A load that fails, or panics, leaves the model unusable with its reason, and the node lives.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cfq_memory::Bytes;
use cfq_proto::model::{ModelId, ModelSource};
use cfq_proto::node::{KvTiers, Ledger, ModelState, Residency};

use crate::config::Config;
use crate::engine::Engine;
use crate::engine::candle::{
    Arena, CandleEngine, Card, Changes, DeviceChoice, Division, Limits, LoadError, cards, divide,
};
use crate::engine::proxy::{ProxyEngine, Server};
use crate::gpu;
use crate::models::{Held, Pull, Step};

/// What one model is doing.
#[derive(Clone)]
pub enum Standing {
    Loading,
    Ready(Arc<dyn Engine>),
    Unusable(String),
}

pub struct Fleet {
    standings: Mutex<BTreeMap<ModelId, Standing>>,
    /// Of the files loaded: nobody removes them meanwhile.
    held: Mutex<Vec<Held>>,
    ledger: Mutex<Ledger>,
    changes: Arc<Changes>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Plain data: whole even if a holder panicked.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Fleet {
    /// All models of the configuration; those behind endpoints are ready, files are loading. Also the servers to watch.
    pub fn new(config: &Config, changes: Arc<Changes>) -> (Arc<Self>, Vec<Arc<Server>>) {
        let mut servers: BTreeMap<&str, Result<Arc<Server>, String>> = BTreeMap::new();
        for (name, endpoint) in &config.endpoints {
            let server = Server::new(name, endpoint, &config.timing, changes.clone()).map_err(|error| {
                let reason = with_causes(&error);
                tracing::error!(endpoint = name, reason, "endpoint cannot be used");
                reason
            });
            servers.insert(name, server);
        }
        let standing = |model: &ModelId| {
            match model.source() {
            ModelSource::Path(_) | ModelSource::Hub { .. } | ModelSource::Pypi { .. } => Standing::Loading,
            ModelSource::OpenAi { endpoint, .. } => match servers.get(endpoint.as_str()) {
                Some(Ok(server)) => match ProxyEngine::new(model.clone(), server.clone()) {
                    Some(engine) => Standing::Ready(Arc::new(engine)),
                    None => Standing::Unusable(format!("{model} names no model")),
                },
                Some(Err(reason)) => Standing::Unusable(reason.clone()),
                None => Standing::Unusable(format!(
                    "endpoint {endpoint} is not configured: add [endpoints.{endpoint}] with its url"
                )),
            },
            ModelSource::Ollama { .. } => Standing::Unusable(
                "ollama: models are not supported in this version; Ollama also answers as an openai: endpoint under /v1".to_owned(),
            ),
        }
        };
        let standings = config.models.iter().map(|model| (model.clone(), standing(model))).collect();
        let fleet =
            Self { standings: Mutex::new(standings), held: Mutex::default(), ledger: Mutex::default(), changes };
        let servers = servers.into_values().filter_map(Result::ok).collect();
        (Arc::new(fleet), servers)
    }

    pub fn standing(&self, model: &ModelId) -> Option<Standing> {
        lock(&self.standings).get(model).cloned()
    }

    fn set(&self, model: &ModelId, standing: Standing) {
        lock(&self.standings).insert(model.clone(), standing);
        self.changes.send_replace(());
    }

    /// A model whose engine will never work again, and why.
    pub fn broken(&self) -> Option<(ModelId, String)> {
        lock(&self.standings).iter().find_map(|(model, standing)| match standing {
            Standing::Ready(engine) => Some((model.clone(), engine.broken()?)),
            Standing::Loading | Standing::Unusable(_) => None,
        })
    }

    /// Takes no new work from now on.
    pub fn drain(&self) {
        let mut ledger = lock(&self.ledger);
        ledger.draining = true;
        ledger.version += 1;
        drop(ledger);
        self.changes.send_replace(());
    }

    /// The ledger as it is now; its version grows whenever it reads differently from the last one handed out.
    pub fn ledger(&self) -> Ledger {
        let models: Vec<ModelState> = lock(&self.standings).iter().map(|(model, s)| s.state(model)).collect();
        let mut ledger = lock(&self.ledger);
        if ledger.models != models {
            ledger.models = models;
            ledger.version += 1;
        }
        ledger.clone()
    }

    /// Loads every model that is a file. Blocks for seconds to minutes.
    pub fn load_files(&self, config: &Config) {
        let mut waiting: Vec<ModelId> = lock(&self.standings)
            .iter()
            .filter(|(_, standing)| matches!(standing, Standing::Loading))
            .map(|(model, _)| model.clone())
            .collect();
        let memory = gpu::available_memory().min(config.memory_limit.unwrap_or(u64::MAX));
        let Division { models: mut budget, parked } = divide(memory, config.parked_kv);
        tracing::info!(models = %Bytes(budget), parked_kv = %Bytes(parked), "memory divided");
        let arena = Arena::new(parked, config.parked_kv_as);
        // What a node was told to use and cannot makes its models unusable; what it may use and cannot is a line in its log.
        let found = match config.device {
            DeviceChoice::Cpu => Ok(Vec::new()),
            choice => cards(choice).or_else(|none| match choice {
                DeviceChoice::Cuda(_) => Err(with_causes(&none)),
                DeviceChoice::Auto | DeviceChoice::Cpu => {
                    tracing::info!(reason = with_causes(&none), "models run on the CPU");
                    Ok(Vec::new())
                }
            }),
        };
        waiting.reverse();
        while let Some(model) = waiting.pop() {
            let cards = match &found {
                Ok(cards) => cards,
                Err(reason) => {
                    self.set(&model, Standing::Unusable(format!("device = \"{}\": {reason}", config.device)));
                    continue;
                }
            };
            // An even share leaves room for the models after this one; one that needs more may take all there is.
            let share = budget / (waiting.len() as u64 + 1);
            let attempt = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                let (waiting, memory) = (waiting.len() as u64 + 1, (share, budget));
                load(config, &model, cards, waiting, memory, self.changes.clone(), arena.clone())
            }));
            let standing = match attempt {
                Ok(Ok((engine, held))) => {
                    lock(&self.held).push(held);
                    if engine.device() == "cpu" {
                        budget = budget.saturating_sub(engine.need().total());
                    }
                    Standing::Ready(Arc::new(engine))
                }
                Ok(Err(reason)) => {
                    tracing::error!(%model, reason, "model cannot be used");
                    Standing::Unusable(reason)
                }
                Err(_) => Standing::Unusable(format!("loading {model} failed inside the engine; see the node's log")),
            };
            self.set(&model, standing);
        }
    }
}

fn load(
    config: &Config,
    model: &ModelId,
    cards: &[Card],
    waiting: u64,
    (share, all): (u64, u64),
    changes: Arc<Changes>,
    arena: Option<Arc<Arena>>,
) -> Result<(CandleEngine, Held), String> {
    let mut told = 0;
    let mut progress = |step: Step| match step {
        Step::Bytes { done, total } if done >= told + total / 10 => {
            told = done;
            tracing::info!(%model, done = %Bytes(done), total = %Bytes(total), "fetching model");
        }
        Step::Begins { bytes, have, .. } => {
            tracing::info!(%model, total = %Bytes(bytes), have = %Bytes(have), "model is not here: fetching it");
        }
        Step::Again { why, wait } => tracing::warn!(%model, why, wait = wait.as_secs_f64(), "fetching goes on"),
        Step::Waiting => tracing::info!(%model, "another process fetches into the same folder"),
        Step::Bytes { .. } | Step::Removed { .. } | Step::Quiet => {}
    };
    let held = config.store().pull(model, Pull::default(), &mut progress).map_err(|error| {
        format!("{}; `cfq models pull {model}` shows more, and cfq takes it up at the next start", with_causes(&error))
    })?;
    let path = &held.path;
    let limits = |memory| Limits { memory, max_sequences: config.max_sequences };
    if !cards.is_empty() {
        let on_cards = |of| {
            let (model, changes) = (model.clone(), changes.clone());
            CandleEngine::load_on_cards(model, path, cards, of, limits(all), changes, arena.clone())
        };
        let engine = match on_cards(waiting) {
            Err(LoadError::NoLayout { .. }) if waiting > 1 => on_cards(1),
            settled => settled,
        };
        match engine {
            Err(error @ (LoadError::NoLayout { .. } | LoadError::CardFull { .. }))
                if config.device == DeviceChoice::Auto =>
            {
                tracing::warn!(%model, reason = with_causes(&error), "no room on a card: the model runs on the CPU");
            }
            settled => return settled.map(|engine| (engine, held)).map_err(|error| with_causes(&error)),
        }
    }
    let engine =
        |memory| CandleEngine::load_parking(model.clone(), path, limits(memory), changes.clone(), arena.clone());
    let engine = match engine(share) {
        Err(LoadError::DoesNotFit { .. }) if share < all => engine(all),
        settled => settled,
    };
    engine.map(|engine| (engine, held)).map_err(|error| with_causes(&error))
}

fn with_causes(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut next = error.source();
    while let Some(cause) = next {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        next = cause.source();
    }
    text
}

impl Standing {
    fn state(&self, model: &ModelId) -> ModelState {
        let residency = match self {
            Self::Ready(engine) => return engine.state(),
            Self::Loading => Residency::Loading,
            Self::Unusable(reason) => Residency::Unusable { reason: reason.clone() },
        };
        ModelState {
            model: model.clone(),
            residency,
            device: "cpu".to_owned(),
            need_bytes: 0,
            context_tokens: 0,
            kv_tokens_free: 0,
            kv_tiers: KvTiers::default(),
            running: 0,
            max_sequences: 0,
            prefill_rate: 0.0,
            decode_rate: 0.0,
            load_rate: 0.0,
            tokens_per_byte: 0.3,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Admitted, Refused};
    use futures::future::BoxFuture;

    fn config(models: &[&str], dir: &std::path::Path) -> Config {
        serde_json::from_value(serde_json::json!({
            "node": "den", "nats": { "url": "nats://127.0.0.1:1" }, "model_dir": dir, "models": models,
        }))
        .unwrap()
    }

    fn reason(ledger: &Ledger, at: usize) -> &str {
        match &ledger.models[at].residency {
            Residency::Unusable { reason } => reason,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn what_cannot_serve_says_why_and_the_node_lives() {
        let folder = tempfile::tempdir().unwrap();
        let broken = folder.path().join("broken.gguf");
        std::fs::write(&broken, b"GGUF\x03\0\0\0").unwrap();
        let path = format!("path:{}", broken.display());
        let config = config(&["ollama:den/q", "openai:box/m", &path], folder.path());
        let (fleet, servers) = Fleet::new(&config, Arc::default());
        assert!(servers.is_empty());
        let ledger = fleet.ledger();
        assert_eq!(ledger.version, 1);
        assert_eq!(fleet.ledger().version, 1, "nothing changed");
        assert!(reason(&ledger, 0).contains("not supported"));
        assert!(reason(&ledger, 1).contains("[endpoints.box]"));
        assert_eq!(ledger.models[2].residency, Residency::Loading);
        fleet.load_files(&config);
        let ledger = fleet.ledger();
        assert_eq!(ledger.version, 2);
        assert!(reason(&ledger, 2).contains("cut off or corrupt"), "{}", reason(&ledger, 2));
        fleet.drain();
        assert!(fleet.ledger().draining && fleet.ledger().version == 3);
    }

    #[test]
    fn a_model_of_an_unreachable_hub_says_which_command_fetches_it() {
        let folder = tempfile::tempdir().unwrap();
        let mut config = config(&["hf:a/b:c.gguf"], folder.path());
        config.hub.endpoint = Some("http://127.0.0.1:9".to_owned());
        config.hub.patience.tries = 1;
        let (fleet, _) = Fleet::new(&config, Arc::default());
        assert_eq!(fleet.ledger().models[0].residency, Residency::Loading);
        fleet.load_files(&config);
        let ledger = fleet.ledger();
        assert!(reason(&ledger, 0).contains("`cfq models pull hf:a/b:c.gguf`"), "{}", reason(&ledger, 0));
    }

    struct Broken;

    impl Engine for Broken {
        fn state(&self) -> ModelState {
            Standing::Loading.state(&"openai:box/m".parse().unwrap())
        }

        fn broken(&self) -> Option<String> {
            Some("index out of bounds".to_owned())
        }

        fn admit_after(
            &self,
            _: cfq_proto::job::Prompt,
            _: cfq_proto::job::Written,
        ) -> BoxFuture<'_, Result<Admitted, Refused>> {
            Box::pin(async { Err(Refused::NotNow { need: None, have: 0 }) })
        }
    }

    #[test]
    fn an_engine_that_broke_is_noticed_and_a_model_that_cannot_be_used_is_no_breakdown() {
        let folder = tempfile::tempdir().unwrap();
        let config = config(&["ollama:den/q", "openai:box/m"], folder.path());
        let (fleet, _) = Fleet::new(&config, Arc::default());
        assert_eq!(fleet.broken(), None);
        let model: ModelId = "openai:box/m".parse().unwrap();
        fleet.set(&model, Standing::Ready(Arc::new(Broken)));
        assert_eq!(fleet.broken(), Some((model, "index out of bounds".to_owned())));
    }
}
