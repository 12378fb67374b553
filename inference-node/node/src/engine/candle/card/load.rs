//! A model onto cards: laid out, loaded, its pool taken, or refused with the sum.

use std::path::Path;
use std::sync::Arc;

use candle_core::DType;
use cfq_proto::model::ModelId;

use crate::engine::candle::card::device::{Card, is_out_of_memory, memory};
use crate::engine::candle::card::ledger::layout;
use crate::engine::candle::card::model::{CardModel, Stage, halves};
use crate::engine::candle::kv::BLOCK;
use crate::engine::candle::{Arena, CandleEngine, Changes, Limits, LoadError, Loaded, Opened};

impl CandleEngine {
    /// Loads the file onto the cards it fits best, of whose free memory it may take one part in `of`. `limits.memory` is the
    /// host's and does not bind it.
    pub fn load_on_cards(
        model: ModelId,
        path: &Path,
        cards: &[Card],
        of: u64,
        limits: Limits,
        changes: Arc<Changes>,
        arena: Option<Arc<Arena>>,
    ) -> Result<Self, LoadError> {
        let opened = Opened::read(path)?;
        let now = |card: &Card| Card { free: memory(&card.device).map_or(card.free, |(free, _)| free), ..card.clone() };
        let cards: Vec<Card> = cards.iter().map(now).collect();
        let halves = cards.iter().all(|card| halves(&card.device));
        let named = |cards: &mut dyn Iterator<Item = &Card>| cards.map(Card::id).collect::<Vec<_>>().join(",");
        if !cards.iter().all(|card| card.device.is_cpu()) && opened.architecture.shape.head_dim > HEAD_DIM_MOST {
            let dim = opened.architecture.shape.head_dim;
            let what = format!("its heads have {dim} values, and the cards' kernel takes {HEAD_DIM_MOST} at most");
            return Err(opened.file.unsupported(what).into());
        }
        let laid = layout(&opened.file, &opened.architecture, &cards, of, limits.max_sequences, halves)?;
        let laid = laid.map_err(|source| {
            let cards = named(&mut cards.iter());
            LoadError::NoLayout { path: path.to_owned(), cards, source: Box::new(source) }
        })?;
        let device = named(&mut laid.split.shares.iter().filter_map(|share| cards.get(share.card)));
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
        let network = CardModel::load(&opened.file, opened.architecture.clone(), stages).map_err(failed)?;
        let precision = if halves { DType::F16 } else { DType::F32 };
        let pool = network.pool(laid.need.kv_tokens as usize / BLOCK, precision).map_err(failed)?;
        let held = network.stored_bytes() as u64;
        let loaded = Loaded { network, pool, need: laid.need, held, plain: false, device: device.clone(), sum: None };
        Self::start(model, opened, loaded, limits, changes, arena)
    }
}

/// Largest vector of a head that the kernel's registers hold.
const HEAD_DIM_MOST: u64 = 256;
