//! What a model takes on one card or several, before a byte of its weights is read.

use std::ops::RangeInclusive;

use cfq_memory::{CardRoom, DoesNotFit, Need, NoSplit, Parts, Shape, Split, Stack, WeightSum, fit, split};

use crate::engine::candle::architecture::Architecture;
use crate::engine::candle::batcher::{CHUNK_MOST, GUESSED_ROWS};
use crate::engine::candle::card::model::plan;
use crate::engine::candle::card::pass::QUERIES;
use crate::engine::candle::kv::BLOCK;
use crate::engine::candle::ledger::{LEAST_TOKENS, computed, vectors};
use crate::engine::candle::tensors::Part;
use crate::models::file::ModelFile;
use crate::models::header::HeaderError;

/// Bytes of one key or value on a card: F16.
pub const ELEMENT: u64 = 2;
/// Left alone on each card: the driver's context, cuBLAS and its workspace, the kernels' code, what the allocator rounds up.
/// Not measured on a card yet.
const RESERVE: u64 = 768 << 20;
/// A pool of this many tokens a sequence is worth no second card.
pub const ENOUGH_TOKENS: u64 = 8192;
/// Thread blocks that fill a card, see [`super::cuda`]; each has its part of a sequence cut into stretches.
const THREAD_BLOCKS: u64 = 1024;

/// Where a model goes.
#[derive(Debug, Clone, PartialEq)]
pub struct Layout {
    pub need: Need,
    pub split: Split,
}

#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum NoLayout {
    #[error(transparent)]
    Card(DoesNotFit),
    #[error(transparent)]
    Cards(NoSplit),
}

/// Lays a model out over cards. `halves` as in [`super::model::halves`].
pub fn layout(
    file: &ModelFile,
    architecture: &Architecture,
    rooms: &[CardRoom],
    sequences: u32,
    halves: bool,
) -> Result<Result<Layout, NoLayout>, HeaderError> {
    let (stack, parts) = stack(file, architecture, sequences, halves)?;
    let (tokens, enough) = wanted(architecture.shape.context, sequences);
    let split = match split(&stack, rooms, tokens.clone(), enough) {
        Ok(split) => split,
        Err(refused) => {
            let alone = <&[CardRoom; 1]>::try_from(rooms).ok();
            let of = |card: &CardRoom| Parts { correction: card.correction, ..parts };
            let one = alone.and_then(|[card]| fit(of(card), tokens, card.free).err());
            return Ok(Err(one.map_or(NoLayout::Cards(refused), NoLayout::Card)));
        }
    };
    let used = split.shares.len() as u64;
    let need = Need {
        weights: parts.weights.stored,
        correction: split.shares.iter().map(|share| share.correction).sum(),
        tables: parts.tables.saturating_mul(used),
        kv_per_token: parts.kv_per_token,
        // In whole blocks.
        kv_tokens: split.kv_tokens / BLOCK as u64 * BLOCK as u64,
        scratch: parts.activations.saturating_mul(used),
        loading: 0,
        reserve: parts.reserve.saturating_mul(used),
    };
    Ok(Ok(Layout { need, split }))
}

/// Tokens of the pool, and how many are worth no second card.
fn wanted(context: u64, sequences: u32) -> (RangeInclusive<u64>, u64) {
    let sequences = u64::from(sequences.max(1));
    let whole = |tokens: u64| tokens.next_multiple_of(BLOCK as u64);
    let most = context.saturating_mul(sequences).min(1 << 40);
    (whole(LEAST_TOKENS.min(context))..=whole(most), most.min(ENOUGH_TOKENS.saturating_mul(sequences)))
}

/// The same for a file of which only shape and size are known, as one of four bits has its matrices: what is not embedding
/// (Q4_K) or output (Q6_K) is spread over the layers, with all that is no matrix.
pub fn outlined(shape: &Shape, file: u64, rooms: &[CardRoom], sequences: u32) -> Result<Split, NoSplit> {
    let (tokens, enough) = wanted(shape.context, sequences);
    let end = |block: u64| shape.vocabulary.saturating_mul(shape.hidden).saturating_mul(block) / 256;
    let (first, last) = (end(144), end(210));
    let layer = file.saturating_sub(first.saturating_add(last)).div_ceil(shape.layers.max(1));
    let stack = Stack {
        layers: (0..shape.layers).map(|_| layer).collect(),
        first,
        last,
        each: activations(shape, u64::from(sequences.max(1))).saturating_add(RESERVE),
        kv_per_token: shape.kv_per_token(ELEMENT) / shape.layers.max(1),
    };
    split(&stack, rooms, tokens, enough)
}

/// What there is to lay out, and the same as one sum.
fn stack(
    file: &ModelFile,
    architecture: &Architecture,
    sequences: u32,
    halves: bool,
) -> Result<(Stack, Parts), HeaderError> {
    let no_kernel = || file.unsupported("its matrices have sizes no kernel takes");
    let held = |part: Part, layer: u64| -> Result<u64, HeaderError> {
        let facts = architecture.facts(file, part, layer);
        facts.and_then(|facts| plan(&facts, halves)).map(|placed| placed.stored).ok_or_else(no_kernel)
    };
    let shape = &architecture.shape;
    let mut layers = Vec::new();
    for layer in 0..shape.layers {
        let mut sum = 0u64;
        for part in architecture.matrix_parts() {
            sum = sum.checked_add(held(part, layer)?).ok_or_else(no_kernel)?;
        }
        layers.push(sum);
    }
    let embedding = held(Part::Embedding, 0)?;
    let output = if architecture.tied { 0 } else { held(Part::Output, 0)? };
    let stored = layers.iter().chain([&embedding, &output]).try_fold(0u64, |all, bytes| all.checked_add(*bytes));
    let activations = activations(&computed(architecture), u64::from(sequences.max(1)));
    let tables = vectors(file);
    let parts = Parts {
        weights: WeightSum { stored: stored.ok_or_else(no_kernel)?, transient: 0 },
        correction: 0,
        tables,
        kv_per_token: shape.kv_per_token(ELEMENT),
        activations,
        reserve: RESERVE,
    };
    let stack = Stack {
        layers,
        first: embedding,
        last: output,
        each: activations.saturating_add(RESERVE).saturating_add(tables),
        kv_per_token: shape.kv_per_token(ELEMENT) / shape.layers.max(1),
    };
    Ok((stack, parts))
}

/// Activations of the largest pass, and the sums of a sequence cut into stretches.
fn activations(shape: &Shape, sequences: u64) -> u64 {
    let (rows, scored) = (CHUNK_MOST as u64 + sequences, sequences + GUESSED_ROWS as u64);
    let stretches = THREAD_BLOCKS.saturating_mul(2 * QUERIES as u64).saturating_mul(shape.head_dim.saturating_add(2));
    shape.activations(rows, scored).saturating_add(stretches.saturating_mul(4))
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;
    use crate::engine::candle::card::model::{CardModel, Stage};
    use crate::engine::candle::parity::{FAMILIES, folder};

    fn card(free: u64) -> CardRoom {
        CardRoom { free, speed: 1.0, correction: 0 }
    }

    fn laid(family: &str, cards: &[CardRoom]) -> Result<Layout, NoLayout> {
        let file = ModelFile::read(&folder(family).join("model.gguf")).unwrap();
        layout(&file, &Architecture::read(&file).unwrap(), cards, 4, false).unwrap()
    }

    #[test]
    fn the_sum_is_what_the_cards_give() {
        let one = laid("llama", &[card(8 << 30)]).unwrap();
        let smallest = one.need.with_tokens(LEAST_TOKENS.min(512));
        assert_eq!(one.need.total(), one.split.shares[0].bytes);
        // Neither holds it alone.
        let raised = CardRoom { correction: 100, ..card(smallest.total() - 1) };
        let two = laid("llama", &[raised, raised]).unwrap();
        assert_eq!(two.split.shares.len(), 2);
        // But for what does not fill a block of the pool.
        let over = two.split.shares.iter().map(|share| share.bytes).sum::<u64>() - two.need.total();
        assert!(over < BLOCK as u64 * two.need.kv_per_token, "{over}");
        assert!(two.need.correction > two.need.weights / 11, "{}", two.need);
    }

    #[test]
    fn the_weights_are_what_is_loaded() {
        for family in FAMILIES {
            for path in [folder(family), folder(family).join("model.gguf")] {
                let file = ModelFile::read(&path).unwrap();
                let architecture = Architecture::read(&file).unwrap();
                let layout = layout(&file, &architecture, &[card(8 << 30)], 4, false).unwrap().unwrap();
                let stages = vec![Stage { device: Device::Cpu, layers: layout.split.shares[0].layers.clone() }];
                let model = CardModel::load(&file, architecture, stages).unwrap();
                assert_eq!(layout.need.weights, model.stored_bytes() as u64, "{}", path.display());
                assert!(layout.need.total() <= 8 << 30);
            }
        }
    }

    /// But for what the file has beside its weights: header and tokenizer.
    #[test]
    fn by_shape_and_size_a_model_takes_what_it_takes_by_its_header() {
        for family in ["llama", "qwen2"] {
            let file = ModelFile::read(&folder(family).join("model.gguf")).unwrap();
            let architecture = Architecture::read(&file).unwrap();
            let (shape, room) = (architecture.shape, [card(8 << 30)]);
            let by_header = layout(&file, &architecture, &room, 4, true).unwrap().unwrap();
            let by_shape = outlined(&shape, file.size(), &room, 4).unwrap();
            let beside = file.size() - by_header.need.weights - by_header.need.tables;
            let (header, outline) = (by_header.split.shares[0].bytes, by_shape.shares[0].bytes);
            assert_eq!(by_shape.kv_tokens, by_header.split.kv_tokens);
            assert!((header..=header + beside + shape.layers).contains(&outline), "{family}: {outline} for {header}");
        }
    }

    #[test]
    fn a_mixture_counts_the_rows_it_gathers() {
        let scratch = |family: &str, experts: bool| {
            let file = ModelFile::read(&folder(family).join("model.gguf")).unwrap();
            let mut architecture = Architecture::read(&file).unwrap();
            architecture.experts = architecture.experts.filter(|_| experts);
            let shape = computed(&architecture);
            (activations(&shape, 4), 4 * (CHUNK_MOST as u64 + 4) * shape.hidden)
        };
        let (with, gathered) = scratch("qwen3-moe", true);
        let (without, _) = scratch("qwen3-moe", false);
        // As gathered, as the expert said it, and weighed.
        assert!(with >= without + 3 * gathered, "{with} and {without}, a row of each {gathered}");
        assert_eq!(scratch("llama", true), scratch("llama", false));
    }

    #[test]
    fn a_card_that_is_too_small_is_refused_with_the_arithmetic() {
        let refused = laid("llama", &[card(512 << 20)]).unwrap_err().to_string();
        assert!(refused.contains("512.0 MiB are available") && refused.contains("reserve 768.0 MiB"), "{refused}");
        let refused = laid("llama", &[card(512 << 20), card(1 << 20)]).unwrap_err().to_string();
        assert!(refused.ends_with("the cards have 512.0 MiB and 1.0 MiB"), "{refused}");
    }
}
