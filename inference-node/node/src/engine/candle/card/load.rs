//! A model onto cards: laid out, loaded, its pool taken, or refused with the sum.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use candle_core::DType;
use cfq_proto::model::ModelId;

use crate::engine::candle::architecture::Architecture;
use crate::engine::candle::card::device::{Card, free_of, is_out_of_memory};
use crate::engine::candle::card::ledger::{Layout, layout};
use crate::engine::candle::card::model::{CardModel, Stage, halves};
use crate::engine::candle::kv::BLOCK;
use crate::engine::candle::others::Other;
use crate::engine::candle::{Arena, CandleEngine, Changes, Limits, LoadError, Loaded, Need, On, Opened};
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
}

/// What a model would take on these cards as they are given.
pub fn need_on_cards(path: &Path, cards: &[Card], limits: Limits) -> Result<Need, LoadError> {
    let (file, architecture) = read(path)?;
    Ok(laid_out(&file, &architecture, cards, 1, limits)?.need)
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

fn laid_out(
    file: &ModelFile,
    architecture: &Architecture,
    cards: &[Card],
    of: u64,
    limits: Limits,
) -> Result<Layout, LoadError> {
    let dim = architecture.shape.head_dim;
    if !cards.iter().all(|card| card.device.is_cpu()) && dim > HEAD_DIM_MOST {
        let what = format!("its heads have {dim} values, and the cards' kernel takes {HEAD_DIM_MOST} at most");
        return Err(file.unsupported(what).into());
    }
    layout(file, architecture, cards, of, limits.max_sequences, !precise(cards))?.map_err(|source| {
        LoadError::NoLayout { path: file.path().to_owned(), cards: named(cards.iter()), source: Box::new(source) }
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
        let laid = laid_out(&opened.file, &architecture, &cards, of, limits)?;
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
            Some(Share { card: cards.get(share.card)?.index, bytes: share.bytes, later })
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
