//! Reads a model folder in the Hugging Face layout: config.json and safetensors files.
//!
//! The files are not trusted. A safetensors file begins with an eight-byte length and a JSON header of that length,
//! which names its tensors; every extent is checked against the file's size before a tensor is read. Format:
//! <https://github.com/huggingface/safetensors#format>.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};

use candle_core::{DType, Device, Tensor};
use cfq_memory::{Bytes, WeightFormat};
use serde::de::{Error, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use crate::model::gguf::{HeaderError, regular_file};

/// Maximum size of one file's JSON header, in bytes. The format allows 100 MB; the headers of the largest models have 2
/// MB. Parsing takes several times the header's size in memory.
const MAX_HEADER_BYTES: u64 = 16 << 20;
/// Maximum number of tensors in one file: a hundred times what the largest models have.
const MAX_TENSORS: usize = 100_000;
/// Maximum number of dimensions of a tensor.
const MAX_DIMS: usize = 8;
/// Maximum size of config.json, tokenizer.json and other text files, in bytes.
const MAX_TEXT_BYTES: u64 = 64 << 20;

/// Entry of a tensor in the JSON header.
#[derive(Debug, Clone, Deserialize)]
struct HeaderEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// The tensors in a file's JSON header. Parsed entry by entry, so that content that describes no tensor is never built
/// in memory, and a duplicate name is an error.
struct HeaderEntries(BTreeMap<String, HeaderEntry>);

impl<'de> Deserialize<'de> for HeaderEntries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct EntriesVisitor;
        impl<'de> Visitor<'de> for EntriesVisitor {
            type Value = HeaderEntries;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<HeaderEntries, A::Error> {
                let mut entries = BTreeMap::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                        continue;
                    }
                    let entry: HeaderEntry =
                        map.next_value().map_err(|e| A::Error::custom(format!("tensor {name}: {e}")))?;
                    if entry.shape.len() > MAX_DIMS {
                        let dims = entry.shape.len();
                        let what = format!("tensor {name} has {dims} dimensions, more than {MAX_DIMS}");
                        return Err(A::Error::custom(what));
                    }
                    if entries.len() == MAX_TENSORS {
                        return Err(A::Error::custom(format!("more than {MAX_TENSORS} tensors")));
                    }
                    if entries.contains_key(&name) {
                        return Err(A::Error::custom(format!("tensor {name} is listed twice")));
                    }
                    entries.insert(name, entry);
                }
                Ok(HeaderEntries(entries))
            }
        }
        deserializer.deserialize_map(EntriesVisitor)
    }
}

/// Shape, format and location of a tensor.
#[derive(Debug, Clone)]
pub struct StoredTensor {
    /// Number format of the tensor's values.
    pub format: WeightFormat,
    /// Dimensions, rows first.
    pub dims: Vec<u64>,
    /// Index in [`ModelFolder::files`].
    file: usize,
    /// Offset of the tensor's first byte in the file.
    offset: u64,
    /// Size of the tensor, in bytes.
    bytes: u64,
}

/// A model folder. All sizes in its files' headers were checked against the files' sizes.
#[derive(Debug)]
pub struct ModelFolder {
    /// Path of the folder.
    pub path: PathBuf,
    /// Size of all its safetensors files, in bytes.
    pub size: u64,
    /// Content of config.json.
    pub config: serde_json::Value,
    files: Vec<PathBuf>,
    /// The tensors of all files, by name.
    pub tensors: BTreeMap<String, StoredTensor>,
}

impl ModelFolder {
    /// Reads config.json and the safetensors headers. `named` is the folder, one of its safetensors files, or their
    /// index.
    ///
    /// # Errors
    /// See [`HeaderError`].
    pub fn read(named: &Path) -> Result<Self, HeaderError> {
        let path = if named.is_dir() { named } else { named.parent().unwrap_or(Path::new(".")) };
        let config = read_json(&path.join("config.json"))?.ok_or_else(|| {
            unsupported(path, "it has no config.json; supported are GGUF files and folders in the Hugging Face layout")
        })?;
        let files = match named {
            folder if folder.is_dir() => tensor_files(folder)?,
            file if is_index(file) => files_of_index(file)?,
            file => vec![file.to_owned()],
        };
        let mut tensors = BTreeMap::new();
        let mut size = 0;
        for (at, file) in files.iter().enumerate() {
            size += read_tensors(at, file, &mut tensors)?;
        }
        Ok(Self { path: path.to_owned(), size, config, files, tensors })
    }

    /// Reads a JSON file of the folder; `None` if it does not exist.
    ///
    /// # Errors
    /// [`HeaderError::Open`], or [`HeaderError::Corrupt`] if it is not JSON.
    pub fn json(&self, name: &str) -> Result<Option<serde_json::Value>, HeaderError> {
        read_json(&self.path.join(name))
    }

    /// Reads a text file of the folder; `None` if it does not exist.
    ///
    /// # Errors
    /// [`HeaderError::Open`], or [`HeaderError::Corrupt`] if it is too large or not UTF-8.
    pub fn text(&self, name: &str) -> Result<Option<String>, HeaderError> {
        read_text(&self.path.join(name))
    }

    /// [`HeaderError::Unsupported`] for this folder.
    pub fn unsupported(&self, what: impl Into<String>) -> HeaderError {
        unsupported(&self.path, what)
    }

    /// Reads a tensor and converts it to F32.
    ///
    /// # Errors
    /// An I/O error, or an error if there is no such tensor.
    pub fn tensor(&self, name: &str) -> candle_core::Result<Tensor> {
        let Some(stored) = self.tensors.get(name) else { candle_core::bail!("tensor {name} is missing") };
        let mut file = File::open(&self.files[stored.file])?;
        file.seek(SeekFrom::Start(stored.offset))?;
        let mut bytes = vec![0; stored.bytes as usize];
        file.read_exact(&mut bytes)?;
        let dtype = match stored.format {
            WeightFormat::F16 => DType::F16,
            WeightFormat::Bf16 => DType::BF16,
            WeightFormat::F32 => DType::F32,
            WeightFormat::Q4_0
            | WeightFormat::Q4_1
            | WeightFormat::Q5_0
            | WeightFormat::Q5_1
            | WeightFormat::Q8_0
            | WeightFormat::Q8_1
            | WeightFormat::Q2K
            | WeightFormat::Q3K
            | WeightFormat::Q4K
            | WeightFormat::Q5K
            | WeightFormat::Q6K
            | WeightFormat::Q8K => candle_core::bail!("tensor {name} is in a format that safetensors does not have"),
        };
        let dims: Vec<usize> = stored.dims.iter().map(|d| *d as usize).collect();
        Tensor::from_raw_buffer(&bytes, dtype, &dims, &Device::Cpu)?.to_dtype(DType::F32)
    }
}

fn unsupported(path: &Path, what: impl Into<String>) -> HeaderError {
    HeaderError::Unsupported { path: path.to_owned(), what: what.into() }
}

fn corrupt(path: &Path, what: impl Into<String>) -> HeaderError {
    HeaderError::Corrupt { path: path.to_owned(), what: what.into() }
}

fn read_text(path: &Path) -> Result<Option<String>, HeaderError> {
    let open = |source| HeaderError::Open { path: path.to_owned(), source };
    let file = match regular_file::open(path) {
        Ok(file) => file,
        Err(HeaderError::Open { source, .. }) if source.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error),
    };
    let mut text = String::new();
    let read = file.take(MAX_TEXT_BYTES + 1).read_to_string(&mut text);
    match read {
        Ok(length) if length as u64 > MAX_TEXT_BYTES => {
            Err(corrupt(path, format!("it is larger than {}", Bytes(MAX_TEXT_BYTES))))
        }
        Ok(_) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::InvalidData => Err(corrupt(path, "it is not UTF-8")),
        Err(error) => Err(open(error)),
    }
}

fn read_json(path: &Path) -> Result<Option<serde_json::Value>, HeaderError> {
    let parse = |text: String| serde_json::from_str(&text).map_err(|e| corrupt(path, e.to_string()));
    read_text(path)?.map(parse).transpose()
}

/// The folder's safetensors files: model.safetensors, or the files that its index lists.
fn tensor_files(folder: &Path) -> Result<Vec<PathBuf>, HeaderError> {
    let single = folder.join("model.safetensors");
    if single.exists() {
        return Ok(vec![single]);
    }
    let index = folder.join("model.safetensors.index.json");
    if !index.exists() {
        return Err(unsupported(folder, "it has neither model.safetensors nor model.safetensors.index.json"));
    }
    files_of_index(&index)
}

/// Whether `path` has the name of a safetensors file or of an index of them.
pub fn has_weights_name(path: &Path) -> bool {
    path.extension().is_some_and(|e| e == "safetensors") || is_index(path)
}

fn is_index(path: &Path) -> bool {
    path.file_name().is_some_and(|n| n.to_string_lossy().ends_with(".safetensors.index.json"))
}

/// The files that an index lists.
fn files_of_index(index: &Path) -> Result<Vec<PathBuf>, HeaderError> {
    let map = read_json(index)?.ok_or_else(|| unsupported(index, "it does not exist"))?;
    let map =
        map.get("weight_map").and_then(|m| m.as_object()).ok_or_else(|| corrupt(index, "it has no weight_map"))?;
    let mut names: Vec<&str> = map.values().filter_map(|v| v.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    // A name with a folder in it could point anywhere on the disk.
    if names.iter().any(|n| Path::new(n).components().count() != 1 || *n == "..") {
        return Err(corrupt(index, "it lists files outside its folder"));
    }
    Ok(names.into_iter().map(|n| index.with_file_name(n)).collect())
}

/// Adds the tensors of the safetensors file `path`, the folder's file number `at`; returns the file's size in bytes.
fn read_tensors(at: usize, path: &Path, tensors: &mut BTreeMap<String, StoredTensor>) -> Result<u64, HeaderError> {
    let open = |source| HeaderError::Open { path: path.to_owned(), source };
    let mut file = regular_file::open(path)?;
    let size = file.metadata().map_err(open)?.len();
    let mut length = [0; 8];
    file.read_exact(&mut length).map_err(|_| corrupt(path, "it is too short"))?;
    let length = u64::from_le_bytes(length);
    let Some(start) = length.checked_add(8).filter(|start| *start <= size && length <= MAX_HEADER_BYTES) else {
        let (claimed, size, max) = (Bytes(length), Bytes(size), Bytes(MAX_HEADER_BYTES));
        let what = format!(
            "its header claims a length of {claimed}; the file has {size}, and a header may have at most {max}"
        );
        return Err(corrupt(path, what));
    };
    let mut json = vec![0; length as usize];
    file.read_exact(&mut json).map_err(open)?;
    let HeaderEntries(entries) =
        serde_json::from_slice(&json).map_err(|e| corrupt(path, format!("its header cannot be parsed: {e}")))?;
    let mut extents: Vec<([u64; 2], &str)> = entries.iter().map(|(name, e)| (e.data_offsets, name.as_str())).collect();
    extents.sort_unstable();
    for pair in extents.windows(2) {
        let [([_, end], first), ([begin, _], second)] = pair else { continue };
        if end > begin {
            return Err(corrupt(path, format!("tensors {first} and {second} overlap")));
        }
    }
    for (name, entry) in &entries {
        let format = match entry.dtype.as_str() {
            "F32" => WeightFormat::F32,
            "F16" => WeightFormat::F16,
            "BF16" => WeightFormat::Bf16,
            // Buffers that some exporters write; the engine reads none of them.
            "I64" | "I32" | "BOOL" | "U8" => continue,
            other => {
                let what = format!("tensor {name} has the type {other}; supported are F32, F16 and BF16");
                return Err(unsupported(path, what));
            }
        };
        let values = entry.shape.iter().try_fold(1u64, |all, d| all.checked_mul(*d));
        let bytes = values.and_then(|v| format.bytes(v));
        let [begin, end] = entry.data_offsets;
        let file_end = start.checked_add(end);
        if bytes.is_none_or(|bytes| begin.checked_add(bytes) != Some(end)) || file_end.is_none_or(|at| at > size) {
            return Err(corrupt(path, format!("tensor {name} does not lie within the file's {}", Bytes(size))));
        }
        if tensors.contains_key(name) {
            return Err(corrupt(path, format!("tensor {name} is in another file of this model too")));
        }
        let (dims, offset, bytes) = (entry.shape.clone(), start + begin, end - begin);
        tensors.insert(name.clone(), StoredTensor { format, dims, file: at, offset, bytes });
    }
    Ok(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(header: &str, data: usize) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("config.json"), "{}").unwrap();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header.as_bytes());
        bytes.extend(vec![0; data]);
        std::fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
        folder
    }

    #[test]
    fn tensor_outside_its_file_is_corrupt() {
        let header = r#"{"a":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}"#;
        assert_eq!(ModelFolder::read(folder(header, 16).path()).unwrap().tensors["a"].dims, [2, 2]);
        let error = ModelFolder::read(folder(header, 15).path()).unwrap_err().to_string();
        assert!(error.contains("tensor a does not lie within"), "{error}");
        let wrapped = r#"{"a":{"dtype":"F32","shape":[4294967296,4294967296,2],"data_offsets":[0,16]}}"#;
        assert!(matches!(ModelFolder::read(folder(wrapped, 16).path()), Err(HeaderError::Corrupt { .. })));
    }

    #[test]
    fn huge_deep_ambiguous_or_overlapping_header_is_corrupt() {
        let error = |header: &str| ModelFolder::read(folder(header, 16).path()).unwrap_err().to_string();
        let one = r#""dtype":"F32","shape":[2],"data_offsets""#;
        let overlapping = error(&format!(r#"{{"a":{{{one}:[0,8]}},"b":{{{one}:[4,12]}}}}"#));
        assert!(overlapping.contains("a and b overlap"), "{overlapping}");
        let twice = error(&format!(r#"{{"a":{{{one}:[0,8]}},"a":{{{one}:[8,16]}}}}"#));
        assert!(twice.contains("a is listed twice"), "{twice}");
        let flat = error(&format!(r#"{{"a":{{"dtype":"F32","shape":{:?},"data_offsets":[0,4]}}}}"#, [1; 9]));
        assert!(flat.contains("9 dimensions"), "{flat}");
        let nested = format!("{}1{}", "[".repeat(100_000), "]".repeat(100_000));
        let deep = error(&format!(r#"{{"a":{{"dtype":"F32","shape":{nested},"data_offsets":[0,4]}}}}"#));
        assert!(deep.contains("tensor a: invalid type"), "{deep}");
        let skipped = folder(&format!(r#"{{"__metadata__":{nested}}}"#), 0);
        assert!(ModelFolder::read(skipped.path()).unwrap().tensors.is_empty());
        let wide = error(&format!(r#"{{"__metadata__":"{}"}}"#, "x".repeat(17 << 20)));
        assert!(wide.contains("its header claims a length of 17.0 MiB"), "{wide}");
        let many: Vec<String> = (0..100_001).map(|n| format!(r#""{n}":{{{one}:[0,0]}}"#)).collect();
        let many = error(&format!("{{{}}}", many.join(",")));
        assert!(many.contains("more than 100000 tensors"), "{many}");
    }

    #[test]
    fn missing_weights_and_index_outside_the_folder_are_rejected() {
        let empty = tempfile::tempdir().unwrap();
        assert!(ModelFolder::read(empty.path()).unwrap_err().to_string().contains("no config.json"));
        std::fs::write(empty.path().join("config.json"), "{}").unwrap();
        assert!(ModelFolder::read(empty.path()).unwrap_err().to_string().contains("neither model.safetensors"));
        let index = r#"{"weight_map":{"a":"../../etc/passwd"}}"#;
        std::fs::write(empty.path().join("model.safetensors.index.json"), index).unwrap();
        assert!(ModelFolder::read(empty.path()).unwrap_err().to_string().contains("outside its folder"));
    }
}
