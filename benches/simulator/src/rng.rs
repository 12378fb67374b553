//! A seeded random number generator: SplitMix64 (Steele, Lea, Flood 2014). A run is determined by its seed.

/// Generator state.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// Creates a generator.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// A number in `0..n`; 0 if `n` is 0. The bias is below 2^-32 for the sizes used here.
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.bits()) * u128::from(n)) >> 64) as u64
    }

    /// A number in `0.0..1.0`.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// True with this probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        probability > 0.0 && self.unit() < probability
    }

    /// An exponentially distributed time with this mean.
    pub fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.unit()).ln()
    }
}

/// The finalizer of SplitMix64: a bijective hash of 64 bits.
pub fn mix(bits: u64) -> u64 {
    let bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_evenly_distributed_and_depend_only_on_the_seed() {
        let numbers = |seed| {
            let mut rng = Rng::new(seed);
            (0..4_000).map(|_| rng.below(4)).collect::<Vec<_>>()
        };
        assert_eq!(numbers(1), numbers(1));
        assert_ne!(numbers(1), numbers(2));
        for value in 0..4 {
            let count = numbers(7).iter().filter(|n| **n == value).count();
            assert!((900..1_100).contains(&count), "{value}: {count}");
        }
        let mut rng = Rng::new(3);
        let mean = (0..4_000).map(|_| rng.exponential(10.0)).sum::<f64>() / 4_000.0;
        assert!((9.0..11.0).contains(&mean), "{mean}");
    }
}
