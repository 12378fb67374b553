//! The feed-forward part of a layer on candle tensors; see [`crate::backend::cpu::feed_forward`].
//!
//! Routing runs on the CPU, so each layer of a mixture waits for the router scores from the GPU. Experts to which no
//! row is routed are skipped, so their weights are not read.

use candle_core::{DType, Device, Result, Tensor};
use candle_nn::ops::silu;

use crate::backend::cpu::feed_forward::route;
use crate::backend::cuda::linear::CudaLinear;
use crate::backend::cuda::weights::{CudaWeightReader, columns};
use crate::model::architecture::Architecture;
use crate::model::tensors::TensorRole;

/// A layer's feed-forward network.
pub enum FeedForward {
    Dense(GatedMlp),
    Mixture(Mixture),
}

enum GateUp {
    Separate([CudaLinear; 2]),
    Fused(CudaLinear),
}

/// A gated MLP: down(activation(gate(x)) x up(x)).
pub struct GatedMlp {
    gate_up: GateUp,
    down: CudaLinear,
}

/// A mixture of experts.
pub struct Mixture {
    router: CudaLinear,
    experts: Vec<GatedMlp>,
    used: usize,
    normalized: bool,
}

impl FeedForward {
    pub fn load(reader: &mut CudaWeightReader<'_>, a: &Architecture, layer: u64, device: &Device) -> Result<Self> {
        let mut linear = |role: TensorRole| reader.read_linear(role, None, layer, device);
        let Some(experts) = a.experts else {
            let gate_up = if a.fused {
                GateUp::Fused(linear(TensorRole::GateUp)?)
            } else {
                GateUp::Separate([linear(TensorRole::Gate)?, linear(TensorRole::Up)?])
            };
            return Ok(Self::Dense(GatedMlp { gate_up, down: linear(TensorRole::Down)? }));
        };
        let mut expert = |at: u32| {
            let gate_up = GateUp::Separate([linear(TensorRole::ExpertGate(at))?, linear(TensorRole::ExpertUp(at))?]);
            Ok(GatedMlp { gate_up, down: linear(TensorRole::ExpertDown(at))? })
        };
        let all = (0..experts.count).map(&mut expert).collect::<Result<_>>()?;
        Ok(Self::Mixture(Mixture {
            experts: all,
            router: linear(TensorRole::Router)?,
            used: experts.per_token as usize,
            normalized: experts.normalized,
        }))
    }

    pub fn linears(&self) -> Vec<&CudaLinear> {
        match self {
            Self::Dense(mlp) => mlp.linears().collect(),
            Self::Mixture(mixture) => {
                mixture.experts.iter().flat_map(GatedMlp::linears).chain([&mixture.router]).collect()
            }
        }
    }

    /// Computes the feed-forward network for n tokens: (n, hidden) -> (n, hidden).
    pub fn forward(&self, x: &Tensor, a: &Architecture, batch_invariant: bool) -> Result<Tensor> {
        match self {
            Self::Dense(mlp) => mlp.forward(x, a, batch_invariant),
            Self::Mixture(mixture) => mixture.forward(x, a, batch_invariant),
        }
    }
}

impl GatedMlp {
    fn linears(&self) -> impl Iterator<Item = &CudaLinear> {
        let gate_up = match &self.gate_up {
            GateUp::Separate(two) => two.as_slice(),
            GateUp::Fused(one) => std::slice::from_ref(one),
        };
        gate_up.iter().chain([&self.down])
    }

    fn forward(&self, x: &Tensor, a: &Architecture, batch_invariant: bool) -> Result<Tensor> {
        let width = a.shape.feed_forward as usize;
        let [gate, up] = match &self.gate_up {
            GateUp::Separate([gate, up]) => [gate.forward(x, batch_invariant)?, up.forward(x, batch_invariant)?],
            GateUp::Fused(both) => {
                let both = both.forward(x, batch_invariant)?;
                [columns(&both, 0, width)?, columns(&both, width, width)?]
            }
        };
        // candle's GELU is the tanh approximation.
        let gate = if a.gelu { gate.gelu()? } else { silu(&gate)? };
        self.down.forward(&(gate * up)?, batch_invariant)
    }
}

impl Mixture {
    fn forward(&self, x: &Tensor, a: &Architecture, batch_invariant: bool) -> Result<Tensor> {
        let scores: Vec<Vec<f32>> = self.router.forward(x, batch_invariant)?.to_dtype(DType::F32)?.to_vec2()?;
        // For each expert, the rows routed to it, with their routing weights.
        let mut routed = vec![(Vec::new(), Vec::new()); self.experts.len()];
        for (row, scores) in (0u32..).zip(&scores) {
            for (expert, weight) in route(scores, self.used, self.normalized) {
                routed[expert].0.push(row);
                routed[expert].1.push(weight);
            }
        }
        let mut out = x.zeros_like()?;
        for (expert, (rows, weights)) in self.experts.iter().zip(routed).filter(|(_, (rows, _))| !rows.is_empty()) {
            let count = rows.len();
            let rows = Tensor::from_vec(rows, count, x.device())?;
            let weights = Tensor::from_vec(weights, (count, 1), x.device())?;
            let results = expert.forward(&x.index_select(&rows, 0)?, a, batch_invariant)?.broadcast_mul(&weights)?;
            out = out.index_add(&rows, &results, 0)?;
        }
        Ok(out)
    }
}
