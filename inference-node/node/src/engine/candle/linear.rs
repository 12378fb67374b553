//! A weight matrix as the kernels want it, with its bias where it has one.
//!
//! Loaded by the ledger's plan ([`cfq_memory::place`]): in tiles for kernels of our own, where the machine and the format
//! have such; as candle's blocks otherwise; unquantised ones as F32.

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{Device, Result, Tensor};
use cfq_memory::{Format, Kernels, Matrix, Placed, place};

use crate::engine::candle::dense::Dense;
use crate::engine::candle::tiles::{self, Input, Kind, Tiles};
use crate::models::file::TensorFacts;

pub struct Linear {
    weight: Weight,
    cols: usize,
    /// One value a row.
    bias: Option<Vec<f32>>,
}

/// A matrix as its file stores it.
pub enum Raw {
    Quantized(QTensor),
    /// F32.
    Plain(Tensor),
}

enum Weight {
    Tiles(Tiles),
    /// As the file has it, for candle's kernels.
    Blocks(QTensor),
    /// Formats without a kernel of their own, as F32.
    Plain(Dense),
}

/// What this machine's kernels can do.
pub fn kernels() -> Kernels {
    Kernels { tiles: tiles::available() }
}

/// How a matrix of the file will be held; `None` for one that is no matrix or has impossible sizes.
pub fn plan(facts: &TensorFacts, kernels: Kernels) -> Option<Placed> {
    let [rows, cols] = facts.dims[..] else { return None };
    place(Matrix { format: facts.format?, rows, cols }, kernels)
}

/// What candle calls a format.
pub fn dtype(format: Format) -> GgmlDType {
    match format {
        Format::F32 => GgmlDType::F32,
        Format::F16 => GgmlDType::F16,
        Format::Bf16 => GgmlDType::BF16,
        Format::Q4_0 => GgmlDType::Q4_0,
        Format::Q4_1 => GgmlDType::Q4_1,
        Format::Q5_0 => GgmlDType::Q5_0,
        Format::Q5_1 => GgmlDType::Q5_1,
        Format::Q8_0 => GgmlDType::Q8_0,
        Format::Q8_1 => GgmlDType::Q8_1,
        Format::Q2K => GgmlDType::Q2K,
        Format::Q3K => GgmlDType::Q3K,
        Format::Q4K => GgmlDType::Q4K,
        Format::Q5K => GgmlDType::Q5K,
        Format::Q6K => GgmlDType::Q6K,
        Format::Q8K => GgmlDType::Q8K,
    }
}

/// The tiles that [`Format::tile`] speaks of.
fn kind(format: Format) -> Option<Kind> {
    match format {
        Format::Q4_0 => Some(Kind::Four0),
        Format::Q4_1 => Some(Kind::Four1),
        Format::Q8_0 => Some(Kind::Eight),
        Format::Q4K => Some(Kind::FourK),
        Format::Q5K => Some(Kind::FiveK),
        Format::Q6K => Some(Kind::SixK),
        Format::F32
        | Format::F16
        | Format::Bf16
        | Format::Q5_0
        | Format::Q5_1
        | Format::Q8_1
        | Format::Q2K
        | Format::Q3K
        | Format::Q8K => None,
    }
}

impl Linear {
    pub fn new(raw: Raw, placed: &Placed, bias: Option<Tensor>) -> Result<Self> {
        let (weight, cols) = match raw {
            Raw::Plain(values) => {
                let (_, cols) = values.dims2()?;
                (Weight::Plain(Dense::new(&values)?), cols)
            }
            Raw::Quantized(read) => {
                let (rows, cols) = read.shape().dims2()?;
                let target = dtype(placed.format);
                let weight = if placed.format == Format::F32 {
                    Weight::Plain(Dense::new(&read.dequantize(&Device::Cpu)?)?)
                } else {
                    let blocks = if read.dtype() == target {
                        read
                    } else {
                        QTensor::quantize(&read.dequantize(&Device::Cpu)?, target)?
                    };
                    match kind(placed.format).filter(|_| placed.tiled) {
                        Some(kind) => match Tiles::pack(kind, &blocks.data()?, rows, cols) {
                            Some(tiles) => Weight::Tiles(tiles),
                            None => candle_core::bail!("a matrix of {rows} x {cols} does not fill its blocks"),
                        },
                        None => Weight::Blocks(blocks),
                    }
                };
                (weight, cols)
            }
        };
        let bias = bias.map(|bias| bias.flatten_all()?.to_vec1()).transpose()?;
        Ok(Self { weight, cols, bias })
    }

    /// Bytes as held.
    pub fn stored_bytes(&self) -> usize {
        match &self.weight {
            Weight::Tiles(tiles) => tiles.stored_bytes(),
            Weight::Blocks(blocks) => blocks.storage_size_in_bytes(),
            Weight::Plain(dense) => dense.weights.len() * size_of::<f32>(),
        }
    }

    /// Held and computed as F32, so that a row's result depends on nothing but the row.
    pub fn is_plain(&self) -> bool {
        matches!(self.weight, Weight::Plain(_))
    }

    /// (n, columns) -> (n, rows). `exact`: no bit of a row depends on how many there are.
    pub fn forward(&self, x: &[f32], exact: bool) -> Result<Vec<f32>> {
        let [out] = shared([self], x, exact)?;
        Ok(out)
    }

    fn biased(&self, mut out: Vec<f32>) -> Vec<f32> {
        if let Some(bias) = &self.bias {
            for row in out.chunks_exact_mut(bias.len()) {
                row.iter_mut().zip(bias).for_each(|(value, bias)| *value += bias);
            }
        }
        out
    }

    /// Rows of the matrix as F32, for looking tokens up.
    pub fn rows(&self, ids: &[u32]) -> Result<Vec<f32>> {
        let mut rows = Vec::with_capacity(ids.len() * self.cols);
        for id in ids {
            let at = *id as usize;
            let known = match &self.weight {
                Weight::Tiles(tiles) => tiles.row(at, &mut rows),
                Weight::Blocks(blocks) => {
                    let id = Tensor::from_slice(&[*id], 1, &Device::Cpu)?;
                    rows.extend(blocks.embedding(&id)?.flatten_all()?.to_vec1::<f32>()?);
                    true
                }
                Weight::Plain(dense) => {
                    let row = dense.weights.get(at * self.cols..(at + 1) * self.cols);
                    rows.extend_from_slice(row.unwrap_or_default());
                    row.is_some()
                }
            };
            if !known {
                candle_core::bail!("token {id} has no embedding")
            }
        }
        Ok(rows)
    }
}

/// Several projections of the same input, in one parallel region where the kernels can.
pub fn shared<const N: usize>(linears: [&Linear; N], x: &[f32], exact: bool) -> Result<[Vec<f32>; N]> {
    let cols = linears[0].cols;
    if linears.iter().any(|l| l.cols != cols) || !x.len().is_multiple_of(cols.max(1)) {
        candle_core::bail!("{} values for rows of {cols} columns", x.len())
    }
    let tiles: Vec<&Tiles> = linears
        .iter()
        .filter_map(|l| match &l.weight {
            Weight::Tiles(tiles) => Some(tiles),
            Weight::Blocks(_) | Weight::Plain(_) => None,
        })
        .collect();
    // Rounded once for all of them.
    let rounded = (!tiles.is_empty()).then(|| Input::new(x, cols));
    let mut outs: Vec<Vec<f32>> = Vec::with_capacity(N);
    if let (Ok(all), Some(rounded)) = (<[&Tiles; N]>::try_from(tiles), &rounded) {
        outs.extend(tiles::multiply(all, rounded));
    } else {
        for linear in linears {
            outs.push(match (&linear.weight, &rounded) {
                (Weight::Tiles(tiles), Some(rounded)) => {
                    let [out] = tiles::multiply([tiles], rounded);
                    out
                }
                (Weight::Tiles(_), None) => candle_core::bail!("tiles without an input"),
                (Weight::Blocks(blocks), _) => by_candle(blocks, x, cols, exact)?,
                (Weight::Plain(dense), _) => dense.multiply(x),
            });
        }
    }
    let outs = linears.iter().zip(outs).map(|(linear, out)| linear.biased(out)).collect::<Vec<_>>();
    outs.try_into().map_err(|_| candle_core::Error::Msg("one output a projection".to_owned()))
}

fn by_candle(blocks: &QTensor, x: &[f32], cols: usize, exact: bool) -> Result<Vec<f32>> {
    let n = x.len() / cols;
    let (rows, _) = blocks.shape().dims2()?;
    // Twice the same row, to get the kernel for several.
    let twice = exact && n == 1 && has_kernel_for_one(blocks.dtype());
    let x = if twice {
        Tensor::from_vec([x, x].concat(), (2, cols), &Device::Cpu)?
    } else {
        Tensor::from_slice(x, (n, cols), &Device::Cpu)?
    };
    let mut out = x.apply_op1_no_bwd(blocks)?.flatten_all()?.to_vec1()?;
    out.truncate(n * rows);
    Ok(out)
}

/// Formats whose product with a single row is computed in another order than with several; candle's K-quants.
fn has_kernel_for_one(dtype: GgmlDType) -> bool {
    match dtype {
        GgmlDType::Q2K | GgmlDType::Q3K | GgmlDType::Q4K | GgmlDType::Q5K | GgmlDType::Q6K | GgmlDType::Q8K => true,
        GgmlDType::F32
        | GgmlDType::F16
        | GgmlDType::BF16
        | GgmlDType::Q4_0
        | GgmlDType::Q4_1
        | GgmlDType::Q5_0
        | GgmlDType::Q5_1
        | GgmlDType::Q8_0
        | GgmlDType::Q8_1 => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMATS: [Format; 12] = [
        Format::F32,
        Format::F16,
        Format::Q8_0,
        Format::Q4_1,
        Format::Q4_0,
        Format::Q5_0,
        Format::Q5_1,
        Format::Q4K,
        Format::Q5K,
        Format::Q6K,
        Format::Q3K,
        Format::Q2K,
    ];

    fn numbers(count: usize, step: usize) -> Vec<f32> {
        (0..count).map(|i| ((i * step) % 1009) as f32 / 504.0 - 1.0).collect()
    }

    /// The matrix, what the ledger says of it, and its values as the file has them.
    fn linear(format: Format, rows: usize, cols: usize, kernels: Kernels) -> (Linear, Placed, Vec<Vec<f32>>) {
        let values = Tensor::from_vec(numbers(rows * cols, 7919), (rows, cols), &Device::Cpu).unwrap();
        let read = QTensor::quantize(&values, dtype(format)).unwrap();
        let values = read.dequantize(&Device::Cpu).unwrap().to_vec2().unwrap();
        let facts = TensorFacts { dims: vec![rows as u64, cols as u64], format: Some(format) };
        let placed = plan(&facts, kernels).unwrap();
        (Linear::new(Raw::Quantized(read), &placed, None).unwrap(), placed, values)
    }

    fn all() -> impl Iterator<Item = (Format, usize, usize, Kernels)> {
        let sizes = [(256, 512), (100, 256), (192, 576)];
        let kernels = [kernels(), Kernels::default()];
        FORMATS.into_iter().flat_map(move |format| {
            let sizes = sizes.into_iter().filter(move |(_, cols)| format.bytes(*cols).is_some());
            sizes.flat_map(move |(rows, cols)| kernels.map(|k| (format, rows, cols as usize, k)))
        })
    }

    #[test]
    fn company_changes_no_bit_of_a_row() {
        let mut differing = Vec::new();
        for (format, rows, cols, kernels) in all() {
            let (linear, placed, _) = linear(format, rows, cols, kernels);
            // Tiles need not be asked.
            let exact = !placed.tiled;
            let x = numbers(100 * cols, 31);
            let whole = linear.forward(&x, exact).unwrap();
            for count in [1, 2, 3, 4, 7, 8, 9, 16, 31, 32, 33, 64] {
                let part = &x[10 * cols..][..count * cols];
                let [a, b] = shared([&linear, &linear], part, exact).unwrap();
                for part in [linear.forward(part, exact).unwrap(), a, b] {
                    if part != whole[10 * rows..][..count * rows] {
                        differing.push(format!("{format:?} {rows}x{cols} {kernels:?}: {count}"));
                    }
                }
            }
        }
        assert!(differing.is_empty(), "{differing:#?}");
    }

    #[test]
    fn it_is_the_product_with_what_the_file_holds_and_takes_what_the_ledger_says() {
        for (format, rows, cols, kernels) in all() {
            let (linear, placed, values) = linear(format, rows, cols, kernels);
            assert_eq!(linear.stored_bytes() as u64, placed.stored, "{format:?} {kernels:?}");
            let x = numbers(3 * cols, 31);
            let got = linear.forward(&x, false).unwrap();
            for (at, got) in got.iter().enumerate() {
                let pairs = || x[at / rows * cols..][..cols].iter().zip(&values[at % rows]);
                let want: f32 = pairs().map(|(x, w)| x * w).sum();
                let length =
                    |of: &dyn Fn((&f32, &f32)) -> f32| pairs().map(|pair| of(pair).powi(2)).sum::<f32>().sqrt();
                let size = length(&|(x, _)| *x) * length(&|(_, w)| *w);
                // Activations are rounded to 8 bits.
                assert!((got - want).abs() < size * 4e-3, "{format:?} {rows}x{cols} {kernels:?}: {got} is not {want}");
            }
            let rows = linear.rows(&[7, 0]).unwrap();
            for (got, want) in rows.chunks_exact(cols).zip([&values[7], &values[0]]) {
                assert!(got.iter().zip(want).all(|(got, want)| (got - want).abs() < 6e-3), "{format:?} {kernels:?}");
            }
        }
    }
}
