//! Attention over pages as one operation of candle's: the plain definition on the CPU, our own kernel on a card.
//!
//! The CPU's is for checking everything around the kernel on machines without a card, and the kernel against it.

use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor, WithDType};

use crate::engine::candle::card::pages::Pages;
use crate::engine::candle::card::pass::{Indices, Part, Pass};
use crate::engine::candle::kv::BLOCK;

/// What a layer's attention is like; see [`crate::engine::candle::attention::Sizes`].
#[derive(Debug, Clone, Copy)]
pub struct Kind {
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub scale: f32,
    pub cap: Option<f32>,
    pub window: Option<usize>,
}

/// Attention of a pass's rows in one layer.
pub struct Attend<'a> {
    pub kind: Kind,
    pub pass: &'a Pass,
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "a card's kernel reads it"))]
    pub indices: &'a Indices,
    /// No sequence is cut into stretches, which sum in another order.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "a card's kernel asks"))]
    pub exact: bool,
}

impl Attend<'_> {
    /// `queries` are (rows, heads, head dim), and so is the result; F32.
    pub fn over(&self, queries: &Tensor, pages: &Pages) -> Result<Tensor> {
        queries.apply_op3_no_bwd(&pages.keys, &pages.values, self)
    }

    fn on_cpu<T: WithDType>(&self, queries: &[f32], keys: &[T], values: &[T], read: impl Fn(T) -> f32) -> Vec<f32> {
        let Kind { heads, kv_heads, head_dim, scale, cap, window } = self.kind;
        let mut out = Vec::with_capacity(queries.len());
        let mut weights = Vec::new();
        for Part { row, new, table, past } in &self.pass.parts {
            for at in 0..*new {
                let position = past + at;
                let first = window.map_or(0, |window| (position + 1).saturating_sub(window));
                for head in 0..heads {
                    let vector = |of: usize| {
                        let block = self.pass.tables[table + of / BLOCK] as usize;
                        ((block * kv_heads + head / (heads / kv_heads)) * BLOCK + of % BLOCK) * head_dim
                    };
                    let query = &queries[((row + at) * heads + head) * head_dim..][..head_dim];
                    weights.clear();
                    weights.extend((first..=position).map(|of| {
                        let key = &keys[vector(of)..][..head_dim];
                        let score = query.iter().zip(key).map(|(q, k)| q * read(*k)).sum::<f32>() * scale;
                        cap.map_or(score, |cap| cap * (score / cap).tanh())
                    }));
                    let highest = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
                    weights.iter_mut().for_each(|weight| *weight = (*weight - highest).exp());
                    let total: f32 = weights.iter().sum();
                    let from = out.len();
                    out.resize(from + head_dim, 0.0);
                    for (of, weight) in (first..=position).zip(&weights) {
                        let value = &values[vector(of)..][..head_dim];
                        out[from..].iter_mut().zip(value).for_each(|(sum, value)| *sum += weight * read(*value));
                    }
                    out[from..].iter_mut().for_each(|sum| *sum /= total);
                }
            }
        }
        out
    }
}

/// The values a contiguous layout speaks of.
pub fn contiguous<'a, T>(all: &'a [T], layout: &Layout) -> Result<&'a [T]> {
    match layout.contiguous_offsets() {
        Some((from, to)) => Ok(&all[from..to]),
        None => candle_core::bail!("values that do not lie side by side"),
    }
}

impl CustomOp3 for Attend<'_> {
    fn name(&self) -> &'static str {
        "paged-attention"
    }

    fn cpu_fwd(
        &self,
        queries: &CpuStorage,
        layout: &Layout,
        keys: &CpuStorage,
        keys_layout: &Layout,
        values: &CpuStorage,
        values_layout: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        let queries = contiguous(queries.as_slice::<f32>()?, layout)?;
        let out = match (keys, values) {
            (CpuStorage::F32(keys), CpuStorage::F32(values)) => {
                let (keys, values) = (contiguous(keys, keys_layout)?, contiguous(values, values_layout)?);
                self.on_cpu(queries, keys, values, |value| value)
            }
            (CpuStorage::F16(keys), CpuStorage::F16(values)) => {
                let (keys, values) = (contiguous(keys, keys_layout)?, contiguous(values, values_layout)?);
                self.on_cpu(queries, keys, values, half::f16::to_f32)
            }
            _ => candle_core::bail!("pages are F32 or F16"),
        };
        Ok((CpuStorage::F32(out), layout.shape().clone()))
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        queries: &candle_core::CudaStorage,
        layout: &Layout,
        keys: &candle_core::CudaStorage,
        _: &Layout,
        values: &candle_core::CudaStorage,
        _: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        super::cuda::attend(self, queries, layout, keys, values)
    }
}
