//! A model onto cards: laid out, loaded, its pool taken, or refused with the sum.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use candle_core::DType;
use cfq_memory::CardRoom;
use cfq_proto::model::ModelId;

use crate::engine::candle::architecture::Architecture;
use crate::engine::candle::card::device::{Card, free_of, is_out_of_memory};
use crate::engine::candle::card::ledger::{Layout, layout};
use crate::engine::candle::card::model::{CardModel, Stage, halves};
use crate::engine::candle::kv::BLOCK;
use crate::engine::candle::others::Other;
use crate::engine::candle::{Arena, CandleEngine, Changes, Limits, LoadError, Loaded, Need, On, Opened};
use crate::models::Took;
use crate::models::file::ModelFile;

/// What one card gives a model, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Share {
    /// [`Card::index`].
    pub card: usize,
    /// All of it, as counted.
    pub bytes: u64,
    /// Of that, what the load does not take: only passes do, and the driver.
    pub later: u64,
    /// Of that, the weights.
    pub weights: u64,
    /// Of that, what earlier loads took more than those.
    pub correction: u64,
}

impl Share {
    /// What of `bytes` that went with a load was for the weights, beside what was predicted for them: tables and pool are
    /// taken in one piece each and are what they are.
    pub fn took(&self, bytes: u64) -> Took {
        let beside = self.bytes.saturating_sub(self.later + self.weights + self.correction);
        Took { predicted: self.weights, took: bytes.saturating_sub(beside) }
    }
}

/// Where a build for cards would put the model on cards with such rooms, without opening one. `cards`: as they are named in
/// a refusal.
pub fn fit_on_cards(path: &Path, cards: &str, rooms: &[CardRoom], max_sequences: u32) -> Result<Layout, LoadError> {
    let (file, architecture) = read(path)?;
    laid_out(&file, &architecture, cards, rooms, max_sequences, true)
}

/// What a model would take on these cards as they are given.
pub fn need_on_cards(path: &Path, cards: &[Card], limits: Limits) -> Result<Need, LoadError> {
    let (file, architecture) = read(path)?;
    Ok(laid_on(&file, &architecture, cards, 1, limits)?.need)
}

fn read(path: &Path) -> Result<(ModelFile, Architecture), LoadError> {
    let file = ModelFile::read(path)?;
    if Other::of(&file)?.is_some() {
        return Err(LoadError::NotOnCards { path: path.to_owned() });
    }
    let architecture = Architecture::read(&file)?;
    Ok((file, architecture))
}

fn precise(cards: &[Card]) -> bool {
    !cards.iter().all(|card| halves(&card.device))
}

fn named<'a>(cards: impl Iterator<Item = &'a Card>) -> String {
    cards.map(Card::id).collect::<Vec<_>>().join(",")
}

fn laid_on(
    file: &ModelFile,
    architecture: &Architecture,
    cards: &[Card],
    of: u64,
    limits: Limits,
) -> Result<Layout, LoadError> {
    let rooms: Vec<CardRoom> = cards.iter().map(|card| card.room(of)).collect();
    laid_out(file, architecture, &named(cards.iter()), &rooms, limits.max_sequences, !precise(cards))
}

/// The one sum for a card, whoever asks. `halves`: these are cards, and not candle's CPU device.
fn laid_out(
    file: &ModelFile,
    architecture: &Architecture,
    cards: &str,
    rooms: &[CardRoom],
    sequences: u32,
    halves: bool,
) -> Result<Layout, LoadError> {
    let dim = architecture.shape.head_dim;
    if halves && dim > HEAD_DIM_MOST {
        let what = format!("its heads have {dim} values, and the cards' kernel takes {HEAD_DIM_MOST} at most");
        return Err(file.unsupported(what).into());
    }
    layout(file, architecture, rooms, sequences, halves)?.map_err(|source| LoadError::NoLayout {
        path: file.path().to_owned(),
        cards: cards.to_owned(),
        source: Box::new(source),
    })
}

impl CandleEngine {
    /// Loads the file onto the cards it fits best, of whose free memory it may take one part in `of`: what a card says it has
    /// free now, and no more than [`Card::free`]. `limits.memory` is the host's and does not bind it.
    pub fn load_on_cards(
        model: ModelId,
        path: &Path,
        cards: &[Card],
        of: u64,
        limits: Limits,
        changes: Arc<Changes>,
        arena: Option<Arc<Arena>>,
    ) -> Result<Self, LoadError> {
        let began = Instant::now();
        let (file, architecture) = read(path)?;
        let opened = Opened::read(file, architecture.shape.vocabulary, began)?;
        let now =
            |card: &Card| Card { free: free_of(&card.device).unwrap_or(card.free).min(card.free), ..card.clone() };
        let cards: Vec<Card> = cards.iter().map(now).collect();
        let laid = laid_on(&opened.file, &architecture, &cards, of, limits)?;
        let device = named(laid.split.shares.iter().filter_map(|share| cards.get(share.card)));
        tracing::info!(%model, device, need = %laid.need, "loading model");
        let failed = |source: candle_core::Error| {
            let path = path.to_owned();
            if is_out_of_memory(&source) {
                LoadError::CardFull { path, cards: device.clone(), need: Box::new(laid.need), source: Box::new(source) }
            } else {
                LoadError::Weights { path, source }
            }
        };
        let stage = |share: &cfq_memory::CardShare| {
            Some(Stage { device: cards.get(share.card)?.device.clone(), layers: share.layers.clone() })
        };
        let stages = laid.split.shares.iter().filter_map(stage).collect();
        let network = CardModel::load(&opened.file, architecture, stages).map_err(failed)?;
        let precision = if precise(&cards) { DType::F32 } else { DType::F16 };
        let pool = network.pool(laid.need.kv_tokens as usize / BLOCK, precision).map_err(failed)?;
        let held = network.stored_bytes() as u64;
        let later = (laid.need.scratch + laid.need.reserve) / (laid.split.shares.len() as u64).max(1);
        let share = |share: &cfq_memory::CardShare| {
            let &cfq_memory::CardShare { bytes, weights, correction, .. } = share;
            Some(Share { card: cards.get(share.card)?.index, bytes, later, weights, correction })
        };
        let shares = laid.split.shares.iter().filter_map(share).collect();
        let (need, on) = (laid.need, On { device: device.clone(), shares });
        let loaded = Loaded { network, pool, need, held, plain: false, on, sum: None };
        Self::start(model, opened, loaded, limits, changes, arena).map_err(|error| match error {
            // The first pass has scratch memory to find.
            LoadError::Weights { source, .. } => failed(source),
            other => other,
        })
    }
}

/// Largest vector of a head that the kernel's registers hold.
const HEAD_DIM_MOST: u64 = 256;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_load_took_is_held_against_its_weights_alone() {
        let share = Share { card: 0, bytes: 1000, later: 300, weights: 400, correction: 40 };
        assert_eq!(share.took(720), Took { predicted: 400, took: 460 });
        assert_eq!(share.took(720).thousandths(), 150);
        assert_eq!(share.took(0), Took { predicted: 400, took: 0 });
    }
}
