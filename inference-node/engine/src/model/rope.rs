//! Rotary position embedding (RoPE): pairs of a head's values are rotated by angles that grow with the position, each
//! pair at its own frequency. RoFormer, <https://arxiv.org/abs/2104.09864>.
//!
//! Angles are computed in each step, for its positions only. A precomputed table for 128 thousand positions would take
//! much memory, while computing the angles takes little time.

/// Which values of a head form a pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RopeLayout {
    /// Values 2i and 2i + 1: Llama's GGUF files (`LLAMA_ROPE_TYPE_NORM` of llama.cpp).
    Interleaved,
    /// Values i and i + p, where p is the number of pairs: all other files (`LLAMA_ROPE_TYPE_NEOX` of llama.cpp).
    HalfSplit,
}

/// The rotation frequencies of one head.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Rotation frequency of each pair, in radians per position. Values of a head beyond these pairs are not rotated.
    pub frequencies: Vec<f32>,
    /// Factor on both cosine and sine, so that attention scores are scaled by its square. Compensates for the larger
    /// context in YaRN and LongRoPE; 1 otherwise.
    pub attention_factor: f32,
}

/// Parameters of YaRN scaling, <https://arxiv.org/abs/2309.00071>.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Yarn {
    /// Length of the extended context divided by that of the original context.
    pub factor: f32,
    /// Length of the original context, in positions.
    pub original_context: f32,
    /// Pairs with at least this many turns over the original context keep their frequency.
    pub beta_fast: f32,
    /// Pairs with at most this many turns over the original context are interpolated by the whole `factor`.
    pub beta_slow: f32,
    /// See [`Rope::attention_factor`].
    pub attention_factor: f32,
}

impl Yarn {
    /// `beta_fast` of files that do not set it; the paper's beta for Llama.
    pub const DEFAULT_BETA_FAST: f32 = 32.0;
    /// `beta_slow` of files that do not set it; the paper's alpha for Llama.
    pub const DEFAULT_BETA_SLOW: f32 = 1.0;

    /// The paper's attention factor for a context extended by `factor`: sqrt(1 / t) = 0.1 ln(factor) + 1.
    pub fn default_attention_factor(factor: f32) -> f32 {
        if factor > 1.0 { 0.1 * factor.ln() + 1.0 } else { 1.0 }
    }
}

impl Rope {
    /// Unscaled RoPE over the first `dims` values of each head: pair i has the frequency base^(-2i / dims).
    pub fn new(base: f32, dims: usize) -> Self {
        let frequencies = (0..dims / 2).map(|i| 1.0 / base.powf((2 * i) as f32 / dims as f32)).collect();
        Self { frequencies, attention_factor: 1.0 }
    }

    /// Linear scaling (position interpolation, <https://arxiv.org/abs/2306.15595>): every frequency divided by
    /// `factor`.
    pub fn linear_scaled(mut self, factor: f32) -> Self {
        self.frequencies.iter_mut().for_each(|f| *f /= factor);
        self
    }

    /// Divides each frequency by its own factor; pairs without a factor keep their frequency.
    pub fn divided_by(mut self, factors: &[f32]) -> Self {
        self.frequencies.iter_mut().zip(factors).for_each(|(f, factor)| *f /= factor);
        self
    }

    /// Llama 3 scaling: wavelengths above `original_context / low` positions are scaled by `factor`, those below
    /// `original_context / high` are kept, those between are interpolated.
    /// <https://github.com/meta-llama/llama-models>, `apply_scaling`.
    pub fn llama3_scaled(mut self, factor: f32, low: f32, high: f32, original_context: f32) -> Self {
        for frequency in &mut self.frequencies {
            let wavelength = 2.0 * std::f32::consts::PI / *frequency;
            if wavelength > original_context / low {
                *frequency /= factor;
            } else if wavelength >= original_context / high {
                let smooth = (original_context / wavelength - low) / (high - low);
                *frequency = (1.0 - smooth) * *frequency / factor + smooth * *frequency;
            }
        }
        self
    }

    /// YaRN scaling: pairs with many turns over the original context keep their frequency, pairs with few are
    /// interpolated, a linear ramp over the pairs joins both. <https://arxiv.org/abs/2309.00071>; the ramp's bounds are
    /// rounded outwards, as in its authors' code (<https://github.com/jquesnelle/yarn>).
    pub fn yarn_scaled(mut self, base: f32, yarn: Yarn) -> Self {
        let pairs = self.frequencies.len();
        let dims = (2 * pairs) as f32;
        // The (fractional) pair that makes `turns` turns over the original context.
        let pair_of =
            |turns: f32| dims * (yarn.original_context / (turns * 2.0 * std::f32::consts::PI)).ln() / (2.0 * base.ln());
        let low = pair_of(yarn.beta_fast).floor().max(0.0);
        let high = pair_of(yarn.beta_slow).ceil().min(dims - 1.0);
        for (pair, frequency) in self.frequencies.iter_mut().enumerate() {
            let ramp = ((pair as f32 - low) / (high - low).max(0.001)).clamp(0.0, 1.0);
            *frequency = *frequency / yarn.factor * ramp + *frequency * (1.0 - ramp);
        }
        self.attention_factor = yarn.attention_factor;
        self
    }

    /// Appends the cosines and sines of one position, one of each per pair, scaled by the attention factor.
    pub fn push_angles(&self, position: usize, cos: &mut Vec<f32>, sin: &mut Vec<f32>) {
        for frequency in &self.frequencies {
            let (s, c) = (position as f32 * frequency).sin_cos();
            cos.push(c * self.attention_factor);
            sin.push(s * self.attention_factor);
        }
    }
}

/// Rotates the heads of one row, (heads, head dim), in place. `cos` and `sin` hold one value per pair.
pub fn rotate(row: &mut [f32], head_dim: usize, layout: RopeLayout, cos: &[f32], sin: &[f32]) {
    let half = cos.len();
    for head in row.chunks_exact_mut(head_dim) {
        match layout {
            RopeLayout::Interleaved => {
                for (pair, (c, s)) in head.chunks_exact_mut(2).zip(cos.iter().zip(sin)) {
                    let (a, b) = (pair[0], pair[1]);
                    pair[0] = a * c - b * s;
                    pair[1] = b * c + a * s;
                }
            }
            RopeLayout::HalfSplit => {
                let (first, second) = head.split_at_mut(half);
                for ((a, b), (c, s)) in first.iter_mut().zip(second).zip(cos.iter().zip(sin)) {
                    (*a, *b) = (*a * c - *b * s, *b * c + *a * s);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_layouts_rotate_the_same_pairs() {
        let rope = Rope::new(10_000.0, 4);
        assert_eq!(rope.frequencies, [1.0, 0.01]);
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        rope.push_angles(3, &mut cos, &mut sin);
        let mut interleaved = [1.0, 0.0, 0.5, 2.0];
        let mut halves = [1.0, 0.5, 0.0, 2.0];
        rotate(&mut interleaved, 4, RopeLayout::Interleaved, &cos, &sin);
        rotate(&mut halves, 4, RopeLayout::HalfSplit, &cos, &sin);
        assert_eq!([interleaved[0], interleaved[2], interleaved[1], interleaved[3]], halves);
        assert!((interleaved[0] - 3f32.cos()).abs() < 1e-6 && (interleaved[1] - 3f32.sin()).abs() < 1e-6);
    }

    #[test]
    fn values_beyond_the_rotated_dimensions_are_kept() {
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        Rope::new(10.0, 2).push_angles(1, &mut cos, &mut sin);
        let mut row = [1.0, 1.0, 7.0, 8.0];
        rotate(&mut row, 4, RopeLayout::HalfSplit, &cos, &sin);
        assert_eq!(row[2..], [7.0, 8.0]);
    }

    #[test]
    fn yarn_keeps_high_frequencies_and_interpolates_low_ones() {
        let yarn = Yarn {
            factor: 4.0,
            original_context: 64.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            attention_factor: Yarn::default_attention_factor(4.0),
        };
        let rope = Rope::new(10_000.0, 16).yarn_scaled(10_000.0, yarn);
        let plain = Rope::new(10_000.0, 16);
        assert_eq!(rope.frequencies[0], plain.frequencies[0]);
        // From pair 3 on, a full turn takes more than the 64 positions of the original context.
        for pair in 3..8 {
            assert_eq!(rope.frequencies[pair], plain.frequencies[pair] / 4.0);
        }
        assert!(rope.frequencies[1] < plain.frequencies[1] && rope.frequencies[1] > plain.frequencies[1] / 4.0);
        assert!((rope.attention_factor - 1.138_629_4).abs() < 1e-6 && Yarn::default_attention_factor(1.0) == 1.0);
    }

    // Expected: transformers 5.23, _compute_llama3_parameters with factor 8, low 1, high 4, original 64, base 10000,
    // dim 8.
    #[test]
    fn llama3_keeps_short_wavelengths_and_scales_long_ones() {
        let rope = Rope::new(10_000.0, 8).llama3_scaled(8.0, 1.0, 4.0, 64.0);
        assert_eq!(rope.frequencies[0], 1.0);
        assert!((rope.frequencies[3] - 0.001 / 8.0).abs() < 1e-9);
    }
}
