//! Paged attention as a custom candle operation: a direct implementation on the CPU, our own kernel on a GPU. The kernel
//! (paged.cu) computes the softmax online, as flash attention does.
//!
//! The CPU implementation is the reference for tests of the kernel, and it allows the code around the kernel to be
//! tested on machines without a GPU.

use candle_core::{CpuStorage, CustomOp3, Layout, Result, Shape, Tensor, WithDType};

use crate::backend::cuda::paged_kv::LayerPages;
use crate::backend::cuda::pass::{AttentionShape, Pass, PassIndices, SequenceSpan, contiguous};
use crate::kv::KV_BLOCK_TOKENS;

/// Attention of all rows of a pass in one layer.
pub struct PagedAttention<'a> {
    pub shape: AttentionShape,
    pub pass: &'a Pass,
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "read by the CUDA kernel"))]
    pub indices: &'a PassIndices,
    /// If true, sequences are not split along the KV length, because a split changes the order of sums.
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "read by the CUDA kernel"))]
    pub batch_invariant: bool,
}

impl PagedAttention<'_> {
    /// Computes attention in F32: queries (rows, heads, head dim) -> outputs of the same shape.
    pub fn apply(&self, queries: &Tensor, pages: &LayerPages) -> Result<Tensor> {
        queries.apply_op3_no_bwd(&pages.keys, &pages.values, self)
    }

    fn on_cpu<T: WithDType>(&self, queries: &[f32], keys: &[T], values: &[T], read: impl Fn(T) -> f32) -> Vec<f32> {
        let AttentionShape { heads, kv_heads, head_dim, scale, softcap, window } = self.shape;
        let mut out = Vec::with_capacity(queries.len());
        let mut weights = Vec::new();
        for SequenceSpan { row, new, table, past } in &self.pass.sequences {
            for at in 0..*new {
                let position = past + at;
                let first = window.map_or(0, |window| (position + 1).saturating_sub(window));
                for head in 0..heads {
                    let vector = |of: usize| {
                        let block = self.pass.page_tables[table + of / KV_BLOCK_TOKENS] as usize;
                        ((block * kv_heads + head / (heads / kv_heads)) * KV_BLOCK_TOKENS + of % KV_BLOCK_TOKENS)
                            * head_dim
                    };
                    let query = &queries[((row + at) * heads + head) * head_dim..][..head_dim];
                    weights.clear();
                    weights.extend((first..=position).map(|of| {
                        let key = &keys[vector(of)..][..head_dim];
                        let score = query.iter().zip(key).map(|(q, k)| q * read(*k)).sum::<f32>() * scale;
                        softcap.map_or(score, |cap| cap * (score / cap).tanh())
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

impl CustomOp3 for PagedAttention<'_> {
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
            _ => candle_core::bail!("KV pages must be F32 or F16"),
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
        let Self { shape, pass, indices, batch_invariant } = self;
        super::kernels::attend((*shape, pass, indices, *batch_invariant), queries, layout, keys, values)
    }
}
