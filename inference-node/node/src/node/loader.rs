//! Loads models and lets them go, one after the other, on a thread of its own: a load cannot be interrupted.
//!
//! What all models together may take is what was free when the node started, or `memory_limit`. A model that does not fit
//! beside the others makes room, in this order: weights that are only parked, the idle model that was used least lately, the
//! busy one, which takes no more sequences and goes when its last has ended. Pinned models (`cfq models pin`) stay, and so
//! does one that was loaded a moment ago and has not served yet. What cannot be made room for is refused with the sum.
//!
//! A model that goes leaves its weights parked as far as `parked_weights` allows, the longest unused of them make way.

use std::collections::{BTreeMap, VecDeque};
use std::panic::AssertUnwindSafe;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use cfq_memory::Bytes;
use cfq_proto::model::ModelId;
use cfq_proto::node::{KvTiers, ModelState, Residency};

use crate::config::Config;
use crate::engine::Engine;
use crate::engine::candle::{
    Arena, CandleEngine, Card, DeviceChoice, Division, Limits, LoadError, Need, Parked, Stamp, cards, divide,
    need_corrected,
};
use crate::gpu;
use crate::models::{Held, ModelError, Pull, Step, Took};
use crate::node::fleet::{Fleet, Standing, Wish, unknown, with_causes};

/// While something is on its way out or waits for room, it is looked at this often: the end of a sequence wakes nobody here.
const LOOK: Duration = Duration::from_millis(20);

/// Room that does not come by somebody's end may come by time: who was loaded a moment ago and not used may go then.
const AGAIN: Duration = Duration::from_secs(1);
/// A node that was ended in the middle of a load may have been stopped by hand; twice in a row is no accident.
const UNENDED_MOST: usize = 2;

/// A model that can answer.
struct Loaded {
    engine: Arc<CandleEngine>,
    /// Nobody removes its file meanwhile.
    held: Held,
    need: u64,
    at: Instant,
    /// The last use of it before it was loaded.
    used_before: u64,
}

/// Weights that are kept without an engine. Their file may be removed.
struct Kept {
    parked: Parked,
    stamp: Option<Stamp>,
}

pub struct Loader {
    fleet: Arc<Fleet>,
    config: Config,
    wished: Receiver<Wish>,
    /// Bytes for all models together, on the CPU.
    total: u64,
    /// Where keys and values without room are kept, for all models.
    arena: Option<Arc<Arena>>,
    /// What models go to first; none: the CPU. Or why the one that is meant cannot be used.
    cards: Result<Vec<Card>, String>,
    loaded: BTreeMap<ModelId, Loaded>,
    leaving: Vec<(ModelId, Loaded)>,
    /// The longest unused first.
    parked: VecDeque<Kept>,
    /// Waiting for room, in the order they were asked for.
    waiting: VecDeque<ModelId>,
    /// Of models that were loaded once: what they took.
    needed: BTreeMap<ModelId, u64>,
}

/// What became of a try to make room.
enum Room {
    /// So many bytes may be taken.
    Made(u64),
    /// Something is on its way out.
    Coming,
    /// Nothing more can go.
    None { reason: String },
}

impl Loader {
    pub fn new(fleet: &Arc<Fleet>, config: &Config, wished: Receiver<Wish>) -> Self {
        let memory = gpu::available_memory().min(config.memory_limit.unwrap_or(u64::MAX));
        let Division { models: total, parked } = divide(memory, config.parked_kv);
        tracing::info!(models = %Bytes(total), parked_kv = %Bytes(parked), "memory divided");
        Self {
            fleet: fleet.clone(),
            config: config.clone(),
            wished,
            total,
            arena: Arena::new(parked, config.parked_kv_as),
            cards: usable(config.device),
            loaded: BTreeMap::new(),
            leaving: Vec::new(),
            parked: VecDeque::new(),
            waiting: VecDeque::new(),
            needed: BTreeMap::new(),
        }
    }

    /// Loads what the configuration names, then what is wished for, until the fleet is gone.
    pub fn run(mut self) {
        self.load_files();
        let mut looked = Instant::now();
        loop {
            let wish = if self.leaving.is_empty() && self.waiting.is_empty() {
                self.wished.recv().map_err(|_| RecvTimeoutError::Disconnected)
            } else {
                self.wished.recv_timeout(LOOK)
            };
            let wished = wish.is_ok();
            match wish {
                Ok(Wish::Load(model)) => self.waiting.push_back(model),
                Ok(Wish::Unload(model)) => self.dismiss(&model),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            let gone = self.see_off();
            if wished || gone || looked.elapsed() >= AGAIN {
                self.serve_waiting();
                looked = Instant::now();
            }
            self.fleet.set_free(self.free());
        }
    }

    /// Bytes that are promised to nobody. Parked weights give way to whatever needs the room.
    fn free(&self) -> u64 {
        let taken = self.loaded.values().chain(self.leaving.iter().map(|(_, loaded)| loaded)).map(|l| l.need);
        self.total.saturating_sub(taken.sum())
    }

    /// The same, as far as the machine has them now, without what is parked.
    fn have(&self) -> u64 {
        let parked: u64 = self.parked.iter().map(|kept| kept.parked.bytes()).sum();
        self.free().saturating_sub(parked).min(gpu::available_memory())
    }

    fn limits(&self, memory: u64) -> Limits {
        Limits { memory, max_sequences: self.config.max_sequences }
    }

    /// Loads every model that is a file. One that fits only without the others waits on disk until it is wanted.
    pub fn load_files(&mut self) {
        let mut files = self.fleet.files_to_load();
        files.reverse();
        while let Some(model) = files.pop() {
            // An even share leaves room for the models after this one; one that needs more may take all there is.
            let (have, later) = (self.have(), files.len() as u64);
            let share = have / (later + 1);
            let outcome = match self.often_unended(&model) {
                Some(failed) => Err(failed),
                None => match self.load(&model, share, later + 1) {
                    Err(Failed::NoRoom { .. }) if share < have => self.load(&model, have, 1),
                    settled => settled,
                },
            };
            self.settle(&model, outcome);
        }
        self.fleet.set_free(self.free());
    }

    /// Loading it ended this process again and again: not at every start, only when somebody asks for it.
    fn often_unended(&self, model: &ModelId) -> Option<Failed> {
        let unended = self.config.store().measured(model).ok().flatten()?.unended();
        (unended >= UNENDED_MOST).then(|| {
            Failed::Refused(format!(
                "loading it ended the node the last {unended} times, most likely because memory ran out: free some, set \
                 memory_limit, or take a smaller model; `cfq models load {model}` tries again"
            ))
        })
    }

    /// Loads what waits first, if there is room or some can be made.
    fn serve_waiting(&mut self) {
        while let Some(model) = self.waiting.front().cloned() {
            match self.fleet.standing(&model) {
                Some(Standing::Loading | Standing::OnDisk(_)) => {}
                // It comes back when it is gone.
                Some(Standing::Leaving(_)) => return,
                Some(Standing::Ready(_) | Standing::Unusable(_)) | None => {
                    self.waiting.pop_front();
                    continue;
                }
            }
            self.fleet.set(&model, Standing::Loading);
            let outcome = match self.make_room(&model) {
                Ok(Room::Made(bytes)) => self.load(&model, bytes, 1),
                Ok(Room::Coming) => return,
                Ok(Room::None { reason }) => Err(Failed::Refused(reason)),
                Err(failed) => Err(failed),
            };
            self.waiting.pop_front();
            self.settle(&model, outcome);
        }
    }

    fn settle(&mut self, model: &ModelId, outcome: Result<Loaded, Failed>) {
        let standing = match outcome {
            Ok(loaded) => {
                self.needed.insert(model.clone(), loaded.need);
                let engine: Arc<dyn Engine> = loaded.engine.clone();
                self.loaded.insert(model.clone(), loaded);
                Standing::Ready(engine)
            }
            Err(Failed::NoRoom { need, .. }) if need.total() <= self.total => {
                tracing::info!(%model, %need, free = self.free(), "no room beside the others: loaded when it is wanted");
                Standing::OnDisk(on_disk(model, &need, self.config.max_sequences))
            }
            Err(failed) => {
                let reason = failed.reason();
                tracing::error!(%model, reason, "model cannot be used");
                Standing::Unusable(reason)
            }
        };
        self.fleet.set(model, standing);
    }

    /// As much as the model took last time, or as it needs at the least.
    fn make_room(&mut self, model: &ModelId) -> Result<Room, Failed> {
        let last = self.needed.get(model).copied();
        loop {
            let have = self.have();
            let fitting = match self.parked.iter().find(|kept| kept.parked.model() == model) {
                // Its own weights are in memory already.
                Some(kept) => kept.parked.need(self.limits(have + kept.parked.bytes())),
                None => self.need_on_disk(model, have)?,
            };
            let fits = match fitting {
                Ok(need) => Some(need.total()),
                // Nobody makes way for what would not fit even alone.
                Err(error @ LoadError::DoesNotFit { .. }) if least(&error) > self.total => {
                    return Err(Failed::of(error));
                }
                Err(LoadError::DoesNotFit { .. }) => None,
                Err(error) => return Err(Failed::Refused(with_causes(&error))),
            };
            let own =
                self.parked.iter().find(|kept| kept.parked.model() == model).map_or(0, |kept| kept.parked.bytes());
            if fits.is_some_and(|total| last.is_none_or(|last| total >= last)) {
                return Ok(Room::Made((have + own).min(last.unwrap_or(u64::MAX).max(fits.unwrap_or(0)))));
            }
            if let Some(at) = self.parked.iter().position(|kept| kept.parked.model() != model) {
                self.parked.remove(at);
                continue;
            }
            let idle = |l: &Loaded| l.engine.state().running == 0;
            if let Some(idle) = self.least_used(|model, l| idle(l) && !self.is_fresh(model, l)) {
                tracing::info!(model = %idle, wanted = %model, "idle model makes room");
                self.dismiss(&idle);
                self.see_off();
                continue;
            }
            if fits.is_some() {
                return Ok(Room::Made(have + own));
            }
            if !self.leaving.is_empty() || self.least_used(|model, l| idle(l) && self.is_fresh(model, l)).is_some() {
                return Ok(Room::Coming);
            }
            if let Some(busy) = self.least_used(|_, _| true) {
                tracing::info!(model = %busy, wanted = %model, "model makes room once its sequences have ended");
                self.dismiss(&busy);
                return Ok(Room::Coming);
            }
            return Ok(Room::None { reason: self.no_room(model, have + own) });
        }
    }

    fn no_room(&self, model: &ModelId, have: u64) -> String {
        let pinned: Vec<&str> = self.loaded.keys().map(ModelId::as_str).collect();
        let sum = match self.need_on_disk(model, have) {
            Ok(Err(error)) => with_causes(&error),
            Ok(Ok(need)) => format!("{model} needs {}", Bytes(need.total())),
            Err(failed) => failed.reason(),
        };
        match pinned.is_empty() {
            true => sum,
            false => format!("{sum}; nothing makes room, since these are pinned: {}", pinned.join(", ")),
        }
    }

    /// The fit of a model's file, if the file can be had without fetching it.
    fn need_on_disk(&self, model: &ModelId, have: u64) -> Result<Result<Need, LoadError>, Failed> {
        let store = self.config.store();
        let path = match model.source() {
            cfq_proto::model::ModelSource::Path(path) => path,
            _ => match store.show(model) {
                Ok(installed) => installed.path,
                // It will be fetched, and refused then if it is too large.
                Err(_) => self.fetch(model)?.path.clone(),
            },
        };
        Ok(need_corrected(&path, self.limits(have), self.correction(model)))
    }

    /// The loaded model that was used least lately, of those that may go.
    fn least_used(&self, may: impl Fn(&ModelId, &Loaded) -> bool) -> Option<ModelId> {
        let store = self.config.store();
        let pinned = |model: &ModelId| store.show(model).is_ok_and(|installed| installed.pinned);
        let going = self.loaded.iter().filter(|(model, loaded)| may(model, loaded) && !pinned(model));
        going.min_by_key(|(model, _)| self.fleet.last_use(model)).map(|(model, _)| model.clone())
    }

    /// Loaded a moment ago, and nobody has used it yet.
    fn is_fresh(&self, model: &ModelId, loaded: &Loaded) -> bool {
        // Whoever it was loaded for is on the way, or has gone elsewhere.
        let grace = self.config.timing.accept() * 2;
        self.fleet.last_use(model) == loaded.used_before && loaded.at.elapsed() < grace
    }

    /// It takes no more sequences from now on.
    fn dismiss(&mut self, model: &ModelId) {
        let Some(loaded) = self.loaded.remove(model) else { return };
        let engine: Arc<dyn Engine> = loaded.engine.clone();
        let engine: Weak<dyn Engine> = Arc::downgrade(&engine);
        self.fleet.set(model, Standing::Leaving(engine));
        self.leaving.push((model.clone(), loaded));
    }

    /// Lets go of those on which nothing runs any more; whether there was one.
    fn see_off(&mut self) -> bool {
        let before = self.leaving.len();
        for (model, loaded) in std::mem::take(&mut self.leaving) {
            let state = loaded.engine.state();
            let Loaded { engine, held, need, at, used_before } = loaded;
            // Somebody may be admitting a sequence right now: then there is another hand on it, and after that a sequence.
            let engine = match state.running {
                0 => Arc::try_unwrap(engine),
                _ => Err(engine),
            };
            match engine {
                Ok(engine) => {
                    let state = engine.state();
                    self.park(engine, &held);
                    tracing::info!(%model, freed = need, "model unloaded");
                    let kv_tiers = KvTiers { device: 0, ..state.kv_tiers };
                    let state = ModelState { residency: Residency::Available, kv_tiers, ..state };
                    self.fleet.set(&model, Standing::OnDisk(state));
                }
                Err(engine) => self.leaving.push((model, Loaded { engine, held, need, at, used_before })),
            }
        }
        let gone = self.leaving.len() < before;
        if gone {
            gpu::give_back();
        }
        gone
    }

    fn park(&mut self, engine: CandleEngine, held: &Held) {
        let Some(parked) = engine.park() else { return };
        let stamp = Stamp::of(&held.path);
        self.parked.push_back(Kept { parked, stamp });
        let bytes = |kept: &VecDeque<Kept>| kept.iter().map(|kept| kept.parked.bytes()).sum::<u64>();
        while bytes(&self.parked) > self.config.parked_weights {
            self.parked.pop_front();
        }
    }

    /// `of` models share what cards have free.
    fn load(&mut self, model: &ModelId, memory: u64, of: u64) -> Result<Loaded, Failed> {
        let began = Instant::now();
        let (limits, changes) = (self.limits(memory), self.fleet.changes().clone());
        let kept =
            self.parked.iter().position(|kept| kept.parked.model() == model).and_then(|at| self.parked.remove(at));
        let used_before = self.fleet.last_use(model);
        let attempt = std::panic::catch_unwind(AssertUnwindSafe(|| {
            if let Some(Kept { parked, stamp }) = kept
                && let Ok(Some(held)) = self.config.store().hold(model)
                && stamp.is_some()
                && stamp == Stamp::of(&held.path)
            {
                let engine = parked.load(limits, changes).map_err(Failed::of)?;
                tracing::info!(%model, seconds = began.elapsed().as_secs_f64(), "model loaded from memory");
                return Ok((engine, held));
            }
            let held = self.fetch(model)?;
            let engine = match self.on_cards(model, &held, limits, of)? {
                Some(engine) => engine,
                None => self.load_file(model, &held, limits)?,
            };
            Ok((engine, held))
        }));
        let (engine, held) = attempt.unwrap_or_else(|_| {
            Err(Failed::Refused(format!("loading {model} failed inside the engine; see the node's log")))
        })?;
        // What is on cards takes nothing of the host's.
        let need = if engine.device() == "cpu" { engine.need().total() } else { 0 };
        Ok(Loaded { engine: Arc::new(engine), held, need, at: Instant::now(), used_before })
    }

    /// On the cards, where there are any and it fits; `None`: it runs on the CPU. Models on cards make no room for others yet.
    fn on_cards(&self, model: &ModelId, held: &Held, limits: Limits, of: u64) -> Result<Option<CandleEngine>, Failed> {
        let cards = self
            .cards
            .as_ref()
            .map_err(|reason| Failed::Refused(format!("device = \"{}\": {reason}", self.config.device)))?;
        if cards.is_empty() {
            return Ok(None);
        }
        let load = |of| {
            let (changes, arena) = (self.fleet.changes().clone(), self.arena.clone());
            CandleEngine::load_on_cards(model.clone(), &held.path, cards, of, limits, changes, arena)
        };
        let engine = match load(of) {
            Err(LoadError::NoLayout { .. }) if of > 1 => load(1),
            settled => settled,
        };
        match engine {
            Ok(engine) => Ok(Some(engine)),
            Err(error @ (LoadError::NoLayout { .. } | LoadError::CardFull { .. }))
                if self.config.device == DeviceChoice::Auto =>
            {
                tracing::warn!(%model, reason = with_causes(&error), "no room on a card: the model runs on the CPU");
                Ok(None)
            }
            Err(error) => Err(Failed::of(error)),
        }
    }

    /// From the disk; noted before and after, and measured where nothing else changes what the process holds.
    fn load_file(&self, model: &ModelId, held: &Held, limits: Limits) -> Result<CandleEngine, Failed> {
        let (store, changes) = (self.config.store(), self.fleet.changes().clone());
        let correction = self.correction(model);
        noted(model, store.load_begins(model));
        cfq_link::failpoint::hit("node.loading");
        let is_quiet = || {
            self.loaded
                .values()
                .chain(self.leaving.iter().map(|(_, loaded)| loaded))
                .all(|l| l.engine.state().running == 0)
        };
        let before = gpu::held_memory().filter(|_| is_quiet());
        let engine =
            CandleEngine::load_corrected(model.clone(), &held.path, limits, correction, changes, self.arena.clone());
        let took = match (before, gpu::held_memory().filter(|_| is_quiet()), &engine) {
            (Some(before), Some(after), Ok(engine)) => {
                Some(Took { predicted: engine.predicted(), took: after.saturating_sub(before) })
            }
            _ => None,
        };
        if let Some(took) = took {
            tracing::info!(%model, predicted = %Bytes(took.predicted), took = %Bytes(took.took), "load measured");
        }
        noted(model, store.load_ends(model, took.map(|took| ("cpu", took))));
        engine.map_err(Failed::of)
    }

    /// Thousandths that earlier loads took more than was predicted.
    fn correction(&self, model: &ModelId) -> u64 {
        match self.config.store().measured(model) {
            Ok(measured) => measured.and_then(|measured| measured.on("cpu")).map_or(0, Took::thousandths),
            Err(error) => {
                tracing::warn!(%model, reason = with_causes(&error), "what earlier loads took is not used");
                0
            }
        }
    }

    fn fetch(&self, model: &ModelId) -> Result<Held, Failed> {
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
        self.config.store().pull(model, Pull::default(), &mut progress).map_err(|error| {
            let words = with_causes(&error);
            Failed::Refused(format!(
                "{words}; `cfq models pull {model}` shows more, and `cfq models load {model}` takes it up then"
            ))
        })
    }
}

/// What a node was told to use and cannot makes its models unusable; what it may use and cannot is a line in its log.
fn usable(device: DeviceChoice) -> Result<Vec<Card>, String> {
    match (device, cards(device)) {
        (DeviceChoice::Cpu, _) => Ok(Vec::new()),
        (_, Ok(found)) => Ok(found),
        (DeviceChoice::Cuda(_), Err(none)) => Err(with_causes(&none)),
        (DeviceChoice::Auto, Err(none)) => {
            tracing::info!(reason = with_causes(&none), "models run on the CPU");
            Ok(Vec::new())
        }
    }
}

/// Bytes of the smallest form of what does not fit.
fn least(error: &LoadError) -> u64 {
    match error {
        LoadError::DoesNotFit { source, .. } => source.need.total(),
        LoadError::Header(_)
        | LoadError::Weights { .. }
        | LoadError::NoLayout { .. }
        | LoadError::CardFull { .. }
        | LoadError::Thread(_) => 0,
    }
}

/// A model folder that only others may write keeps no notes.
fn noted(model: &ModelId, written: Result<(), ModelError>) {
    if let Err(error) = written {
        tracing::debug!(%model, reason = with_causes(&error), "not noted");
    }
}

/// A model that is not loaded, by what it would take.
fn on_disk(model: &ModelId, need: &Need, max_sequences: u32) -> ModelState {
    ModelState {
        need_bytes: need.total(),
        context_tokens: u32::try_from(need.kv_tokens).unwrap_or(u32::MAX),
        kv_tokens_free: need.kv_tokens,
        max_sequences,
        ..unknown(model, Residency::Available)
    }
}

/// Why a model was not loaded.
enum Failed {
    /// Beside the others; the least it needs.
    NoRoom {
        need: Need,
        reason: String,
    },
    Refused(String),
}

impl Failed {
    fn of(error: LoadError) -> Self {
        let reason = with_causes(&error);
        match error {
            LoadError::DoesNotFit { source, .. } => Self::NoRoom { need: source.need, reason },
            LoadError::Header(_)
            | LoadError::Weights { .. }
            | LoadError::NoLayout { .. }
            | LoadError::CardFull { .. }
            | LoadError::Thread(_) => Self::Refused(reason),
        }
    }

    fn reason(self) -> String {
        match self {
            Self::NoRoom { reason, .. } | Self::Refused(reason) => reason,
        }
    }
}
