//! The feed-forward part of a layer: one for all tokens, or a mixture of experts of which a router picks a few for each.
//!
//! Of a mixture each expert runs once over the rows that chose it, in the order of the experts: what a row becomes depends
//! on no other row. Qwen3's mixtures, <https://arxiv.org/abs/2505.09388>.

use candle_core::Result;

use crate::engine::candle::architecture::Architecture;
use crate::engine::candle::elementwise::{activate, columns};
use crate::engine::candle::linear::{Linear, shared};
use crate::engine::candle::tensors::Part;
use crate::engine::candle::weights::Weights;

pub enum FeedForward {
    Whole(Block),
    Mixture(Mixture),
}

enum GateUp {
    Apart([Linear; 2]),
    Fused(Linear),
}

/// Gate, up and down.
pub struct Block {
    gate_up: GateUp,
    down: Linear,
}

pub struct Mixture {
    router: Linear,
    experts: Vec<Block>,
    /// Experts a token goes through.
    used: usize,
    /// Their shares add up to one.
    normalised: bool,
}

impl FeedForward {
    pub fn load(weights: &mut Weights<'_>, a: &Architecture, layer: u64) -> Result<Self> {
        let Some(experts) = a.experts else {
            let gate_up = if a.fused {
                GateUp::Fused(weights.linear(Part::GateUp, None, layer)?)
            } else {
                GateUp::Apart([weights.linear(Part::Gate, None, layer)?, weights.linear(Part::Up, None, layer)?])
            };
            return Ok(Self::Whole(Block { gate_up, down: weights.linear(Part::Down, None, layer)? }));
        };
        let mut expert = |at: u32| {
            let mut part = |part: Part| weights.linear(part, None, layer);
            let gate_up = GateUp::Apart([part(Part::ExpertGate(at))?, part(Part::ExpertUp(at))?]);
            Ok(Block { gate_up, down: part(Part::ExpertDown(at))? })
        };
        let all = (0..experts.count).map(&mut expert).collect::<Result<_>>()?;
        let router = weights.linear(Part::Router, None, layer)?;
        Ok(Self::Mixture(Mixture { router, experts: all, used: experts.used as usize, normalised: experts.normalised }))
    }

    pub fn linears(&self) -> Vec<&Linear> {
        match self {
            Self::Whole(block) => block.linears().collect(),
            Self::Mixture(mixture) => {
                mixture.experts.iter().flat_map(Block::linears).chain([&mixture.router]).collect()
            }
        }
    }

    /// (n, hidden) -> (n, hidden).
    pub fn forward(&self, x: &[f32], a: &Architecture, exact: bool) -> Result<Vec<f32>> {
        match self {
            Self::Whole(block) => block.forward(x, a, exact),
            Self::Mixture(mixture) => mixture.forward(x, a, exact),
        }
    }
}

impl Block {
    fn linears(&self) -> impl Iterator<Item = &Linear> {
        let gate_up = match &self.gate_up {
            GateUp::Apart(two) => two.as_slice(),
            GateUp::Fused(one) => std::slice::from_ref(one),
        };
        gate_up.iter().chain([&self.down])
    }

    fn forward(&self, x: &[f32], a: &Architecture, exact: bool) -> Result<Vec<f32>> {
        let width = a.shape.feed_forward as usize;
        let [mut gate, up] = match &self.gate_up {
            GateUp::Apart([gate, up]) => shared([gate, up], x, exact)?,
            GateUp::Fused(both) => {
                let both = both.forward(x, exact)?;
                [0, width].map(|from| columns(&both, 2 * width, from, width))
            }
        };
        activate(&mut gate, &up, width, a.gelu);
        self.down.forward(&gate, exact)
    }
}

impl Mixture {
    fn forward(&self, x: &[f32], a: &Architecture, exact: bool) -> Result<Vec<f32>> {
        let hidden = a.shape.hidden as usize;
        let scores = self.router.forward(x, exact)?;
        let mut turns: Vec<Vec<(usize, f32)>> = vec![Vec::new(); self.experts.len()];
        for (row, scores) in scores.chunks_exact(self.experts.len()).enumerate() {
            for (expert, share) in choose(scores, self.used, self.normalised) {
                turns[expert].push((row, share));
            }
        }
        let mut out = vec![0.0; x.len()];
        for (expert, turns) in self.experts.iter().zip(&turns).filter(|(_, turns)| !turns.is_empty()) {
            let own: Vec<f32> =
                turns.iter().flat_map(|(row, _)| &x[row * hidden..(row + 1) * hidden]).copied().collect();
            let said = expert.forward(&own, a, exact)?;
            for ((row, share), said) in turns.iter().zip(said.chunks_exact(hidden)) {
                let to = &mut out[row * hidden..(row + 1) * hidden];
                to.iter_mut().zip(said).for_each(|(to, said)| *to += share * said);
            }
        }
        Ok(out)
    }
}

/// The `used` experts with the highest scores, of equal ones the first, and the share of each: its part of the softmax over
/// all, or over those chosen.
pub fn choose(scores: &[f32], used: usize, normalised: bool) -> Vec<(usize, f32)> {
    let highest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut shares: Vec<(usize, f32)> = scores.iter().map(|score| (score - highest).exp()).enumerate().collect();
    let all: f32 = shares.iter().map(|(_, share)| share).sum();
    shares.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    shares.truncate(used);
    let whole = if normalised { shares.iter().map(|(_, share)| share).sum() } else { all };
    shares.iter_mut().for_each(|(_, share)| *share /= whole);
    shares
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_are_chosen_and_share() {
        let scores = [0.0, 2f32.ln(), 3f32.ln(), 2f32.ln()];
        let close = |got: Vec<(usize, f32)>, want: &[(usize, f32)]| {
            assert_eq!(got.len(), want.len(), "{got:?}");
            assert!(got.iter().zip(want).all(|(g, w)| g.0 == w.0 && (g.1 - w.1).abs() < 1e-6), "{got:?}");
        };
        close(choose(&scores, 2, true), &[(2, 0.6), (1, 0.4)]);
        close(choose(&scores, 2, false), &[(2, 0.375), (1, 0.25)]);
        close(choose(&scores, 4, true), &[(2, 0.375), (1, 0.25), (3, 0.25), (0, 0.125)]);
    }
}
