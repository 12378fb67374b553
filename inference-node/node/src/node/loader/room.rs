//! Room for a model beside others: who goes for it, and how.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Arc, Weak};

use cfq_memory::Bytes;
use cfq_proto::model::{ModelId, ModelSource};
use cfq_proto::node::{KvTiers, ModelState, Residency};

use super::cards::is_idle;
use super::{Failed, Kept, Loaded, Loader};
use crate::engine::Engine;
use crate::engine::candle::{CandleEngine, LoadError, Need, Stamp, give_back, need_corrected};
use crate::gpu;
use crate::models::{Held, State};
use crate::node::fleet::{Standing, with_causes};

/// What became of a try to make room.
pub(super) enum Room {
    /// So many bytes may be taken.
    Made(u64),
    /// Something is on its way out.
    Coming,
}

impl Loader {
    /// On the cards, where there are any that would take it; else in the host's memory.
    pub(super) fn find_room(&mut self, model: &ModelId) -> Result<Room, Failed> {
        match self.make_room_on_cards(model)? {
            Some(room) => Ok(room),
            None => self.make_room(model),
        }
    }

    /// Whether the host's memory would do, without all that may go.
    pub(super) fn could_fit_the_host(&self, model: &ModelId) -> Result<bool, Failed> {
        let most = self.most_of(gpu::available_memory());
        Ok(self.need_on_disk(model, most)?.is_ok())
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
                Ok(need) => Some(need),
                // Nobody makes way for what would not fit even alone.
                Err(error @ LoadError::DoesNotFit { .. }) if least(&error) > self.total => {
                    return Err(self.failed(model, &error));
                }
                // Nor for what would not fit beside those that stay and what other programs hold now.
                Err(error @ LoadError::DoesNotFit { .. }) => match self.most_of(gpu::available_memory()) {
                    most if least(&error) > most => return Err(self.no_room(model, most)),
                    _ => None,
                },
                Err(error) => return Err(Failed::Refused(with_causes(&error))),
            };
            let own =
                self.parked.iter().find(|kept| kept.parked.model() == model).map_or(0, |kept| kept.parked.bytes());
            let others = self.parked_bytes().saturating_sub(own);
            if fits.is_some_and(|need| last.is_none_or(|last| is_enough(&need, last, others))) {
                let total = fits.map_or(0, |need| need.total());
                return Ok(Room::Made((have + own).min(last.unwrap_or(u64::MAX).max(total))));
            }
            if let Some(at) = self.parked.iter().position(|kept| kept.parked.model() != model) {
                self.parked.remove(at);
                continue;
            }
            // What is on cards has nothing to give here.
            let host = |l: &Loaded| l.need > 0;
            if self.goes_now(host) {
                return Ok(Room::Coming);
            }
            if let Some(idle) = self.least_used(|model, l| host(l) && is_idle(l) && !self.is_fresh(model, l)) {
                tracing::info!(model = %idle, wanted = %model, "idle model makes room");
                self.dismiss(&idle);
                self.see_off();
                continue;
            }
            if fits.is_some() {
                return Ok(Room::Made(have + own));
            }
            let fresh = |model: &ModelId, l: &Loaded| host(l) && is_idle(l) && self.is_fresh(model, l);
            if self.leaving.iter().any(|(_, l)| host(l)) || self.least_used(fresh).is_some() {
                return Ok(Room::Coming);
            }
            if let Some(busy) = self.least_used(|_, l| host(l)) {
                tracing::info!(model = %busy, wanted = %model, "model makes room once its sequences have ended");
                self.dismiss(&busy);
                return Ok(Room::Coming);
            }
            return Err(self.no_room(model, have + own));
        }
    }

    /// Nothing more can go.
    fn no_room(&self, model: &ModelId, have: u64) -> Failed {
        let stays = |(model, l): &(&ModelId, &Loaded)| l.need > 0 && self.is_pinned(model);
        let pinned: Vec<&str> = self.loaded.iter().filter(stays).map(|(model, _)| model.as_str()).collect();
        let (need, sum) = match self.need_on_disk(model, have) {
            Ok(Err(error)) => match &error {
                LoadError::DoesNotFit { source, .. } => (source.need, with_causes(&error)),
                other => return self.failed(model, other),
            },
            Ok(Ok(need)) => (need, format!("{model} needs {}", Bytes(need.total()))),
            Err(failed) => return failed,
        };
        let reason = match pinned.is_empty() {
            true => sum,
            false => format!("{sum}; no more can be made, since these are pinned: {}", pinned.join(", ")),
        };
        self.no_room_now(model, "cpu", &need, reason)
    }

    /// The fit of a model's file, if the file can be had without fetching it.
    fn need_on_disk(&self, model: &ModelId, have: u64) -> Result<Result<Need, LoadError>, Failed> {
        Ok(need_corrected(&self.path(model)?, self.limits(have), self.correction(model)))
    }

    /// Where the model's file is.
    pub(super) fn path(&self, model: &ModelId) -> Result<PathBuf, Failed> {
        match self.here(model) {
            Some(path) => Ok(path),
            // It will be fetched, and refused then if it is too large.
            None => Ok(self.fetch(model)?.path.clone()),
        }
    }

    /// The same, if it need not be fetched.
    pub(super) fn here(&self, model: &ModelId) -> Option<PathBuf> {
        match model.source() {
            ModelSource::Path(path) => Some(path),
            _ => {
                let installed = self.config.store().show(model).ok()?;
                // Of an unfinished one it would be the folder of its parts.
                (installed.state == State::Ready).then_some(installed.path)
            }
        }
    }

    pub(super) fn is_pinned(&self, model: &ModelId) -> bool {
        self.config.store().show(model).is_ok_and(|installed| installed.pinned)
    }

    /// The loaded model that was used least lately, of those that may go.
    pub(super) fn least_used(&self, may: impl Fn(&ModelId, &Loaded) -> bool) -> Option<ModelId> {
        let going = self.loaded.iter().filter(|(model, loaded)| may(model, loaded) && !self.is_pinned(model));
        going.min_by_key(|(model, _)| self.fleet.last_use(model)).map(|(model, _)| model.clone())
    }

    /// One is on its way out and runs nothing: it is gone in a moment, and nobody else has to go before that.
    pub(super) fn goes_now(&self, of: impl Fn(&Loaded) -> bool) -> bool {
        self.leaving.iter().any(|(_, l)| of(l) && is_idle(l))
    }

    /// Loaded a moment ago, and nobody has used it yet.
    pub(super) fn is_fresh(&self, model: &ModelId, loaded: &Loaded) -> bool {
        // Whoever it was loaded for is on the way, or has gone elsewhere.
        let grace = self.config.timing.accept() * 2;
        self.fleet.last_use(model) == loaded.used_before && loaded.at.elapsed() < grace
    }

    /// It takes no more sequences from now on.
    pub(super) fn dismiss(&mut self, model: &ModelId) {
        let Some(loaded) = self.loaded.remove(model) else { return };
        let engine: Arc<dyn Engine> = loaded.engine.clone();
        let engine: Weak<dyn Engine> = Arc::downgrade(&engine);
        self.fleet.set(model, Standing::Leaving(engine));
        self.leaving.push((model.clone(), loaded));
    }

    /// Lets go of those on which nothing runs any more; whether there was one.
    pub(super) fn see_off(&mut self) -> bool {
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
        if gone && self.fleet.makes_way() {
            self.cards.iter().flatten().for_each(|card| give_back(&card.device));
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
}

/// Whether a model that took `last` bytes in all last time makes do with this, where `parked` are of other models' weights.
/// They are worth a smaller pool, or two models with room for one would lose their weights at every turn; half of it stays.
fn is_enough(need: &Need, last: u64, parked: u64) -> bool {
    let (total, pool) = (need.total(), need.kv());
    let before = last.saturating_sub(total - pool);
    // Pools are of whole blocks.
    let nearly = last - last / 64;
    total >= last || (total.saturating_add(parked) >= nearly && pool >= before / 2)
}

/// Bytes of the smallest form of what does not fit.
pub(super) fn least(error: &LoadError) -> u64 {
    match error {
        LoadError::DoesNotFit { source, .. } => source.need.total(),
        LoadError::Header(_)
        | LoadError::Weights { .. }
        | LoadError::NoLayout { .. }
        | LoadError::NotOnCards { .. }
        | LoadError::CardFull { .. }
        | LoadError::Thread(_) => 0,
    }
}
