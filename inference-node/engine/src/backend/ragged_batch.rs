//! Functions shared by our CPU and GPU forward passes: RoPE angles and scored rows of a batch, and sizes of the KV
//! pool.

use std::ops::Range;

use crate::backend::forward::BatchEntry;
use crate::kv::KvShape;
use crate::model::architecture::Architecture;

/// Cosines and sines that one RoPE applies to the rows of a batch, each (rows, pairs).
pub struct RopeAngles {
    pub cos: Vec<f32>,
    pub sin: Vec<f32>,
    /// Number of rotated pairs per head, which is the number of cosines (and of sines) per row.
    pub pairs: usize,
}

/// Computes the angles of the new positions of all entries. `rope` is an index into [`Architecture::ropes`]; in some
/// models, RoPE 0 has a second form for long sequences.
pub fn rope_angles(architecture: &Architecture, batch: &[BatchEntry<'_>], rope: usize) -> RopeAngles {
    let short = &architecture.ropes[rope];
    let (mut cos, mut sin) = (Vec::new(), Vec::new());
    for entry in batch {
        let long = architecture.long_rope.as_ref().filter(|_| entry.kv.long_context && rope == 0);
        let own = long.map_or(short, |long| &long.rope);
        for position in entry.kv.len()..entry.kv.len() + entry.tokens.len() {
            own.push_angles(position, &mut cos, &mut sin);
        }
    }
    RopeAngles { cos, sin, pairs: short.frequencies.len() }
}

/// For each entry, the range of rows whose logits are requested ([`BatchEntry::scored`]).
pub fn scored_rows(batch: &[BatchEntry<'_>]) -> impl Iterator<Item = Range<usize>> {
    let mut end = 0;
    batch.iter().map(move |entry| {
        end += entry.tokens.len();
        end - entry.scored.min(entry.tokens.len())..end
    })
}

/// Shape of the model's KV pool.
pub fn kv_shape(architecture: &Architecture) -> KvShape {
    let s = &architecture.shape;
    KvShape { layers: s.layers as usize, heads: s.kv_heads as usize, head_dim: s.head_dim as usize }
}

/// Longest sequence that uses the short-context RoPE, in tokens; `None` if the model uses the same RoPE for all
/// lengths.
pub fn original_context(architecture: &Architecture) -> Option<u64> {
    architecture.long_rope.as_ref().map(|long| long.original_context as u64)
}
