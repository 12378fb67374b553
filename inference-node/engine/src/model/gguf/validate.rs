//! Checks a GGUF header against the size of its file, in one pass that keeps only the tensors' names and
//! extents.
//!
//! The limits below also bound the memory that parsing takes afterwards, since a parsed value takes up to 32 times its
//! bytes on disk.

use std::io::{Read, Seek};

use candle_core::quantized::gguf_file;
use cfq_memory::{Bytes, WeightFormat};

/// Maximum number of values in a header; each array element counts. The largest published vocabularies have 300
/// thousand tokens, each with a score, a type and up to two merges.
const MAX_HEADER_VALUES: u64 = 4_000_000;
/// Maximum size of a header, in bytes.
const MAX_HEADER_BYTES: u64 = 256 << 20;
/// Maximum number of tensors in one file.
const MAX_TENSORS: u64 = 100_000;

/// A [`super::HeaderError`] without the path.
pub(super) enum HeaderFault {
    NotGguf,
    Corrupt(String),
    Unsupported(String),
    Io(std::io::Error),
}

/// Checks the header of a file of `size` bytes; `reader` is at its start.
pub(super) fn validate<R: Read + Seek>(reader: &mut R, size: u64) -> Result<(), HeaderFault> {
    HeaderCheck { reader, at: 0, size, values: 0 }.run()
}

/// State of one pass over the header, from start to end.
struct HeaderCheck<'a, R> {
    reader: &'a mut R,
    /// Offset of the reader, in bytes.
    at: u64,
    /// Size of the file, in bytes.
    size: u64,
    /// Number of values read so far.
    values: u64,
}

impl<R: Read + Seek> HeaderCheck<'_, R> {
    fn run(mut self) -> Result<(), HeaderFault> {
        if self.size < 4 || self.read_bytes::<4>()? != *b"GGUF" {
            return Err(HeaderFault::NotGguf);
        }
        if !matches!(self.read_u32()?, 2 | 3) {
            return Err(HeaderFault::NotGguf);
        }
        let tensors = self.read_u64()?;
        let entries = self.read_u64()?;
        if tensors > MAX_TENSORS || entries > MAX_HEADER_VALUES {
            let what = format!("its header claims {tensors} tensors and {entries} metadata entries");
            return Err(HeaderFault::Corrupt(what));
        }
        let mut alignment = gguf_file::DEFAULT_ALIGNMENT;
        for _ in 0..entries {
            let key = self.read_name()?;
            let kind = self.read_u32()?;
            if key == "general.alignment" {
                // The specification demands a 32-bit number; readers differ on other widths.
                if kind != 4 {
                    return Err(HeaderFault::Corrupt("its alignment is not a 32-bit number".to_owned()));
                }
                alignment = u64::from(self.read_u32()?);
                self.values += 1;
            } else {
                self.skip_value(kind, 0)?;
            }
        }
        if !alignment.is_power_of_two() || alignment > 1 << 20 {
            return Err(HeaderFault::Corrupt(format!("its alignment {alignment} is not a power of two up to 2^20")));
        }
        let mut extents = Vec::new();
        for _ in 0..tensors {
            extents.push(self.read_tensor_entry()?);
        }
        let data = self.at.next_multiple_of(alignment);
        for (name, offset, bytes) in extents {
            let end = data.checked_add(offset).and_then(|start| start.checked_add(bytes));
            if end.is_none_or(|end| end > self.size) {
                let (size, needs) = (Bytes(self.size), Bytes(end.unwrap_or(u64::MAX)));
                return Err(HeaderFault::Corrupt(format!("the file has {size}, but tensor {name} ends at {needs}")));
            }
        }
        Ok(())
    }

    /// Reads the entry of the next tensor: its name, its offset in the data section and its size, both in bytes.
    fn read_tensor_entry(&mut self) -> Result<(String, u64, u64), HeaderFault> {
        let name = self.read_name()?;
        let dims = self.read_u32()?;
        if dims > 4 {
            return Err(HeaderFault::Corrupt(format!("tensor {name} has {dims} dimensions, more than 4")));
        }
        let mut values = 1u64;
        let mut row = 1;
        for dim in 0..dims {
            let length = self.read_u64()?;
            if dim == 0 {
                row = length;
            }
            values = values
                .checked_mul(length)
                .filter(|v| *v > 0 && *v < 1 << 48)
                .ok_or_else(|| HeaderFault::Corrupt(format!("tensor {name} has impossible dimensions")))?;
        }
        let number = self.read_u32()?;
        let offset = self.read_u64()?;
        let format = format_from_number(number).ok_or_else(|| {
            HeaderFault::Unsupported(format!("tensor {name} has the unsupported format number {number}"))
        })?;
        let bytes = format
            .bytes(row)
            .and_then(|_| format.bytes(values))
            .ok_or_else(|| HeaderFault::Corrupt(format!("tensor {name} does not consist of whole blocks")))?;
        Ok((name, offset, bytes))
    }

    /// Skips one metadata value of type `kind` (`enum gguf_metadata_value_type`).
    fn skip_value(&mut self, kind: u32, depth: u8) -> Result<(), HeaderFault> {
        self.values += 1;
        if self.values > MAX_HEADER_VALUES {
            return Err(HeaderFault::Corrupt(format!("its header has more than {MAX_HEADER_VALUES} values")));
        }
        match kind {
            0 | 1 => self.skip(1),
            7 => match self.read_bytes::<1>()? {
                [0 | 1] => Ok(()),
                [other] => Err(HeaderFault::Corrupt(format!("a boolean in its header has the value {other}"))),
            },
            2 | 3 => self.skip(2),
            4..=6 => self.skip(4),
            10..=12 => self.skip(8),
            8 => {
                let length = self.read_u64()?;
                self.skip(length)
            }
            9 => {
                if depth >= 3 {
                    return Err(HeaderFault::Corrupt("its header nests arrays too deeply".to_owned()));
                }
                let kind = self.read_u32()?;
                let length = self.read_u64()?;
                if length > MAX_HEADER_VALUES {
                    return Err(HeaderFault::Corrupt(format!("an array in its header claims {length} values")));
                }
                for _ in 0..length {
                    self.skip_value(kind, depth + 1)?;
                }
                Ok(())
            }
            other => Err(HeaderFault::Corrupt(format!("its header has a value of unknown type {other}"))),
        }
    }

    /// Reads a metadata key or a tensor's name.
    fn read_name(&mut self) -> Result<String, HeaderFault> {
        let length = self.read_u64()?;
        if length > 65_535 {
            return Err(HeaderFault::Corrupt(format!("a name in its header claims {length} bytes")));
        }
        self.check_length(length)?;
        let mut bytes = vec![0; length as usize];
        self.reader.read_exact(&mut bytes).map_err(HeaderFault::Io)?;
        self.at += length;
        // The parser strips NULs from the end of a name, and would use it as a name that was not checked here.
        if bytes.contains(&0) {
            return Err(HeaderFault::Corrupt("a name in its header contains a NUL".to_owned()));
        }
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Checks that `length` more bytes lie within the file and within [`MAX_HEADER_BYTES`].
    fn check_length(&self, length: u64) -> Result<(), HeaderFault> {
        let end = self.at.checked_add(length);
        if end.is_none_or(|end| end > self.size) {
            let size = Bytes(self.size);
            return Err(HeaderFault::Corrupt(format!("its header continues after {size}, where the file ends")));
        }
        if end.is_none_or(|end| end > MAX_HEADER_BYTES) {
            return Err(HeaderFault::Corrupt(format!("its header is larger than {}", Bytes(MAX_HEADER_BYTES))));
        }
        Ok(())
    }

    fn skip(&mut self, length: u64) -> Result<(), HeaderFault> {
        self.check_length(length)?;
        // `check_length` bounds `length` by MAX_HEADER_BYTES, so it fits an i64.
        self.reader.seek_relative(length as i64).map_err(HeaderFault::Io)?;
        self.at += length;
        Ok(())
    }

    fn read_bytes<const N: usize>(&mut self) -> Result<[u8; N], HeaderFault> {
        self.check_length(N as u64)?;
        let mut bytes = [0; N];
        self.reader.read_exact(&mut bytes).map_err(HeaderFault::Io)?;
        self.at += N as u64;
        Ok(bytes)
    }

    fn read_u32(&mut self) -> Result<u32, HeaderFault> {
        Ok(u32::from_le_bytes(self.read_bytes()?))
    }

    fn read_u64(&mut self) -> Result<u64, HeaderFault> {
        Ok(u64::from_le_bytes(self.read_bytes()?))
    }
}

/// The format that has this type number in ggml (`enum ggml_type`); `None` if it is not supported.
fn format_from_number(number: u32) -> Option<WeightFormat> {
    Some(match number {
        0 => WeightFormat::F32,
        1 => WeightFormat::F16,
        2 => WeightFormat::Q4_0,
        3 => WeightFormat::Q4_1,
        6 => WeightFormat::Q5_0,
        7 => WeightFormat::Q5_1,
        8 => WeightFormat::Q8_0,
        9 => WeightFormat::Q8_1,
        10 => WeightFormat::Q2K,
        11 => WeightFormat::Q3K,
        12 => WeightFormat::Q4K,
        13 => WeightFormat::Q5K,
        14 => WeightFormat::Q6K,
        15 => WeightFormat::Q8K,
        30 => WeightFormat::Bf16,
        _ => return None,
    })
}
