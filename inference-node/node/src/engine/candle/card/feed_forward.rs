//! As [`crate::engine::candle::feed_forward`], over tensors of a device.
//!
//! Which rows go to which expert is decided on the CPU, so each layer of a mixture waits for its router's scores to come
//! from the card. The weights of experts that no row goes to are not read.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::ops::silu;

use crate::engine::candle::architecture::Architecture;
use crate::engine::candle::card::linear::CardLinear;
use crate::engine::candle::card::model::{Loading, columns};
use crate::engine::candle::feed_forward::choose;
use crate::engine::candle::tensors::Part;

pub enum FeedForward {
    Whole(Block),
    Mixture(Mixture),
}

enum GateUp {
    Apart([CardLinear; 2]),
    Fused(CardLinear),
}

pub struct Block {
    gate_up: GateUp,
    down: CardLinear,
}

pub struct Mixture {
    router: CardLinear,
    experts: Vec<Block>,
    used: usize,
    normalised: bool,
}

impl FeedForward {
    pub fn load(loading: &mut Loading<'_>, a: &Architecture, layer: u64, device: &Device) -> Result<Self> {
        let mut linear = |part: Part| loading.linear(part, None, layer, device);
        let Some(experts) = a.experts else {
            let gate_up = if a.fused {
                GateUp::Fused(linear(Part::GateUp)?)
            } else {
                GateUp::Apart([linear(Part::Gate)?, linear(Part::Up)?])
            };
            return Ok(Self::Whole(Block { gate_up, down: linear(Part::Down)? }));
        };
        let mut expert = |at: u32| {
            let gate_up = GateUp::Apart([linear(Part::ExpertGate(at))?, linear(Part::ExpertUp(at))?]);
            Ok(Block { gate_up, down: linear(Part::ExpertDown(at))? })
        };
        let all = (0..experts.count).map(&mut expert).collect::<Result<_>>()?;
        Ok(Self::Mixture(Mixture {
            experts: all,
            router: linear(Part::Router)?,
            used: experts.used as usize,
            normalised: experts.normalised,
        }))
    }

    pub fn linears(&self) -> Vec<&CardLinear> {
        match self {
            Self::Whole(block) => block.linears().collect(),
            Self::Mixture(mixture) => {
                mixture.experts.iter().flat_map(Block::linears).chain([&mixture.router]).collect()
            }
        }
    }

    /// (n, hidden) -> (n, hidden).
    pub fn forward(&self, x: &Tensor, a: &Architecture, exact: bool) -> Result<Tensor> {
        match self {
            Self::Whole(block) => block.forward(x, a, exact),
            Self::Mixture(mixture) => mixture.forward(x, a, exact),
        }
    }
}

impl Block {
    fn linears(&self) -> impl Iterator<Item = &CardLinear> {
        let gate_up = match &self.gate_up {
            GateUp::Apart(two) => two.as_slice(),
            GateUp::Fused(one) => std::slice::from_ref(one),
        };
        gate_up.iter().chain([&self.down])
    }

    fn forward(&self, x: &Tensor, a: &Architecture, exact: bool) -> Result<Tensor> {
        let width = a.shape.feed_forward as usize;
        let [gate, up] = match &self.gate_up {
            GateUp::Apart([gate, up]) => [gate.forward(x, exact)?, up.forward(x, exact)?],
            GateUp::Fused(both) => {
                let both = both.forward(x, exact)?;
                [columns(&both, 0, width)?, columns(&both, width, width)?]
            }
        };
        // candle's GELU is the tanh approximation.
        let gate = if a.gelu { gate.gelu()? } else { silu(&gate)? };
        self.down.forward(&(gate * up)?, exact)
    }
}

impl Mixture {
    fn forward(&self, x: &Tensor, a: &Architecture, exact: bool) -> Result<Tensor> {
        let scores: Vec<Vec<f32>> = self.router.forward(x, exact)?.to_dtype(DType::F32)?.to_vec2()?;
        let mut turns = vec![(Vec::new(), Vec::new()); self.experts.len()];
        for (row, scores) in (0u32..).zip(&scores) {
            for (expert, share) in choose(scores, self.used, self.normalised) {
                turns[expert].0.push(row);
                turns[expert].1.push(share);
            }
        }
        let mut out = x.zeros_like()?;
        for (expert, (rows, shares)) in self.experts.iter().zip(turns).filter(|(_, (rows, _))| !rows.is_empty()) {
            let count = rows.len();
            let rows = Tensor::from_vec(rows, count, x.device())?;
            let shares = Tensor::from_vec(shares, (count, 1), x.device())?;
            let said = expert.forward(&x.index_select(&rows, 0)?, a, exact)?.broadcast_mul(&shares)?;
            out = out.index_add(&rows, &said, 0)?;
        }
        Ok(out)
    }
}
