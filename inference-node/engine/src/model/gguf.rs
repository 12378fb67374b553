//! Reads and validates the header of a GGUF file.
//!
//! The file is not trusted: a truncated download, a corrupt disk or a crafted file must end in an error that says what
//! is wrong. `gguf/validate.rs` first walks the header without building its values and checks every count, length, type
//! and tensor extent against the file's size. Only then does candle parse it.
//!
//! Format: <https://github.com/ggml-org/ggml/blob/master/docs/gguf.md>, little-endian, versions 2 and 3.

pub(crate) mod regular_file;
mod validate;

use std::fs::File;
use std::io::{BufReader, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use candle_core::quantized::{GgmlDType, gguf_file};
use cfq_memory::WeightFormat;

use crate::model::gguf::validate::{HeaderFault, validate};

/// Why a model's file or folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum HeaderError {
    /// An I/O error.
    #[error("cannot read {path}: check that it exists and that this process may read it")]
    Open {
        /// Path of the file.
        path: PathBuf,
        /// The operating system's error.
        #[source]
        source: std::io::Error,
    },
    /// Not a file that can be read to its end.
    #[error("{path} is a {kind}, not a regular file: name the model's file or folder")]
    SpecialFile {
        /// Path of the file.
        path: PathBuf,
        /// "FIFO", "socket" or "device".
        kind: &'static str,
    },
    /// The magic number or the version is not GGUF's.
    #[error("{path} is not a GGUF file of version 2 or 3")]
    NotGguf {
        /// Path of the file.
        path: PathBuf,
    },
    /// The content contradicts itself or the file's size.
    #[error("{path} is cut off or corrupt: {what}; remove it and fetch it again")]
    Corrupt {
        /// Path of the file.
        path: PathBuf,
        /// Description of the contradiction.
        what: String,
    },
    /// The file is valid, but this version cannot run the model.
    #[error("{path} cannot be used: {what}")]
    Unsupported {
        /// Path of the file or folder.
        path: PathBuf,
        /// Description of what is missing or not supported.
        what: String,
    },
}

/// A parsed header. All sizes in it were checked against the file's size.
#[derive(Debug)]
pub struct GgufHeader {
    /// Path of the file.
    pub path: PathBuf,
    /// Size of the whole file, in bytes.
    pub size: u64,
    /// Metadata and tensor infos.
    pub(crate) content: gguf_file::Content,
}

impl GgufHeader {
    /// Reads and checks the header of the file at `path`.
    ///
    /// # Errors
    /// See [`HeaderError`].
    pub fn read(path: &Path) -> Result<Self, HeaderError> {
        let open = |source| HeaderError::Open { path: path.to_owned(), source };
        let file = regular_file::open(path)?;
        let meta = file.metadata().map_err(open)?;
        if !meta.is_file() {
            return Err(HeaderError::NotGguf { path: path.to_owned() });
        }
        let size = meta.len();
        let mut reader = BufReader::new(file);
        validate(&mut reader, size).map_err(|fault| match fault {
            HeaderFault::NotGguf => HeaderError::NotGguf { path: path.to_owned() },
            HeaderFault::Corrupt(what) => HeaderError::Corrupt { path: path.to_owned(), what },
            HeaderFault::Unsupported(what) => HeaderError::Unsupported { path: path.to_owned(), what },
            HeaderFault::Io(source) => open(source),
        })?;
        reader.seek(SeekFrom::Start(0)).map_err(open)?;
        let content = gguf_file::Content::read(&mut reader)
            .map_err(|error| HeaderError::Corrupt { path: path.to_owned(), what: error.to_string() })?;
        Ok(Self { path: path.to_owned(), size, content })
    }

    /// Reads all values of a tensor as F32, in storage order.
    pub(crate) fn vector(&self, name: &str) -> Result<Vec<f32>, HeaderError> {
        let open = |source| HeaderError::Open { path: self.path.clone(), source };
        let mut reader = BufReader::new(File::open(&self.path).map_err(open)?);
        let read = self.content.tensor(&mut reader, name, &candle_core::Device::Cpu);
        read.and_then(|t| t.dequantize(&candle_core::Device::Cpu)?.flatten_all()?.to_vec1())
            .map_err(|error| HeaderError::Corrupt { path: self.path.clone(), what: format!("tensor {name}: {error}") })
    }

    pub(crate) fn unsupported(&self, what: impl Into<String>) -> HeaderError {
        HeaderError::Unsupported { path: self.path.clone(), what: what.into() }
    }

    fn value(&self, key: &str) -> Option<&gguf_file::Value> {
        self.content.metadata.get(key)
    }

    /// The value of `key` as a string; `None` if absent or of another type.
    pub(crate) fn get_str(&self, key: &str) -> Option<&str> {
        match self.value(key)? {
            gguf_file::Value::String(text) => Some(text),
            _ => None,
        }
    }

    /// The value of `key`, a non-negative integer of any width; `None` if absent or of another type.
    pub(crate) fn get_u64(&self, key: &str) -> Option<u64> {
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

    /// The value of `key` as a floating-point number; `None` if absent or of another type.
    pub(crate) fn get_f32(&self, key: &str) -> Option<f32> {
        match self.value(key)? {
            gguf_file::Value::F32(v) => Some(*v),
            gguf_file::Value::F64(v) => Some(*v as f32),
            _ => None,
        }
    }

    /// The value of `key` as a boolean; `None` if absent or of another type.
    pub(crate) fn get_bool(&self, key: &str) -> Option<bool> {
        match self.value(key)? {
            gguf_file::Value::Bool(v) => Some(*v),
            _ => None,
        }
    }

    /// The value of `key` as an array of strings; `None` if absent or of another type.
    pub(crate) fn get_strs(&self, key: &str) -> Option<Vec<&str>> {
        let gguf_file::Value::Array(values) = self.value(key)? else { return None };
        values
            .iter()
            .map(|v| match v {
                gguf_file::Value::String(text) => Some(text.as_str()),
                _ => None,
            })
            .collect()
    }

    /// The value of `key` as an array of floating-point numbers; `None` if absent or of another type.
    pub(crate) fn get_f32s(&self, key: &str) -> Option<Vec<f32>> {
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

    /// The value of `key`, an array of integers of any width; `None` if absent or of another type.
    pub(crate) fn get_i64s(&self, key: &str) -> Option<Vec<i64>> {
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

/// Converts candle's type to the format that the memory estimate uses; `None` if there are no matrix kernels for it.
pub(crate) fn format_of(dtype: GgmlDType) -> Option<WeightFormat> {
    Some(match dtype {
        GgmlDType::F32 => WeightFormat::F32,
        GgmlDType::F16 => WeightFormat::F16,
        GgmlDType::BF16 => WeightFormat::Bf16,
        GgmlDType::Q4_0 => WeightFormat::Q4_0,
        GgmlDType::Q4_1 => WeightFormat::Q4_1,
        GgmlDType::Q5_0 => WeightFormat::Q5_0,
        GgmlDType::Q5_1 => WeightFormat::Q5_1,
        GgmlDType::Q8_0 => WeightFormat::Q8_0,
        GgmlDType::Q8_1 => WeightFormat::Q8_1,
        GgmlDType::Q2K => WeightFormat::Q2K,
        GgmlDType::Q3K => WeightFormat::Q3K,
        GgmlDType::Q4K => WeightFormat::Q4K,
        GgmlDType::Q5K => WeightFormat::Q5K,
        GgmlDType::Q6K => WeightFormat::Q6K,
        GgmlDType::Q8K => WeightFormat::Q8K,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A header with one metadata entry or one tensor, and space for the tensor's data.
    fn header(tensors: u64, entries: u64, name: &str, rest: &[&[u8]]) -> Vec<u8> {
        let mut bytes = b"GGUF\x03\0\0\0".to_vec();
        for number in [tensors, entries, name.len() as u64] {
            bytes.extend_from_slice(&number.to_le_bytes());
        }
        bytes.extend_from_slice(name.as_bytes());
        bytes.extend_from_slice(&rest.concat());
        bytes.extend_from_slice(&[0; 128]);
        bytes
    }

    #[test]
    fn names_with_a_nul_are_refused() {
        // An alignment of zero: the parser strips NULs from the end of a name and divides by the alignment.
        let alignment = |key: &str| header(0, 1, key, &[&4u32.to_le_bytes(), &0u32.to_le_bytes()]);
        // One dimension of one F32 at offset 0.
        let tensor = |name: &str| {
            let entry = [&1u32.to_le_bytes()[..], &1u64.to_le_bytes(), &0u32.to_le_bytes(), &0u64.to_le_bytes()];
            header(1, 0, name, &entry)
        };
        let read = |bytes: &[u8]| {
            let mut file = tempfile::NamedTempFile::new().unwrap();
            std::io::Write::write_all(&mut file, bytes).unwrap();
            GgufHeader::read(file.path())
        };
        read(&tensor("a")).unwrap();
        for bytes in [alignment("general.alignment\0"), tensor("a\0"), tensor("a\0b")] {
            let error = read(&bytes).unwrap_err();
            assert!(matches!(&error, HeaderError::Corrupt { what, .. } if what.contains("NUL")), "{error}");
        }
    }
}
