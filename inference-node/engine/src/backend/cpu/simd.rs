//! SIMD arithmetic with a fixed order of every sum.
//!
//! The compiler turns loops over arrays of [`LANES`] values into vector instructions if they are inlined into a
//! function that is compiled for the machine's vector width, see [`vectorized`]. Calls into the standard library
//! prevent this, so exp and tanh are implemented here. The hottest loops do not rely on the compiler: they call
//! [`multiply_add`].

use pulp::{Arch, Simd, WithSimd};

/// Number of f32 lanes of a vector; head vectors in the KV cache are zero-padded to a multiple of it.
pub const LANES: usize = 16;

/// One vector of [`LANES`] values.
pub type Lanes = [f32; LANES];

/// Runs `work` compiled for the widest vectors of this machine. `work` fixes the order of its sums itself, so the
/// result is the same at every vector width.
pub fn vectorized<W: WithSimd>(work: W) -> W::Output {
    Arch::new().dispatch(work)
}

/// Adds the products of `a` and `b` to `sums`, lane by lane, as fused multiply-adds (one rounding).
#[inline(always)]
pub fn multiply_add<S: Simd>(simd: S, a: &Lanes, b: &Lanes, sums: &mut Lanes) {
    let (a, b, sums) = (S::as_simd_f32s(a).0, S::as_simd_f32s(b).0, S::as_mut_simd_f32s(sums).0);
    for ((a, b), sum) in a.iter().zip(b).zip(sums) {
        *sum = simd.mul_add_f32s(*a, *b, *sum);
    }
}

/// Sum of all lanes, added pairwise.
#[inline(always)]
pub fn add_lanes(lanes: Lanes) -> f32 {
    let half = |at: usize| lanes[at] + lanes[at + 8];
    let eight: [f32; 8] = std::array::from_fn(half);
    let four: [f32; 4] = std::array::from_fn(|at| eight[at] + eight[at + 4]);
    (four[0] + four[2]) + (four[1] + four[3])
}

/// 1.5 x 2^23: the sum of this number and a small one is rounded to an integer, which is then in the low bits of the
/// sum.
pub const ROUND_TO_INTEGER: f32 = 12_582_912.0;

/// e^x for x <= 0, to about two units in the last place; a library call per lane would prevent vectorization.
///
/// x = n ln 2 + r with |r| <= ln 2 / 2: 2^n goes into the exponent bits, e^r is the polynomial of Cephes' expf.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    // Below -87 the result would be subnormal.
    let x = if x > -87.0 { x } else { -87.0 };
    let shifted = x * std::f32::consts::LOG2_E + ROUND_TO_INTEGER;
    let n = shifted - ROUND_TO_INTEGER;
    let r = x - n * 0.693_359_4 + n * 2.121_944_4e-4;
    let mut p = 1.987_569_1e-4f32;
    for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_6e-1, 0.5] {
        p = p * r + c;
    }
    let power = shifted.to_bits().wrapping_sub(ROUND_TO_INTEGER.to_bits()).wrapping_add(127) << 23;
    (p * r * r + r + 1.0) * f32::from_bits(power)
}

/// Hyperbolic tangent, computed with [`exp`].
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let t = exp(-2.0 * x.abs());
    ((1.0 - t) / (1.0 + t)).copysign(x)
}

#[cfg(test)]
mod tests {
    use super::*;
    use pulp::Scalar;

    struct Sum<'a>(&'a [f32]);

    impl WithSimd for Sum<'_> {
        type Output = f32;

        #[inline(always)]
        fn with_simd<S: Simd>(self, simd: S) -> f32 {
            let mut sums = [0.0f32; LANES];
            for chunk in self.0.as_chunks::<LANES>().0 {
                multiply_add(simd, &chunk.map(|value| exp(-value)), chunk, &mut sums);
                for lane in 0..LANES {
                    sums[lane] += tanh(chunk[lane]);
                }
            }
            add_lanes(sums)
        }
    }

    #[test]
    fn vector_width_changes_no_bit() {
        let values: Vec<f32> = (0..1600).map(|i| (i * 7919 % 1009) as f32 / 100.0).collect();
        let plain = Sum(&values).with_simd(Scalar);
        assert_eq!(vectorized(Sum(&values)), plain);
        #[cfg(target_arch = "x86_64")]
        {
            match pulp::x86::V3::try_new() {
                Some(simd) => assert_eq!(Simd::vectorize(simd, Sum(&values)), plain),
                None => cfq_test_skip::skip("vector_width_changes_no_bit/avx2", "this CPU has no AVX2"),
            }
            match pulp::x86::V4::try_new() {
                Some(simd) => assert_eq!(Simd::vectorize(simd, Sum(&values)), plain),
                None => cfq_test_skip::skip("vector_width_changes_no_bit/avx512", "this CPU has no AVX-512"),
            }
        }
    }

    #[test]
    fn exp_matches_f64_exp() {
        for i in 0..100_000 {
            let x = -87.0 * i as f32 / 100_000.0;
            let (got, want) = (f64::from(exp(x)), f64::from(x).exp());
            assert!((got - want).abs() <= want * 3e-7, "e^{x} is {want}, not {got}");
        }
        assert_eq!(exp(0.0), 1.0);
    }
}
