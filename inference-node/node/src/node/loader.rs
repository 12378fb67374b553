//! Loads models and lets them go, one after the other, on a thread of its own: a load cannot be interrupted.
//!
//! What all models together may take is what was free when the node started, or `memory_limit`. A model that does not fit
//! beside the others makes room, in this order: weights that are only parked, the idle model that was used least lately, the
//! busy one, which takes no more sequences and goes when its last has ended. Pinned models (`cfq models pin`) stay, and so
//! does one that was loaded a moment ago and has not served yet. What could never fit is refused with the sum; what finds no
//! room now is tried again when it is asked for again, after a while that grows with every try. Nobody goes for what would
//! find no room even with everybody gone that may go.
//!
//! What waits for room holds up only what would take it from it: the rest is loaded beside, except on a machine with cards.
//!
//! Cards come first where there are any, and have room of their own: models on them make room for each other in the same
//! order, and never for what goes to the CPU.
//!
//! While the machine makes way for another program, nothing is loaded and no card is opened, but models are let go.
//!
//! A model that goes leaves its weights parked as far as `parked_weights` allows, the longest unused of them make way.

mod behind;
mod cards;
mod later;
mod load;
mod memory;
mod room;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use cfq_memory::Bytes;
use cfq_proto::model::ModelId;
use cfq_proto::node::{ModelState, Residency};

use self::later::Later;
use self::room::Room;
use crate::config::Config;
use crate::engine::Engine;
use crate::engine::candle::{Arena, CandleEngine, Card, Division, Limits, Need, Parked, Stamp, divide};
use crate::gpu;
use crate::models::Held;
use crate::node::fleet::{Fleet, Standing, Wish, unknown};

/// While something is on its way out or waits for room, it is looked at this often: the end of a sequence wakes nobody here.
const LOOK: Duration = Duration::from_millis(20);

/// Room that does not come by somebody's end may come by time: who was loaded a moment ago and not used may go then.
const AGAIN: Duration = Duration::from_secs(1);

/// Other programs take memory and give it back without a word: this old may be what the ledger says of it.
const TOLD: Duration = Duration::from_secs(10);

/// A node that was ended in the middle of a load may have been stopped by hand; twice in a row is no accident.
const UNENDED_MOST: usize = 2;

/// A model that can answer.
struct Loaded {
    engine: Arc<CandleEngine>,
    /// Nobody removes its file meanwhile.
    held: Held,
    /// Bytes of the host's memory.
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
    /// Bytes of the host's memory that those need at the least, as far as that was looked up.
    least: BTreeMap<ModelId, u64>,
    /// Of models that were loaded once: what they took of the host's memory.
    needed: BTreeMap<ModelId, u64>,
    later: Later,
}

impl Loader {
    pub fn new(fleet: &Arc<Fleet>, config: &Config, wished: Receiver<Wish>) -> Self {
        // What a card has free now is all that is ever taken of it.
        while fleet.makes_way() && !fleet.is_closed() {
            std::thread::sleep(LOOK);
        }
        let memory = gpu::available_memory().min(config.memory_limit.unwrap_or(u64::MAX));
        let Division { models: total, parked } = divide(memory, config.parked_kv);
        tracing::info!(models = %Bytes(total), parked_kv = %Bytes(parked), "memory divided");
        Self {
            fleet: fleet.clone(),
            config: config.clone(),
            wished,
            total,
            arena: Arena::new(parked, config.parked_kv_as),
            cards: load::usable(config.device),
            loaded: BTreeMap::new(),
            leaving: Vec::new(),
            parked: VecDeque::new(),
            waiting: VecDeque::new(),
            least: BTreeMap::new(),
            needed: BTreeMap::new(),
            later: Later::new(config.timing.accept() * 4),
        }
    }

    /// Loads what the configuration names, then what is wished for, until the fleet is gone.
    pub fn run(mut self) {
        self.load_files();
        let mut looked = Instant::now();
        loop {
            let pause = match (self.leaving.is_empty() && self.waiting.is_empty(), self.later.next()) {
                (false, _) if self.leaving.is_empty() && self.fleet.makes_way() => AGAIN,
                (false, _) => LOOK,
                (true, Some(due)) => due.saturating_duration_since(Instant::now()).min(TOLD),
                (true, None) => TOLD,
            };
            let wish = self.wished.recv_timeout(pause);
            let wished = wish.is_ok();
            match wish {
                Ok(Wish::Load(model)) => self.waiting.push_back(model),
                Ok(Wish::Unload(model)) => self.dismiss(&model),
                Ok(Wish::LoadFiles) => self.load_files(),
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            self.offer_again(Instant::now());
            let gone = self.see_off();
            if wished || gone || looked.elapsed() >= AGAIN {
                if !self.fleet.makes_way() {
                    self.serve_waiting();
                }
                self.fleet.set_free(self.told_of(gpu::available_memory()));
                looked = Instant::now();
            }
        }
    }

    /// Those that have memory.
    fn all(&self) -> impl Iterator<Item = &Loaded> {
        self.loaded.values().chain(self.leaving.iter().map(|(_, loaded)| loaded))
    }

    fn limits(&self, memory: u64) -> Limits {
        Limits { memory, max_sequences: self.config.max_sequences }
    }

    /// Loads every model that is a file. One that fits only without the others waits on disk until it is wanted.
    pub fn load_files(&mut self) {
        let mut files = self.fleet.files_to_load();
        files.reverse();
        while let Some(model) = files.pop() {
            if self.fleet.makes_way() {
                // In their turn, once that is over.
                files.push(model);
                self.waiting.extend(files.into_iter().rev());
                break;
            }
            // An even share leaves room for the models after this one; one that needs more may take all there is.
            let (have, later) = (self.have(), files.len() as u64);
            let share = have / (later + 1);
            let outcome = match self.often_unended(&model) {
                Some(failed) => Err(failed),
                None => match self.load(&model, share, later + 1) {
                    Err(Failed::NoRoomNow { .. }) if share < have => self.load(&model, have, 1),
                    settled => settled,
                },
            };
            let outcome = match outcome {
                Err(Failed::NoRoomNow { state, reason }) => {
                    tracing::info!(%model, reason, "no room beside the others: loaded when it is wanted");
                    self.fleet.set(&model, Standing::OnDisk(*state));
                    continue;
                }
                settled => settled,
            };
            self.settle(&model, outcome);
        }
        self.fleet.set_free(self.told_of(gpu::available_memory()));
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

    /// Loads what waits first, if there is room or some can be made; behind one that waits for room, what fits beside it.
    fn serve_waiting(&mut self) {
        let mut passed = 0;
        while let Some(model) = self.waiting.get(passed).cloned() {
            if self.fleet.makes_way() {
                break;
            }
            match self.fleet.standing(&model) {
                Some(Standing::Loading | Standing::OnDisk(_)) => {}
                // It comes back when it is gone.
                Some(Standing::Leaving(_)) => {
                    passed += 1;
                    continue;
                }
                Some(Standing::Ready(_) | Standing::Unusable(_)) | None => {
                    self.waiting.remove(passed);
                    continue;
                }
            }
            self.fleet.set(&model, Standing::Loading);
            let found = if passed == 0 { self.find_room(&model) } else { Ok(self.room_behind(passed, &model)) };
            let outcome = match found {
                Ok(Room::Made(bytes)) => self.load(&model, bytes, 1),
                Ok(Room::Coming) => {
                    passed += 1;
                    continue;
                }
                Err(failed) => Err(failed),
            };
            self.waiting.remove(passed);
            self.settle(&model, outcome);
        }
        let Self { least, waiting, .. } = self;
        least.retain(|model, _| waiting.contains(model));
    }

    fn settle(&mut self, model: &ModelId, outcome: Result<Loaded, Failed>) {
        let standing = match outcome {
            Ok(loaded) => {
                // What parked weights kept from it, it may have another time.
                let kept = if self.parked.is_empty() { 0 } else { self.needed.get(model).copied().unwrap_or(0) };
                self.needed.insert(model.clone(), loaded.need.max(kept));
                self.later.forget(model);
                let engine: Arc<dyn Engine> = loaded.engine.clone();
                self.loaded.insert(model.clone(), loaded);
                Standing::Ready(engine)
            }
            Err(Failed::NoRoomNow { state, reason }) => {
                let wait = self.later.put_off(model, *state, Instant::now());
                let reason = format!("{reason}. It is tried again when it is wanted after {} s", wait.as_secs().max(1));
                tracing::warn!(%model, reason, "no room for a model");
                Standing::Unusable(reason)
            }
            Err(Failed::Refused(reason)) => {
                self.later.forget(model);
                tracing::error!(%model, reason, "model cannot be used");
                Standing::Unusable(reason)
            }
        };
        self.fleet.set(model, standing);
    }

    /// What was put off may be asked for again.
    fn offer_again(&mut self, now: Instant) {
        for (model, state) in self.later.due(now) {
            if matches!(self.fleet.standing(&model), Some(Standing::Unusable(_))) {
                self.fleet.set(&model, Standing::OnDisk(state));
            }
        }
    }
}

/// A model that is not loaded, by what it would take.
fn on_disk(model: &ModelId, device: &str, need: &Need, max_sequences: u32) -> ModelState {
    ModelState {
        device: device.to_owned(),
        need_bytes: need.total(),
        context_tokens: u32::try_from(need.kv_tokens).unwrap_or(u32::MAX),
        kv_tokens_free: need.kv_tokens,
        max_sequences,
        ..unknown(model, Residency::Available)
    }
}

/// Why a model was not loaded.
enum Failed {
    /// It would fit, but for what has the memory now; what it would be.
    NoRoomNow { state: Box<ModelState>, reason: String },
    /// Asking again changes nothing.
    Refused(String),
}
