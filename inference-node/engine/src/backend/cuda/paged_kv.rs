//! Keys and values on a device: one tensor each per layer, in pages of [`KV_BLOCK_TOKENS`] positions.
//!
//! All pages are allocated when the model is loaded, so that a lack of GPU memory fails the load and not a later pass.

use candle_core::{CpuStorage, DType, Device, InplaceOp2, Layout, Result, Tensor, WithDType};
use cfq_memory::BlockId;
use half::f16;

use crate::backend::cuda::pass::{Pass, PassIndices, contiguous};
use crate::kv::{BlockMemory, BlockValues, KV_BLOCK_TOKENS, KvShape};

/// KV pages of one layer; each tensor is (blocks, KV heads, [`KV_BLOCK_TOKENS`], head dim).
pub struct LayerPages {
    pub keys: Tensor,
    pub values: Tensor,
}

/// KV pages of all layers.
pub struct PagedKv {
    shape: KvShape,
    layers: Vec<LayerPages>,
}

impl PagedKv {
    /// Allocates `blocks` pages per layer; `devices` has one entry per layer.
    pub fn new(shape: KvShape, blocks: usize, dtype: DType, devices: &[Device]) -> Result<Self> {
        let zeros =
            |device: &Device| Tensor::zeros((blocks, shape.heads, KV_BLOCK_TOKENS, shape.head_dim), dtype, device);
        let layers = devices
            .iter()
            .map(|device| Ok(LayerPages { keys: zeros(device)?, values: zeros(device)? }))
            .collect::<Result<_>>()?;
        Ok(Self { shape, layers })
    }

    /// Pages of a layer.
    pub fn layer(&self, layer: usize) -> Result<&LayerPages> {
        self.layers.get(layer).ok_or_else(|| candle_core::Error::Msg(format!("the KV cache has no layer {layer}")))
    }

    /// Writes keys and values of the new positions of a pass, (rows, KV heads x head dim) each, as F32.
    pub fn write(
        &self,
        layer: usize,
        keys: &Tensor,
        values: &Tensor,
        pass: &Pass,
        indices: &PassIndices,
    ) -> Result<()> {
        let pages = self.layer(layer)?;
        let write = PagedWrite { pass, indices, shape: self.shape };
        pages.keys.inplace_op2(keys, &write)?;
        pages.values.inplace_op2(values, &write)
    }

    fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.layers.iter().flat_map(|pages| [&pages.keys, &pages.values])
    }
}

impl BlockMemory for PagedKv {
    fn prepare(&mut self, _: BlockId) {}

    /// Copies the whole block, not only the requested positions; the others are written before they are read.
    fn copy(&mut self, from: BlockId, to: BlockId, _: usize) -> Result<()> {
        if from == to {
            return Ok(());
        }
        for pages in self.tensors() {
            pages.slice_set(&pages.narrow(0, from.index(), 1)?.copy()?, 0, to.index())?;
        }
        Ok(())
    }

    fn read_block(&self, block: BlockId) -> Result<BlockValues> {
        let mut singles = Vec::new();
        let mut halves = Vec::new();
        for pages in self.tensors() {
            let page = pages.narrow(0, block.index(), 1)?.flatten_all()?;
            match page.dtype() {
                DType::F16 => halves.extend(page.to_vec1::<f16>()?.into_iter().map(f16::to_bits)),
                _ => singles.extend(page.to_vec1::<f32>()?),
            }
        }
        Ok(if halves.is_empty() { BlockValues::F32(singles) } else { BlockValues::Half(halves) })
    }

    fn write_block(&mut self, block: BlockId, values: &BlockValues) -> Result<()> {
        let (heads, head_dim) = (self.shape.heads, self.shape.head_dim);
        let (size, page) = (heads * KV_BLOCK_TOKENS * head_dim, (1, heads, KV_BLOCK_TOKENS, head_dim));
        let whole = 2 * self.layers.len() * size;
        let write = |at: usize, pages: &Tensor| -> Result<()> {
            let own = at * size..(at + 1) * size;
            let page = match (values, pages.dtype()) {
                (BlockValues::F32(all), DType::F32) if all.len() == whole => {
                    Tensor::from_slice(&all[own], page, pages.device())?
                }
                (BlockValues::Half(all), DType::F16) if all.len() == whole => {
                    let halves: Vec<f16> = all[own].iter().map(|bits| f16::from_bits(*bits)).collect();
                    Tensor::from_vec(halves, page, pages.device())?
                }
                _ => candle_core::bail!("the given block differs from this KV pool's blocks in number format or size"),
            };
            pages.slice_set(&page, 0, block.index())
        };
        self.tensors().enumerate().try_for_each(|(at, pages)| write(at, pages))
    }
}

/// The candle operation that writes new keys or values into their slots in the pages of one layer.
pub struct PagedWrite<'a> {
    pub pass: &'a Pass,
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "read by the CUDA kernel"))]
    pub indices: &'a PassIndices,
    pub shape: KvShape,
}

impl PagedWrite<'_> {
    fn on_cpu<T: WithDType>(&self, pages: &mut [T], rows: &[f32], to: impl Fn(f32) -> T) -> Result<()> {
        let KvShape { heads, head_dim, .. } = self.shape;
        for (slot, row) in self.pass.slots.iter().zip(rows.chunks_exact(heads * head_dim)) {
            let (block, position) = (*slot as usize / KV_BLOCK_TOKENS, *slot as usize % KV_BLOCK_TOKENS);
            for (head, vector) in row.chunks_exact(head_dim).enumerate() {
                let at = ((block * heads + head) * KV_BLOCK_TOKENS + position) * head_dim;
                pages[at..at + head_dim].iter_mut().zip(vector).for_each(|(place, value)| *place = to(*value));
            }
        }
        Ok(())
    }
}

impl InplaceOp2 for PagedWrite<'_> {
    fn name(&self) -> &'static str {
        "paged-write"
    }

    fn cpu_fwd(&self, pages: &mut CpuStorage, _: &Layout, rows: &CpuStorage, layout: &Layout) -> Result<()> {
        let rows = contiguous(rows.as_slice::<f32>()?, layout)?;
        match pages {
            CpuStorage::F32(pages) => self.on_cpu(pages, rows, |value| value),
            CpuStorage::F16(pages) => self.on_cpu(pages, rows, f16::from_f32),
            _ => candle_core::bail!("KV pages must be F32 or F16"),
        }
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        pages: &mut candle_core::CudaStorage,
        _: &Layout,
        rows: &candle_core::CudaStorage,
        layout: &Layout,
    ) -> Result<()> {
        super::kernels::write((self.pass, self.indices, self.shape), pages, rows, layout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::forward::BatchEntry;
    use crate::kv::{KvPool, SequenceKv};

    const SHAPE: KvShape = KvShape { layers: 2, heads: 2, head_dim: 4 };

    /// Fills the KV cache of a sequence. In layer l, every element of token t's key is t + l, and of its value -t + l.
    fn compute(pool: &mut KvPool<PagedKv>, tokens: &[u32]) -> SequenceKv {
        let mut kv = pool.begin(tokens, false, false);
        let rest = &tokens[kv.len()..];
        assert!(pool.grow(&mut kv, rest.len()));
        let pass = Pass::new(&[BatchEntry { kv: &kv, tokens: rest, scored: 0 }]).unwrap();
        let indices = pass.indices(1, &Device::Cpu).unwrap();
        for layer in 0..2 {
            let rows = |sign: f32| {
                let rows: Vec<f32> = rest.iter().flat_map(|t| [sign * *t as f32 + layer as f32; 8]).collect();
                Tensor::from_vec(rows, (rest.len(), 8), &Device::Cpu).unwrap()
            };
            pool.memory().write(layer, &rows(1.0), &rows(-1.0), &pass, &indices).unwrap();
        }
        pool.advance(&mut kv, tokens, rest.len());
        kv
    }

    fn key(pool: &KvPool<PagedKv>, kv: &SequenceKv, layer: usize, at: usize) -> f32 {
        let page =
            pool.memory().layer(layer).unwrap().keys.get(kv.block_table()[at / KV_BLOCK_TOKENS].index()).unwrap();
        let vectors = page.to_dtype(DType::F32).unwrap().to_vec3::<f32>().unwrap();
        vectors[1][at % KV_BLOCK_TOKENS][3]
    }

    #[test]
    fn prefixes_are_shared_and_partial_blocks_are_copied() {
        for dtype in [DType::F32, DType::F16] {
            let blocks = PagedKv::new(SHAPE, 8, dtype, &[Device::Cpu, Device::Cpu]).unwrap();
            let mut pool = KvPool::with_memory(blocks, 8);
            let old: Vec<u32> = (0..80).collect();
            let first = compute(&mut pool, &old);
            pool.end(first, &old);
            let again = compute(&mut pool, &old);
            for at in 0..80 {
                assert_eq!((key(&pool, &again, 0, at), key(&pool, &again, 1, at)), (at as f32, at as f32 + 1.0));
            }
        }
    }

    #[test]
    fn written_block_equals_the_block_that_was_read() {
        for dtype in [DType::F32, DType::F16] {
            let mut blocks = PagedKv::new(SHAPE, 4, dtype, &[Device::Cpu, Device::Cpu]).unwrap();
            let mut table = cfq_memory::BlockTable::new(4, KV_BLOCK_TOKENS);
            let [from, to] = [(); 2].map(|()| table.allocate().unwrap());
            for (at, pages) in blocks.tensors().enumerate() {
                let counted = Tensor::arange(at as f32, at as f32 + 256.0, &Device::Cpu).unwrap();
                let page = counted.to_dtype(dtype).unwrap().reshape((1, 2, KV_BLOCK_TOKENS, 4)).unwrap();
                pages.slice_set(&page, 0, from.index()).unwrap();
            }
            let out = blocks.read_block(from).unwrap();
            assert_ne!(blocks.read_block(to).unwrap(), out);
            blocks.write_block(to, &out).unwrap();
            assert_eq!(blocks.read_block(to).unwrap(), out);
            assert!(blocks.write_block(to, &BlockValues::F32(vec![0.0; 3])).is_err());
        }
    }
}
