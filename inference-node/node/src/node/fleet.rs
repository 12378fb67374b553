//! The node's models: what each is doing, and the ledger made of it.
//!
//! Models that are files are loaded and let go one after the other by the [`super::loader`], so that the node can be seen,
//! with its models loading, from the first second. A load that fails, or panics, leaves the model unusable with its reason,
//! and the node lives.

pub(in crate::node) mod way;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use cfq_proto::messages::ModelReply;
use cfq_proto::model::{ModelId, ModelSource};
use cfq_proto::node::{KvTiers, Ledger, ModelState, Residency};

use crate::config::Config;
use crate::engine::Engine;
use crate::engine::candle::Changes;
use crate::engine::proxy::{ProxyEngine, Server};
use crate::node::make_way::Taken;

/// What one model is doing.
#[derive(Clone)]
pub enum Standing {
    Loading,
    Ready(Arc<dyn Engine>),
    /// It takes no more sequences; when those that run have ended it is on disk.
    Leaving(Weak<dyn Engine>),
    /// Could be loaded; as it was, or would be.
    OnDisk(ModelState),
    Unusable(String),
}

/// See [`Fleet::leisure`].
pub enum Leisure {
    /// No sequence runs on the model, or on another that shares a device with it, and nothing is being loaded.
    Now(Arc<dyn Engine>),
    Later,
    /// It is not loaded, behind an endpoint, the node stops, or makes way for another program.
    Never,
}

/// What the loader is asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wish {
    Load(ModelId),
    Unload(ModelId),
    /// Everything that waits for its first load, as at the start.
    LoadFiles,
}

/// Wishes that wait while something is loaded.
const WISHES: usize = 64;

pub struct Fleet {
    /// Those the configuration names; any other is only known while it is of use.
    configured: BTreeSet<ModelId>,
    standings: Mutex<BTreeMap<ModelId, Standing>>,
    /// When each was last used, as a count of uses of any.
    used: Mutex<(u64, BTreeMap<ModelId, u64>)>,
    /// A panic outside any engine.
    fault: Mutex<Option<(ModelId, String)>>,
    /// Why nothing can be loaded any more.
    without_loader: Mutex<Option<String>>,
    ledger: Mutex<Ledger>,
    /// Cards that others have; nothing while nobody has to make way.
    taken: Mutex<Taken>,
    /// `None` once the node ends.
    wishes: Mutex<Option<SyncSender<Wish>>>,
    changes: Arc<Changes>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Plain data: whole even if a holder panicked.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn is_file(model: &ModelId) -> bool {
    match model.source() {
        ModelSource::Path(_) | ModelSource::Hub { .. } | ModelSource::Pypi { .. } => true,
        ModelSource::OpenAi { .. } | ModelSource::Ollama { .. } => false,
    }
}

impl Fleet {
    /// All models of the configuration; those behind endpoints are ready, files are to be loaded by whoever fulfils the
    /// wishes. Also the servers to watch.
    pub fn new(config: &Config, changes: Arc<Changes>) -> (Arc<Self>, Receiver<Wish>, Vec<Arc<Server>>) {
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
        let (wishes, wished) = sync_channel(WISHES);
        let fleet = Self {
            configured: config.models.iter().cloned().collect(),
            standings: Mutex::new(standings),
            used: Mutex::default(),
            fault: Mutex::default(),
            without_loader: Mutex::default(),
            ledger: Mutex::default(),
            taken: Mutex::default(),
            wishes: Mutex::new(Some(wishes)),
            changes,
        };
        let servers = servers.into_values().filter_map(Result::ok).collect();
        (Arc::new(fleet), wished, servers)
    }

    pub fn changes(&self) -> &Arc<Changes> {
        &self.changes
    }

    pub fn standing(&self, model: &ModelId) -> Option<Standing> {
        lock(&self.standings).get(model).cloned()
    }

    /// Whether something may be computed for `model` that nobody waits for.
    pub fn leisure(&self, model: &ModelId) -> Leisure {
        if lock(&self.ledger).draining || !is_file(model) || self.makes_way() {
            return Leisure::Never;
        }
        let standings = lock(&self.standings);
        let Some(Standing::Ready(engine)) = standings.get(model) else { return Leisure::Never };
        let devices = engine.state().device;
        let busy = |(other, standing): (&ModelId, &Standing)| match standing {
            // Reading a file and laying it out takes the processor and the disk.
            Standing::Loading => is_file(other),
            Standing::Ready(_) | Standing::Leaving(_) => {
                let state = standing.state(other);
                is_file(other)
                    && state.running > 0
                    && state.device.split(',').any(|id| devices.split(',').any(|d| d == id))
            }
            Standing::OnDisk(_) | Standing::Unusable(_) => false,
        };
        if standings.iter().any(busy) { Leisure::Later } else { Leisure::Now(engine.clone()) }
    }

    /// Files that wait for their first load.
    pub fn files_to_load(&self) -> Vec<ModelId> {
        let waits = |(model, standing): &(&ModelId, &Standing)| is_file(model) && matches!(standing, Standing::Loading);
        lock(&self.standings).iter().filter(waits).map(|(model, _)| model.clone()).collect()
    }

    pub fn set(&self, model: &ModelId, standing: Standing) {
        lock(&self.standings).insert(model.clone(), standing);
        self.changes.send_replace(());
    }

    /// Bytes that a load may take beside what is loaded.
    pub fn set_free(&self, bytes: u64) {
        let mut ledger = lock(&self.ledger);
        if ledger.free_bytes != bytes {
            ledger.free_bytes = bytes;
            ledger.version += 1;
            drop(ledger);
            self.changes.send_replace(());
        }
    }

    /// A job asks for it.
    pub fn use_now(&self, model: &ModelId) {
        let mut used = lock(&self.used);
        used.0 += 1;
        let now = used.0;
        used.1.insert(model.clone(), now);
    }

    /// When it was last used, in uses of any model; 0 if never.
    pub fn last_use(&self, model: &ModelId) -> u64 {
        lock(&self.used).1.get(model).copied().unwrap_or(0)
    }

    /// Makes a model ready, for a job or by hand. `known` says whether a model that is not served here yet can be: the
    /// reason why not, where it cannot. How it ends the ledger tells.
    pub fn load(&self, model: &ModelId, known: impl FnOnce() -> Result<(), String>) -> ModelReply {
        let refused = |reason: String| ModelReply::Refused { reason };
        let before = self.standing(model);
        if let Some(whom) = self.keeps_from_loading(model, before.as_ref()) {
            return refused(format!("this machine makes way for {whom}; ask again when that is gone"));
        }
        match &before {
            Some(Standing::Ready(_)) => return ModelReply::Loaded,
            Some(Standing::Loading) => return ModelReply::Loading { ledger_version: self.ledger().version },
            Some(Standing::Unusable(reason)) if !is_file(model) => return refused(reason.clone()),
            Some(Standing::OnDisk(_) | Standing::Unusable(_)) => self.set(model, Standing::Loading),
            // It goes first.
            Some(Standing::Leaving(_)) => {}
            None if !is_file(model) => {
                return refused(format!("{model} lives behind an endpoint: name it in this node's configuration"));
            }
            None => match known() {
                Ok(()) => self.set(model, Standing::Loading),
                Err(reason) => return refused(reason),
            },
        }
        let reply = ModelReply::Loading { ledger_version: self.ledger().version };
        let reply = self.wish(Wish::Load(model.clone()), reply);
        if matches!(reply, ModelReply::Refused { .. }) {
            let unasked = || Standing::Unusable("nobody asked for it again".to_owned());
            self.set(model, before.unwrap_or_else(unasked));
        }
        reply
    }

    /// Lets a model go once nothing runs on it.
    pub fn unload(&self, model: &ModelId) -> ModelReply {
        let refused = |reason: String| ModelReply::Refused { reason };
        match self.standing(model) {
            None => refused(format!("{model} is not served by this node")),
            Some(_) if !is_file(model) => {
                refused(format!("{model} lives behind an endpoint: nothing of it is loaded here"))
            }
            Some(Standing::Ready(engine)) => {
                let running = engine.state().running;
                // At once, so that the ledger that is told shows it.
                self.set(model, Standing::Leaving(Arc::downgrade(&engine)));
                let reply = ModelReply::Ending { running, ledger_version: self.ledger().version };
                let reply = self.wish(Wish::Unload(model.clone()), reply);
                if matches!(reply, ModelReply::Refused { .. }) {
                    self.set(model, Standing::Ready(engine));
                }
                reply
            }
            Some(Standing::Leaving(engine)) => {
                let running = engine.upgrade().map_or(0, |engine| engine.state().running);
                ModelReply::Ending { running, ledger_version: self.ledger().version }
            }
            Some(Standing::Loading) => {
                refused(format!("{model} is being loaded right now; ask again when that is done"))
            }
            // Nobody's configuration wants it, and it cannot be used: there is nothing more to tell of it.
            Some(Standing::Unusable(_)) if !self.configured.contains(model) => {
                lock(&self.standings).remove(model);
                self.changes.send_replace(());
                ModelReply::Unloaded
            }
            Some(Standing::OnDisk(_) | Standing::Unusable(_)) => ModelReply::Unloaded,
        }
    }

    fn wish(&self, wish: Wish, reply: ModelReply) -> ModelReply {
        let stopping = "this node loads nothing any more: it is stopping";
        let sent = match &*lock(&self.wishes) {
            Some(wishes) => wishes.try_send(wish),
            None => Err(TrySendError::Disconnected(wish)),
        };
        match sent {
            Ok(()) => reply,
            Err(TrySendError::Full(_)) => ModelReply::Refused {
                reason: "this node has much to load already; ask again when that is done".to_owned(),
            },
            Err(TrySendError::Disconnected(_)) => ModelReply::Refused { reason: stopping.to_owned() },
        }
    }

    /// Nothing more is wished for, so the loader ends when what it is at is done.
    pub fn close(&self) {
        lock(&self.wishes).take();
    }

    pub fn is_closed(&self) -> bool {
        lock(&self.wishes).is_none()
    }

    /// What the loader said when it ended; it cannot be started again, since what it held is gone with it.
    pub fn without_loader(&self, reason: String) {
        *lock(&self.without_loader) = Some(reason);
        self.changes.send_replace(());
    }

    pub fn loader_failed(&self) -> Option<String> {
        lock(&self.without_loader).clone()
    }

    /// What happened outside the model's engine leaves this process of no use: its memory may have run out.
    pub fn faulty(&self, model: &ModelId, reason: String) {
        *lock(&self.fault) = Some((model.clone(), reason));
        self.changes.send_replace(());
    }

    /// A model whose engine will never work again, and why.
    pub fn broken(&self) -> Option<(ModelId, String)> {
        if let Some(fault) = lock(&self.fault).clone() {
            return Some(fault);
        }
        lock(&self.standings).iter().find_map(|(model, standing)| match standing {
            Standing::Ready(engine) => Some((model.clone(), engine.broken()?)),
            Standing::Leaving(engine) => Some((model.clone(), engine.upgrade()?.broken()?)),
            Standing::Loading | Standing::OnDisk(_) | Standing::Unusable(_) => None,
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
        let taken = lock(&self.taken).clone();
        let (models, yields): (Vec<ModelState>, Vec<_>) = lock(&self.standings)
            .iter()
            .map(|(model, s)| (s.state(model), s.yields(model, &taken).map(|whom| (model.clone(), whom))))
            .unzip();
        let yields = yields.into_iter().flatten().collect();
        let mut ledger = lock(&self.ledger);
        if ledger.models != models || ledger.yields != yields {
            ledger.models = models;
            ledger.yields = yields;
            ledger.version += 1;
        }
        ledger.clone()
    }
}

/// An error with what is behind it.
pub fn with_causes(error: &dyn std::error::Error) -> String {
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
        match self {
            Self::Ready(engine) => engine.state(),
            Self::Leaving(engine) => match engine.upgrade() {
                // Nothing more fits on it; its sequences are still told.
                Some(engine) => ModelState {
                    residency: Residency::Available,
                    kv_tokens_free: 0,
                    max_sequences: 0,
                    ..engine.state()
                },
                None => unknown(model, Residency::Loading),
            },
            Self::OnDisk(state) => state.clone(),
            Self::Loading => unknown(model, Residency::Loading),
            Self::Unusable(reason) => unknown(model, Residency::Unusable { reason: reason.clone() }),
        }
    }
}

/// Of a model nothing is known of.
pub fn unknown(model: &ModelId, residency: Residency) -> ModelState {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::{Admitted, Refused};
    use crate::node::loader::Loader;
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
        let (fleet, wished, servers) = Fleet::new(&config, Arc::default());
        assert!(servers.is_empty());
        let ledger = fleet.ledger();
        assert_eq!(ledger.version, 1);
        assert_eq!(fleet.ledger().version, 1, "nothing changed");
        assert!(reason(&ledger, 0).contains("not supported"));
        assert!(reason(&ledger, 1).contains("[endpoints.box]"));
        assert_eq!(ledger.models[2].residency, Residency::Loading);
        Loader::new(&fleet, &config, wished).load_files();
        let ledger = fleet.ledger();
        assert!(ledger.version > 1 && ledger.free_bytes > 0);
        assert!(reason(&ledger, 2).contains("cut off or corrupt"), "{}", reason(&ledger, 2));
        fleet.drain();
        assert!(fleet.ledger().draining && fleet.ledger().version == ledger.version + 1);
    }

    #[test]
    fn a_model_of_an_unreachable_hub_says_which_command_fetches_it() {
        let folder = tempfile::tempdir().unwrap();
        let mut config = config(&["hf:a/b:c.gguf"], folder.path());
        config.hub.endpoint = Some("http://127.0.0.1:9".to_owned());
        config.hub.patience.tries = 1;
        let (fleet, wished, _) = Fleet::new(&config, Arc::default());
        assert_eq!(fleet.ledger().models[0].residency, Residency::Loading);
        Loader::new(&fleet, &config, wished).load_files();
        let ledger = fleet.ledger();
        assert!(reason(&ledger, 0).contains("`cfq models pull hf:a/b:c.gguf`"), "{}", reason(&ledger, 0));
    }

    struct Broken;

    impl Engine for Broken {
        fn state(&self) -> ModelState {
            unknown(&"openai:box/m".parse().unwrap(), Residency::Loading)
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
        let (fleet, _wished, _) = Fleet::new(&config, Arc::default());
        assert_eq!(fleet.broken(), None);
        let model: ModelId = "openai:box/m".parse().unwrap();
        fleet.set(&model, Standing::Ready(Arc::new(Broken)));
        assert_eq!(fleet.broken(), Some((model, "index out of bounds".to_owned())));
    }
}
