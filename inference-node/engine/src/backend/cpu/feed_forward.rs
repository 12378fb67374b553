//! The feed-forward part of a layer: one gated MLP for all tokens, or a mixture of experts with top-k routing.
//!
//! In a mixture, each expert runs once per pass, over all tokens that are routed to it. The experts run in the order of
//! their indices, so the outputs for a token are always added in the same order, whatever other tokens are in the pass.
//! Qwen3's mixtures: <https://arxiv.org/abs/2505.09388>.

use candle_core::Result;

use crate::backend::cpu::elementwise::{activate, columns};
use crate::backend::cpu::linear::{Linear, forward_shared};
use crate::backend::cpu::weights::WeightReader;
use crate::model::architecture::Architecture;
use crate::model::tensors::TensorRole;

/// A layer's feed-forward network.
pub enum FeedForward {
    Dense(GatedMlp),
    Mixture(Mixture),
}

/// Gate and up projections: one matrix or two, as the file stores them.
enum GateUp {
    Separate([Linear; 2]),
    Fused(Linear),
}

/// A gated MLP: down(activation(gate(x)) x up(x)).
pub struct GatedMlp {
    gate_up: GateUp,
    down: Linear,
}

/// A mixture of experts.
pub struct Mixture {
    router: Linear,
    experts: Vec<GatedMlp>,
    /// Number of experts per token.
    used: usize,
    /// Whether the routing weights of a token's experts add up to one.
    normalized: bool,
}

impl FeedForward {
    pub fn load(weights: &mut WeightReader<'_>, a: &Architecture, layer: u64) -> Result<Self> {
        let Some(experts) = a.experts else {
            let gate_up = if a.fused {
                GateUp::Fused(weights.read_linear(TensorRole::GateUp, None, layer)?)
            } else {
                GateUp::Separate([
                    weights.read_linear(TensorRole::Gate, None, layer)?,
                    weights.read_linear(TensorRole::Up, None, layer)?,
                ])
            };
            return Ok(Self::Dense(GatedMlp { gate_up, down: weights.read_linear(TensorRole::Down, None, layer)? }));
        };
        let mut expert = |at: u32| {
            let mut linear = |role: TensorRole| weights.read_linear(role, None, layer);
            let gate_up = GateUp::Separate([linear(TensorRole::ExpertGate(at))?, linear(TensorRole::ExpertUp(at))?]);
            Ok(GatedMlp { gate_up, down: linear(TensorRole::ExpertDown(at))? })
        };
        let all = (0..experts.count).map(&mut expert).collect::<Result<_>>()?;
        let router = weights.read_linear(TensorRole::Router, None, layer)?;
        Ok(Self::Mixture(Mixture {
            router,
            experts: all,
            used: experts.per_token as usize,
            normalized: experts.normalized,
        }))
    }

    pub fn linears(&self) -> Vec<&Linear> {
        match self {
            Self::Dense(mlp) => mlp.linears().collect(),
            Self::Mixture(mixture) => {
                mixture.experts.iter().flat_map(GatedMlp::linears).chain([&mixture.router]).collect()
            }
        }
    }

    /// Computes the feed-forward network for n tokens: (n, hidden) -> (n, hidden).
    pub fn forward(&self, x: &[f32], a: &Architecture, batch_invariant: bool) -> Result<Vec<f32>> {
        match self {
            Self::Dense(mlp) => mlp.forward(x, a, batch_invariant),
            Self::Mixture(mixture) => mixture.forward(x, a, batch_invariant),
        }
    }
}

impl GatedMlp {
    fn linears(&self) -> impl Iterator<Item = &Linear> {
        let gate_up = match &self.gate_up {
            GateUp::Separate(two) => two.as_slice(),
            GateUp::Fused(one) => std::slice::from_ref(one),
        };
        gate_up.iter().chain([&self.down])
    }

    fn forward(&self, x: &[f32], a: &Architecture, batch_invariant: bool) -> Result<Vec<f32>> {
        let width = a.shape.feed_forward as usize;
        let [mut gate, up] = match &self.gate_up {
            GateUp::Separate([gate, up]) => forward_shared([gate, up], x, batch_invariant)?,
            GateUp::Fused(both) => {
                let both = both.forward(x, batch_invariant)?;
                [0, width].map(|from| columns(&both, 2 * width, from, width))
            }
        };
        activate(&mut gate, &up, width, a.gelu);
        self.down.forward(&gate, batch_invariant)
    }
}

impl Mixture {
    fn forward(&self, x: &[f32], a: &Architecture, batch_invariant: bool) -> Result<Vec<f32>> {
        let hidden = a.shape.hidden as usize;
        let scores = self.router.forward(x, batch_invariant)?;
        // For each expert, the rows routed to it, with their routing weights.
        let mut routed: Vec<Vec<(usize, f32)>> = vec![Vec::new(); self.experts.len()];
        for (row, scores) in scores.chunks_exact(self.experts.len()).enumerate() {
            for (expert, weight) in route(scores, self.used, self.normalized) {
                routed[expert].push((row, weight));
            }
        }
        let mut out = vec![0.0; x.len()];
        for (expert, rows) in self.experts.iter().zip(&routed).filter(|(_, rows)| !rows.is_empty()) {
            let gathered: Vec<f32> =
                rows.iter().flat_map(|(row, _)| &x[row * hidden..(row + 1) * hidden]).copied().collect();
            let results = expert.forward(&gathered, a, batch_invariant)?;
            for ((row, weight), result) in rows.iter().zip(results.chunks_exact(hidden)) {
                let to = &mut out[row * hidden..(row + 1) * hidden];
                to.iter_mut().zip(result).for_each(|(to, value)| *to += weight * value);
            }
        }
        Ok(out)
    }
}

/// Top-k routing: the `used` experts with the highest router scores and their weights. The weights are the softmax over
/// all experts or, if `normalized`, over the chosen ones. Among equal scores the lower index wins.
pub fn route(scores: &[f32], used: usize, normalized: bool) -> Vec<(usize, f32)> {
    let highest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut weights: Vec<(usize, f32)> = scores.iter().map(|score| (score - highest).exp()).enumerate().collect();
    let all: f32 = weights.iter().map(|(_, weight)| weight).sum();
    weights.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    weights.truncate(used);
    let total = if normalized { weights.iter().map(|(_, weight)| weight).sum() } else { all };
    weights.iter_mut().for_each(|(_, weight)| *weight /= total);
    weights
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routing_picks_the_highest_scores_and_their_weights() {
        let scores = [0.0, 2f32.ln(), 3f32.ln(), 2f32.ln()];
        let close = |got: Vec<(usize, f32)>, want: &[(usize, f32)]| {
            assert_eq!(got.len(), want.len(), "{got:?}");
            assert!(got.iter().zip(want).all(|(g, w)| g.0 == w.0 && (g.1 - w.1).abs() < 1e-6), "{got:?}");
        };
        close(route(&scores, 2, true), &[(2, 0.6), (1, 0.4)]);
        close(route(&scores, 2, false), &[(2, 0.375), (1, 0.25)]);
        close(route(&scores, 4, true), &[(2, 0.375), (1, 0.25), (3, 0.25), (0, 0.125)]);
    }
}
