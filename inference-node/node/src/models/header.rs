//! Reading a GGUF file's header without trusting it.
//!
//! A truncated download, a corrupt disk or a crafted file must end in an error that says what is wrong. The header is
//! first walked here without allocating: every count, length, type and tensor extent is checked against the file's own
//! size. Only then does candle parse it. The walk also bounds what parsing may allocate, since a parsed value takes up
//! to 32 times its bytes on disk.
//!
//! Format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>, little-endian, versions 2 and 3.

use std::fs::File;
use std::io::{BufReader, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use candle_core::quantized::{GgmlDType, gguf_file};
use cfq_memory::{Bytes, Format};

/// Header values (array elements count each) above this are refused: the largest real vocabularies have 300 thousand
/// tokens, each with a score, a type and up to two merges.
const MAX_VALUES: u64 = 4_000_000;
/// Text and numbers of a header in all, in bytes.
const MAX_HEADER: u64 = 256 << 20;
/// Tensors of one file.
const MAX_TENSORS: u64 = 100_000;

#[derive(Debug, thiserror::Error)]
pub enum HeaderError {
    #[error("cannot read {path}: check that it exists and that cfq may read it")]
    Open {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("{path} is not a GGUF file: cfq loads GGUF versions 2 and 3")]
    NotGguf { path: PathBuf },
    #[error("{path} is cut off or corrupt: {what}; remove it and fetch it again")]
    Corrupt { path: PathBuf, what: String },
    #[error("{path} cannot be used: {what}")]
    Unsupported { path: PathBuf, what: String },
}

/// A header whose every size was checked against the file.
#[derive(Debug)]
pub struct Header {
    pub path: PathBuf,
    /// Bytes of the whole file.
    pub size: u64,
    pub content: gguf_file::Content,
}

impl Header {
    pub fn read(path: &Path) -> Result<Self, HeaderError> {
        let open = |source| HeaderError::Open { path: path.to_owned(), source };
        let file = File::open(path).map_err(open)?;
        let meta = file.metadata().map_err(open)?;
        if !meta.is_file() {
            return Err(HeaderError::NotGguf { path: path.to_owned() });
        }
        let size = meta.len();
        let mut reader = BufReader::new(file);
        Walk { reader: &mut reader, at: 0, size, values: 0 }.header().map_err(|fault| match fault {
            Fault::NotGguf => HeaderError::NotGguf { path: path.to_owned() },
            Fault::Corrupt(what) => HeaderError::Corrupt { path: path.to_owned(), what },
            Fault::Unsupported(what) => HeaderError::Unsupported { path: path.to_owned(), what },
            Fault::Io(source) => open(source),
        })?;
        reader.seek(SeekFrom::Start(0)).map_err(open)?;
        let content = gguf_file::Content::read(&mut reader)
            .map_err(|error| HeaderError::Corrupt { path: path.to_owned(), what: error.to_string() })?;
        Ok(Self { path: path.to_owned(), size, content })
    }

    /// A tensor's values as F32, in order.
    pub fn vector(&self, name: &str) -> Result<Vec<f32>, HeaderError> {
        let open = |source| HeaderError::Open { path: self.path.clone(), source };
        let mut reader = BufReader::new(File::open(&self.path).map_err(open)?);
        let read = self.content.tensor(&mut reader, name, &candle_core::Device::Cpu);
        read.and_then(|t| t.dequantize(&candle_core::Device::Cpu)?.flatten_all()?.to_vec1())
            .map_err(|error| HeaderError::Corrupt { path: self.path.clone(), what: format!("tensor {name}: {error}") })
    }

    pub fn unsupported(&self, what: impl Into<String>) -> HeaderError {
        HeaderError::Unsupported { path: self.path.clone(), what: what.into() }
    }

    fn value(&self, key: &str) -> Option<&gguf_file::Value> {
        self.content.metadata.get(key)
    }

    pub fn text(&self, key: &str) -> Option<&str> {
        match self.value(key)? {
            gguf_file::Value::String(text) => Some(text),
            _ => None,
        }
    }

    /// Any whole number that is not negative.
    pub fn number(&self, key: &str) -> Option<u64> {
        use gguf_file::Value as V;
        match self.value(key)? {
            V::U8(v) => Some(u64::from(*v)),
            V::U16(v) => Some(u64::from(*v)),
            V::U32(v) => Some(u64::from(*v)),
            V::U64(v) => Some(*v),
            V::I8(v) => u64::try_from(*v).ok(),
            V::I16(v) => u64::try_from(*v).ok(),
            V::I32(v) => u64::try_from(*v).ok(),
            V::I64(v) => u64::try_from(*v).ok(),
            V::F32(_) | V::F64(_) | V::Bool(_) | V::String(_) | V::Array(_) => None,
        }
    }

    pub fn real(&self, key: &str) -> Option<f32> {
        match self.value(key)? {
            gguf_file::Value::F32(v) => Some(*v),
            gguf_file::Value::F64(v) => Some(*v as f32),
            _ => None,
        }
    }

    pub fn flag(&self, key: &str) -> Option<bool> {
        match self.value(key)? {
            gguf_file::Value::Bool(v) => Some(*v),
            _ => None,
        }
    }

    pub fn texts(&self, key: &str) -> Option<Vec<&str>> {
        let gguf_file::Value::Array(values) = self.value(key)? else { return None };
        values
            .iter()
            .map(|v| match v {
                gguf_file::Value::String(text) => Some(text.as_str()),
                _ => None,
            })
            .collect()
    }

    pub fn reals(&self, key: &str) -> Option<Vec<f32>> {
        let gguf_file::Value::Array(values) = self.value(key)? else { return None };
        values
            .iter()
            .map(|v| match v {
                gguf_file::Value::F32(v) => Some(*v),
                gguf_file::Value::F64(v) => Some(*v as f32),
                _ => None,
            })
            .collect()
    }

    pub fn numbers(&self, key: &str) -> Option<Vec<i64>> {
        use gguf_file::Value as V;
        let V::Array(values) = self.value(key)? else { return None };
        values
            .iter()
            .map(|v| match v {
                V::U8(v) => Some(i64::from(*v)),
                V::I8(v) => Some(i64::from(*v)),
                V::U16(v) => Some(i64::from(*v)),
                V::I16(v) => Some(i64::from(*v)),
                V::U32(v) => Some(i64::from(*v)),
                V::I32(v) => Some(i64::from(*v)),
                V::I64(v) => Some(*v),
                V::U64(v) => i64::try_from(*v).ok(),
                V::F32(_) | V::F64(_) | V::Bool(_) | V::String(_) | V::Array(_) => None,
            })
            .collect()
    }
}

/// candle's name for a format, in the ledger's words. `None`: a format without matrix kernels.
pub fn format_of(dtype: GgmlDType) -> Option<Format> {
    Some(match dtype {
        GgmlDType::F32 => Format::F32,
        GgmlDType::F16 => Format::F16,
        GgmlDType::BF16 => Format::Bf16,
        GgmlDType::Q4_0 => Format::Q4_0,
        GgmlDType::Q4_1 => Format::Q4_1,
        GgmlDType::Q5_0 => Format::Q5_0,
        GgmlDType::Q5_1 => Format::Q5_1,
        GgmlDType::Q8_0 => Format::Q8_0,
        GgmlDType::Q8_1 => Format::Q8_1,
        GgmlDType::Q2K => Format::Q2K,
        GgmlDType::Q3K => Format::Q3K,
        GgmlDType::Q4K => Format::Q4K,
        GgmlDType::Q5K => Format::Q5K,
        GgmlDType::Q6K => Format::Q6K,
        GgmlDType::Q8K => Format::Q8K,
    })
}

/// ggml's number for a tensor format.
fn format_number(number: u32) -> Option<Format> {
    Some(match number {
        0 => Format::F32,
        1 => Format::F16,
        2 => Format::Q4_0,
        3 => Format::Q4_1,
        6 => Format::Q5_0,
        7 => Format::Q5_1,
        8 => Format::Q8_0,
        9 => Format::Q8_1,
        10 => Format::Q2K,
        11 => Format::Q3K,
        12 => Format::Q4K,
        13 => Format::Q5K,
        14 => Format::Q6K,
        15 => Format::Q8K,
        30 => Format::Bf16,
        _ => return None,
    })
}

enum Fault {
    NotGguf,
    Corrupt(String),
    Unsupported(String),
    Io(std::io::Error),
}

/// Walks the header once, front to back.
struct Walk<'a, R> {
    reader: &'a mut R,
    at: u64,
    size: u64,
    values: u64,
}

impl<R: Read + Seek> Walk<'_, R> {
    fn header(mut self) -> Result<(), Fault> {
        if self.size < 4 || self.bytes::<4>()? != *b"GGUF" {
            return Err(Fault::NotGguf);
        }
        if !matches!(self.u32()?, 2 | 3) {
            return Err(Fault::NotGguf);
        }
        let tensors = self.u64()?;
        let entries = self.u64()?;
        if tensors > MAX_TENSORS || entries > MAX_VALUES {
            return Err(Fault::Corrupt(format!("its header claims {tensors} tensors and {entries} entries")));
        }
        let mut alignment = gguf_file::DEFAULT_ALIGNMENT;
        for _ in 0..entries {
            let key = self.short_text()?;
            let kind = self.u32()?;
            if key == "general.alignment" {
                // The specification says a 32-bit number; other widths would be read differently by other readers.
                if kind != 4 {
                    return Err(Fault::Corrupt("its alignment is not a 32-bit number".to_owned()));
                }
                alignment = u64::from(self.u32()?);
                self.values += 1;
            } else {
                self.value(kind, 0)?;
            }
        }
        if !alignment.is_power_of_two() || alignment > 1 << 20 {
            return Err(Fault::Corrupt(format!("its alignment is {alignment}")));
        }
        let mut extents = Vec::new();
        for _ in 0..tensors {
            extents.push(self.tensor()?);
        }
        let data = self.at.next_multiple_of(alignment);
        for (name, offset, bytes) in extents {
            let end = data.checked_add(offset).and_then(|start| start.checked_add(bytes));
            if end.is_none_or(|end| end > self.size) {
                let (size, needs) = (Bytes(self.size), Bytes(end.unwrap_or(u64::MAX)));
                return Err(Fault::Corrupt(format!("the file has {size}, tensor {name} ends at {needs}")));
            }
        }
        Ok(())
    }

    /// Name, offset and length in bytes of the next tensor.
    fn tensor(&mut self) -> Result<(String, u64, u64), Fault> {
        let name = self.short_text()?;
        let dims = self.u32()?;
        if dims > 4 {
            return Err(Fault::Corrupt(format!("tensor {name} has {dims} dimensions")));
        }
        let mut values = 1u64;
        let mut row = 1;
        for dim in 0..dims {
            let length = self.u64()?;
            if dim == 0 {
                row = length;
            }
            values = values
                .checked_mul(length)
                .filter(|v| *v > 0 && *v < 1 << 48)
                .ok_or_else(|| Fault::Corrupt(format!("tensor {name} has impossible dimensions")))?;
        }
        let number = self.u32()?;
        let offset = self.u64()?;
        let format = format_number(number).ok_or_else(|| {
            Fault::Unsupported(format!("tensor {name} has format number {number}, which cfq has no kernels for"))
        })?;
        let bytes = format
            .bytes(row)
            .and_then(|_| format.bytes(values))
            .ok_or_else(|| Fault::Corrupt(format!("tensor {name} does not fill whole blocks")))?;
        Ok((name, offset, bytes))
    }

    fn value(&mut self, kind: u32, depth: u8) -> Result<(), Fault> {
        self.values += 1;
        if self.values > MAX_VALUES {
            return Err(Fault::Corrupt(format!("its header has more than {MAX_VALUES} values")));
        }
        match kind {
            0 | 1 => self.skip(1),
            7 => match self.bytes::<1>()? {
                [0 | 1] => Ok(()),
                [other] => Err(Fault::Corrupt(format!("a truth value is {other}"))),
            },
            2 | 3 => self.skip(2),
            4..=6 => self.skip(4),
            10..=12 => self.skip(8),
            8 => {
                let length = self.u64()?;
                self.skip(length)
            }
            9 => {
                if depth >= 3 {
                    return Err(Fault::Corrupt("its header nests arrays too deeply".to_owned()));
                }
                let kind = self.u32()?;
                let length = self.u64()?;
                if length > MAX_VALUES {
                    return Err(Fault::Corrupt(format!("an array of its header claims {length} values")));
                }
                for _ in 0..length {
                    self.value(kind, depth + 1)?;
                }
                Ok(())
            }
            other => Err(Fault::Corrupt(format!("its header has a value of unknown type {other}"))),
        }
    }

    /// A key or a tensor's name.
    fn short_text(&mut self) -> Result<String, Fault> {
        let length = self.u64()?;
        if length > 65_535 {
            return Err(Fault::Corrupt(format!("a name of its header claims {length} bytes")));
        }
        self.room(length)?;
        let mut bytes = vec![0; length as usize];
        self.reader.read_exact(&mut bytes).map_err(Fault::Io)?;
        self.at += length;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }

    fn room(&self, length: u64) -> Result<(), Fault> {
        let end = self.at.checked_add(length);
        if end.is_none_or(|end| end > self.size) {
            return Err(Fault::Corrupt(format!("its header ends after {}, the file's end", Bytes(self.size))));
        }
        if end.is_none_or(|end| end > MAX_HEADER) {
            return Err(Fault::Corrupt(format!("its header is larger than {}", Bytes(MAX_HEADER))));
        }
        Ok(())
    }

    fn skip(&mut self, length: u64) -> Result<(), Fault> {
        self.room(length)?;
        // At most MAX_HEADER, so it fits.
        self.reader.seek_relative(length as i64).map_err(Fault::Io)?;
        self.at += length;
        Ok(())
    }

    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], Fault> {
        self.room(N as u64)?;
        let mut bytes = [0; N];
        self.reader.read_exact(&mut bytes).map_err(Fault::Io)?;
        self.at += N as u64;
        Ok(bytes)
    }

    fn u32(&mut self) -> Result<u32, Fault> {
        Ok(u32::from_le_bytes(self.bytes()?))
    }

    fn u64(&mut self) -> Result<u64, Fault> {
        Ok(u64::from_le_bytes(self.bytes()?))
    }
}
