//! One load: from parked weights, onto cards or from the disk, noted before and measured after.

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Instant;

use cfq_memory::Bytes;
use cfq_proto::model::ModelId;

use super::cards::is_idle;
use super::{Failed, Kept, Loaded, Loader};
use crate::engine::candle::{CandleEngine, Card, DeviceChoice, Limits, LoadError, Share, Stamp, cards, free_of};
use crate::gpu;
use crate::models::{Held, Measured, ModelError, Pull, Step, Store, Took};
use crate::node::fleet::with_causes;

impl Loader {
    /// `of` models share what cards have free.
    pub(super) fn load(&mut self, model: &ModelId, memory: u64, of: u64) -> Result<Loaded, Failed> {
        let began = Instant::now();
        let (limits, changes) = (self.limits(memory), self.fleet.changes().clone());
        let kept =
            self.parked.iter().position(|kept| kept.parked.model() == model).and_then(|at| self.parked.remove(at));
        let used_before = self.fleet.last_use(model);
        let attempt = std::panic::catch_unwind(AssertUnwindSafe(|| {
            if let Some((engine, held)) = self.on_cards(model, limits, of)? {
                return Ok((engine, held));
            }
            if let Some(Kept { parked, stamp }) = kept
                && let Ok(Some(held)) = self.config.store().hold(model)
                && stamp.is_some()
                && stamp == Stamp::of(&held.path)
            {
                let engine = parked.load(limits, changes).map_err(|error| self.failed(model, &error))?;
                tracing::info!(%model, seconds = began.elapsed().as_secs_f64(), "model loaded from memory");
                return Ok((engine, held));
            }
            let held = self.fetch(model)?;
            let engine = self.load_file(model, &held, limits)?;
            Ok((engine, held))
        }));
        let (engine, held) = attempt.unwrap_or_else(|_| {
            Err(Failed::Refused(format!("loading {model} failed inside the engine; see the node's log")))
        })?;
        // What is on cards takes nothing of the host's.
        let need = if engine.shares().is_empty() { engine.need().total() } else { 0 };
        Ok(Loaded { engine: Arc::new(engine), held, need, at: Instant::now(), used_before })
    }

    /// On the cards, where there are any and it fits; `None`: it runs on the CPU.
    fn on_cards(&self, model: &ModelId, limits: Limits, of: u64) -> Result<Option<(CandleEngine, Held)>, Failed> {
        let cards = self.cards_for(model)?;
        if cards.is_empty() {
            return Ok(None);
        }
        let held = self.fetch(model)?;
        let cards = self.cards_now(&cards);
        let load = |of| {
            let (changes, arena) = (self.fleet.changes().clone(), self.arena.clone());
            CandleEngine::load_on_cards(model.clone(), &held.path, &cards, of, limits, changes, arena)
        };
        let engine = {
            let mut noted = Noted::begin(self.config.store(), model);
            let before = self.free_of_each(&cards);
            let engine = match load(of) {
                Err(LoadError::NoLayout { .. }) if of > 1 => load(1),
                settled => settled,
            };
            if let Ok(engine) = &engine {
                noted.took = taken(engine.shares(), &cards, &before, &self.free_of_each(&cards));
            }
            engine
        };
        match engine {
            Ok(engine) => Ok(Some((engine, held))),
            Err(error @ (LoadError::NoLayout { .. } | LoadError::NotOnCards { .. } | LoadError::CardFull { .. }))
                if self.config.device == DeviceChoice::Auto =>
            {
                tracing::warn!(%model, reason = with_causes(&error), "not on a card: the model runs on the CPU");
                Ok(None)
            }
            Err(error) => Err(self.failed(model, &error)),
        }
    }

    /// What drivers call free, by [`Card::index`]; nothing where a pass of another model takes and gives memory meanwhile, or
    /// no driver counts.
    fn free_of_each(&self, cards: &[Card]) -> BTreeMap<usize, u64> {
        if !self.all().all(is_idle) {
            return BTreeMap::new();
        }
        let free =
            |card: &Card| Some((card.index, card.device.synchronize().ok().and_then(|()| free_of(&card.device))?));
        cards.iter().filter_map(free).collect()
    }

    /// From the disk; noted before and after, and measured where nothing else changes what the process holds.
    fn load_file(&self, model: &ModelId, held: &Held, limits: Limits) -> Result<CandleEngine, Failed> {
        let changes = self.fleet.changes().clone();
        let correction = self.correction(model);
        let mut noted = Noted::begin(self.config.store(), model);
        let is_quiet = || self.all().all(is_idle);
        let before = gpu::held_memory().filter(|_| is_quiet());
        let engine =
            CandleEngine::load_corrected(model.clone(), &held.path, limits, correction, changes, self.arena.clone());
        let took = match (before, gpu::held_memory().filter(|_| is_quiet()), &engine) {
            (Some(before), Some(after), Ok(engine)) => {
                Some(Took { predicted: engine.predicted(), took: after.saturating_sub(before) })
            }
            _ => None,
        };
        noted.took = took.map(|took| ("cpu".to_owned(), took)).into_iter().collect();
        engine.map_err(|error| self.failed(model, &error))
    }

    /// Thousandths that earlier loads took more of the host's memory than was predicted.
    pub(super) fn correction(&self, model: &ModelId) -> u64 {
        self.measured(model).and_then(|measured| measured.on("cpu")).map_or(0, Took::thousandths)
    }

    /// The cards, each with what earlier loads of this model took more there.
    pub(super) fn cards_for(&self, model: &ModelId) -> Result<Vec<Card>, Failed> {
        let mut cards = self.usable_cards()?.to_vec();
        if let Some(measured) = self.measured(model).filter(|_| !cards.is_empty()) {
            for card in &mut cards {
                card.correction = measured.on(&card.kept_as()).map_or(0, Took::thousandths);
            }
        }
        Ok(cards)
    }

    fn measured(&self, model: &ModelId) -> Option<Measured> {
        self.config.store().measured(model).unwrap_or_else(|error| {
            tracing::warn!(%model, reason = with_causes(&error), "what earlier loads took is not used");
            None
        })
    }

    pub(super) fn fetch(&self, model: &ModelId) -> Result<Held, Failed> {
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
pub(super) fn usable(device: DeviceChoice) -> Result<Vec<Card>, String> {
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

/// What a load took on each card that was asked before and after.
fn taken(
    shares: &[Share],
    cards: &[Card],
    before: &BTreeMap<usize, u64>,
    after: &BTreeMap<usize, u64>,
) -> Vec<(String, Took)> {
    let of = |share: &Share| {
        let bytes = before.get(&share.card)?.saturating_sub(*after.get(&share.card)?);
        let card = cards.iter().find(|card| card.index == share.card)?;
        Some((card.kept_as(), share.took(bytes)))
    };
    shares.iter().filter_map(of).collect()
}

/// A load under way, on disk: what is still there when this process is gone is a load that ended it. Struck out when this is
/// dropped, however that comes about.
struct Noted<'a> {
    store: Store,
    model: &'a ModelId,
    /// On each device where that was measured.
    took: Vec<(String, Took)>,
}

impl<'a> Noted<'a> {
    fn begin(store: Store, model: &'a ModelId) -> Self {
        told(model, store.load_begins(model));
        let noted = Self { store, model, took: Vec::new() };
        cfq_link::failpoint::hit("node.loading");
        noted
    }
}

impl Drop for Noted<'_> {
    fn drop(&mut self) {
        for (device, took) in &self.took {
            let (model, predicted, took) = (self.model, Bytes(took.predicted), Bytes(took.took));
            tracing::info!(%model, device, %predicted, %took, "load measured");
        }
        told(self.model, self.store.load_ends(self.model, &self.took));
    }
}

/// A model folder that only others may write keeps no notes.
fn told(model: &ModelId, written: Result<(), ModelError>) {
    if let Err(error) = written {
        tracing::debug!(%model, reason = with_causes(&error), "not noted");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_card_gave_is_told_where_it_was_asked_before_and_after() {
        let share = |card| Share { card, bytes: 1000, later: 300, weights: 400, correction: 0 };
        let free = |of: &[(usize, u64)]| of.iter().copied().collect::<BTreeMap<_, _>>();
        let card = |index, uuid: Option<&str>| Card {
            index,
            name: "a card".to_owned(),
            uuid: uuid.map(str::to_owned),
            device: candle_core::Device::Cpu,
            free: 5000,
            speed: 1.0,
            correction: 0,
        };
        let cards = [card(2, Some("GPU-c")), card(1, Some("GPU-b")), card(0, Some("GPU-a"))];
        let shares = [share(0), share(1), share(2)];
        let took = taken(&shares, &cards, &free(&[(0, 5000), (1, 5000)]), &free(&[(0, 4200), (2, 10)]));
        assert_eq!(took, [("GPU-a".to_owned(), Took { predicted: 400, took: 500 })]);
        let nameless = taken(&shares, &[card(0, None)], &free(&[(0, 5000)]), &free(&[(0, 4200)]));
        assert_eq!(nameless, [("cuda:0".to_owned(), Took { predicted: 400, took: 500 })]);
        assert_eq!(taken(&[], &cards, &free(&[(0, 5000)]), &free(&[(0, 1)])), []);
    }
}
