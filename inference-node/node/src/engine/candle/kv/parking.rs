//! Keys and values in host memory, of blocks that a pool had no room for.
//!
//! A node has one [`Arena`]; every pool parks there what it evicts, and looks there when a sequence begins, before it
//! computes anything again. Where exactness is promised (F32 models, and sequences that asked to be `deterministic`)
//! values are kept as they are; those of others in fewer bytes, where that is asked for. One block at a time is on its way and in
//! neither place's account.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cfq_memory::{Beginning, Kin, Parked, Place};
use half::f16;
use half::slice::HalfFloatSliceExt;
use serde::{Deserialize, Serialize};

use crate::engine::candle::kv::BLOCK;
use crate::engine::candle::kv::memory::Values;

/// How values are kept where bits do not matter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ParkedAs {
    /// As they are. The default: two bytes a value already changed texts of a small model (docs/benchmarks.md).
    #[default]
    Exact,
    F16,
    /// 8 bits, with a scale for every 32 values.
    Q8,
}

/// Values that share a scale.
const SCALED: usize = 32;

/// A block's values as they are kept.
#[derive(Debug, Clone)]
enum Packed {
    AsTheyWere(Values),
    F16(Vec<f16>),
    Q8 { scales: Vec<f32>, values: Vec<i8> },
}

impl Packed {
    fn new(values: Values, how: ParkedAs) -> Self {
        let (Values::F32(plain), ParkedAs::F16 | ParkedAs::Q8) = (&values, how) else {
            return Self::AsTheyWere(values);
        };
        // What two bytes cannot say is kept whole; so is what is no number, to look the same again.
        if plain.iter().any(|value| value.abs() > f16::MAX.to_f32() || value.is_nan()) {
            return Self::AsTheyWere(values);
        }
        if how == ParkedAs::F16 {
            let mut narrow = vec![f16::ZERO; plain.len()];
            narrow.convert_from_f32_slice(plain);
            return Self::F16(narrow);
        }
        let (mut scales, mut narrow) = (Vec::new(), Vec::with_capacity(plain.len()));
        for group in plain.chunks(SCALED) {
            let scale = group.iter().fold(0.0f32, |most, value| most.max(value.abs())) / 127.0;
            let inverse = if scale > 0.0 { 1.0 / scale } else { 0.0 };
            scales.push(scale);
            narrow.extend(group.iter().map(|value| (value * inverse).round() as i8));
        }
        Self::Q8 { scales, values: narrow }
    }

    fn unpack(self) -> Values {
        match self {
            Self::AsTheyWere(values) => values,
            Self::F16(narrow) => {
                let mut plain = vec![0.0; narrow.len()];
                narrow.convert_to_f32_slice(&mut plain);
                Values::F32(plain)
            }
            Self::Q8 { scales, values } => {
                let groups = values.chunks(SCALED).zip(scales);
                Values::F32(
                    groups.flat_map(|(group, scale)| group.iter().map(move |v| f32::from(*v) * scale)).collect(),
                )
            }
        }
    }

    fn bytes(&self) -> u64 {
        let bytes = match self {
            Self::AsTheyWere(Values::F32(values)) => size_of_val(&values[..]),
            Self::AsTheyWere(Values::Half(values)) => size_of_val(&values[..]),
            Self::F16(values) => size_of_val(&values[..]),
            Self::Q8 { scales, values } => size_of_val(&scales[..]) + size_of_val(&values[..]),
        };
        bytes as u64
    }
}

/// The node's room for parked KV.
#[derive(Debug)]
pub struct Arena {
    parked: Mutex<Parked<Packed>>,
    how: ParkedAs,
}

impl Arena {
    /// Room for `bytes`; `None` for none.
    pub fn new(bytes: u64, how: ParkedAs) -> Option<Arc<Self>> {
        (bytes > 0).then(|| Arc::new(Self { parked: Mutex::new(Parked::new(bytes, BLOCK)), how }))
    }

    fn lock(&self) -> MutexGuard<'_, Parked<Packed>> {
        self.parked.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn capacity(&self) -> u64 {
        self.lock().capacity()
    }

    /// Bytes taken.
    pub fn bytes(&self) -> u64 {
        self.lock().bytes()
    }
}

/// One pool's way to the arena.
#[derive(Debug, Clone)]
pub struct Parking {
    arena: Arc<Arena>,
    /// Everything that keys and values depend on besides tokens and salt.
    model: Arc<str>,
    /// Bits matter whatever a sequence asked for.
    exact: bool,
}

impl Parking {
    pub fn new(arena: Arc<Arena>, model: &str, exact: bool) -> Self {
        Self { arena, model: model.into(), exact }
    }

    /// Tokens parked of this model.
    pub fn tokens(&self) -> u64 {
        self.arena.lock().tokens(&self.model)
    }

    fn kin(&self, salt: u8) -> Kin {
        Kin { model: self.model.clone(), salt }
    }

    /// Keeps what `values` gives for the block at the end of `beginning`, which is not asked if that is here already.
    pub(super) fn park(
        &self,
        beginning: &Beginning,
        exact: bool,
        values: impl FnOnce() -> candle_core::Result<Values>,
    ) {
        let kin = self.kin(beginning.salt);
        if self.arena.lock().refresh(&kin, &beginning.tokens) {
            return;
        }
        // Copied and packed without the lock: other models' pools need not wait for it.
        let how = if exact || self.exact { ParkedAs::Exact } else { self.arena.how };
        match values() {
            Ok(values) => {
                let packed = Packed::new(values, how);
                let bytes = packed.bytes();
                self.arena.lock().park(&kin, &beginning.tokens, packed, bytes);
            }
            Err(error) => tracing::warn!(%error, "keys and values cannot be parked; they are lost"),
        }
    }

    /// Where the blocks after `tokens`, which are whole ones, would be.
    pub(super) fn at(&self, salt: u8, tokens: &[u32]) -> Option<Place> {
        self.arena.lock().at(&self.kin(salt), tokens)
    }

    pub(super) fn holds(&self, place: Place, tokens: &[u32]) -> bool {
        self.arena.lock().partly(place, tokens).is_some_and(|(count, _)| count == BLOCK)
    }

    /// The values of the block of `tokens` after `place`, which are gone from here.
    pub(super) fn take(&self, place: Place, tokens: &[u32]) -> Option<(Place, Values)> {
        let (place, packed) = self.arena.lock().take(place, tokens)?;
        Some((place, packed.unpack()))
    }

    /// Values of a block after `place` of which at least `least` positions are those of `tokens`, and how many.
    pub(super) fn partly(&self, place: Place, tokens: &[u32], least: usize) -> Option<(usize, Values)> {
        let arena = self.arena.lock();
        let (count, packed) = arena.partly(place, tokens).filter(|(count, _)| *count >= least)?;
        let packed = packed.clone();
        drop(arena);
        Some((count, packed.unpack()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plain() -> Vec<f32> {
        (0..1000).map(|i| ((i * 37 % 101) as f32 - 50.0) * 0.37).collect()
    }

    #[test]
    fn values_come_back_as_they_were_or_as_near_as_their_bytes_allow() {
        let largest = plain().iter().fold(0.0f32, |a, b| a.max(b.abs()));
        for (how, bytes, off) in
            [(ParkedAs::Exact, 4000, 0.0), (ParkedAs::F16, 2000, 1.0 / 2048.0), (ParkedAs::Q8, 1128, 1.0 / 253.0)]
        {
            let packed = Packed::new(Values::F32(plain()), how);
            assert_eq!(packed.bytes(), bytes);
            let Values::F32(back) = packed.unpack() else { panic!("{how:?}") };
            let far = plain().iter().zip(&back).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(far <= off * largest, "{how:?}: {far}");
            if how == ParkedAs::F16 {
                // To and fro again and again does not wear them down.
                assert_eq!(Packed::new(Values::F32(back.clone()), how).unpack(), Values::F32(back));
            }
        }
    }

    #[test]
    fn what_two_bytes_cannot_say_is_kept_whole() {
        for strange in [70_000.0, f32::INFINITY, f32::NEG_INFINITY] {
            for how in [ParkedAs::F16, ParkedAs::Q8] {
                let values = Values::F32([plain(), vec![strange]].concat());
                assert_eq!(Packed::new(values.clone(), how).unpack(), values);
            }
        }
        let half = Values::Half(vec![1, 2, 3]);
        assert_eq!(Packed::new(half.clone(), ParkedAs::Q8).unpack(), half);
    }
}
