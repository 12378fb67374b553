//! One interface to the metadata of a model in either format: a GGUF file, or a folder in the Hugging Face layout.

use std::path::Path;

use cfq_memory::WeightFormat;

use crate::model::gguf::{GgufHeader, HeaderError, format_of};
use crate::model::safetensors::{self, ModelFolder};

/// The name of one metadata value in GGUF files and in config.json.
#[derive(Debug, Clone, Copy)]
pub struct MetadataKey {
    /// Key in a GGUF header, without the prefix that consists of the architecture's name and a dot.
    pub gguf: &'static str,
    /// Path in config.json; dots separate the keys of nested objects.
    pub config: &'static str,
}

/// Shape and format of a tensor, known before it is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorMeta {
    /// Dimensions, rows first.
    pub dims: Vec<u64>,
    /// Number format; `None` if there are no matrix kernels for it.
    pub format: Option<WeightFormat>,
}

/// A model's file or folder. Its metadata was read and checked; its weights were not read.
#[derive(Debug)]
pub enum ModelFile {
    /// A GGUF file.
    Gguf(GgufHeader),
    /// A folder with config.json and safetensors files.
    Folder(ModelFolder),
}

impl ModelFile {
    /// Reads the metadata of the GGUF file, safetensors file, safetensors index or folder at `path`.
    ///
    /// # Errors
    /// See [`HeaderError`].
    pub fn read(path: &Path) -> Result<Self, HeaderError> {
        if path.is_dir() || safetensors::has_weights_name(path) {
            ModelFolder::read(path).map(Self::Folder)
        } else {
            GgufHeader::read(path).map(Self::Gguf)
        }
    }

    /// Path of the GGUF file or of the folder.
    pub fn path(&self) -> &Path {
        match self {
            Self::Gguf(header) => &header.path,
            Self::Folder(folder) => &folder.path,
        }
    }

    /// Size of the GGUF file or of all safetensors files, in bytes.
    pub fn size(&self) -> u64 {
        match self {
            Self::Gguf(header) => header.size,
            Self::Folder(folder) => folder.size,
        }
    }

    /// Whether this is a GGUF file.
    pub fn is_gguf(&self) -> bool {
        matches!(self, Self::Gguf(_))
    }

    /// The architecture's name in this file: `general.architecture` in GGUF, `model_type` in config.json.
    pub fn architecture(&self) -> &str {
        match self {
            Self::Gguf(header) => header.get_str("general.architecture").unwrap_or("(none)"),
            Self::Folder(folder) => folder.config.get("model_type").and_then(|v| v.as_str()).unwrap_or("(none)"),
        }
    }

    fn gguf_key(&self, key: MetadataKey) -> String {
        format!("{}.{}", self.architecture(), key.gguf)
    }

    /// The full name of `key` in this file (GGUF key or path in config.json), for error messages.
    pub fn key_name(&self, key: MetadataKey) -> String {
        match self {
            Self::Gguf(_) => self.gguf_key(key),
            Self::Folder(_) => key.config.to_owned(),
        }
    }

    /// A value of config.json; dots in `path` separate the keys of nested objects. Null counts as absent. Always `None`
    /// for GGUF.
    pub fn config(&self, path: &str) -> Option<&serde_json::Value> {
        match self {
            Self::Gguf(_) => None,
            Self::Folder(folder) => {
                path.split('.').try_fold(&folder.config, |value, part| value.get(part)).filter(|v| !v.is_null())
            }
        }
    }

    /// The value of `key` as a non-negative integer; `None` if absent or of another type.
    pub fn get_u64(&self, key: MetadataKey) -> Option<u64> {
        match self {
            Self::Gguf(header) => header.get_u64(&self.gguf_key(key)),
            Self::Folder(_) => self.config(key.config)?.as_u64(),
        }
    }

    /// The value of `key` as a floating-point number; `None` if absent or of another type.
    pub fn get_f32(&self, key: MetadataKey) -> Option<f32> {
        match self {
            Self::Gguf(header) => header.get_f32(&self.gguf_key(key)),
            Self::Folder(_) => self.config(key.config)?.as_f64().map(|v| v as f32),
        }
    }

    /// [`HeaderError::Unsupported`] for this file; `what` continues "FILE cannot be used: ".
    pub fn unsupported(&self, what: impl Into<String>) -> HeaderError {
        HeaderError::Unsupported { path: self.path().to_owned(), what: what.into() }
    }

    /// Shape and format of the tensor; `None` if the file does not have it.
    pub fn tensor(&self, name: &str) -> Option<TensorMeta> {
        match self {
            Self::Gguf(header) => {
                let info = header.content.tensor_infos.get(name)?;
                let dims = info.shape.dims().iter().map(|d| *d as u64).collect();
                Some(TensorMeta { dims, format: format_of(info.ggml_dtype) })
            }
            Self::Folder(folder) => {
                let stored = folder.tensors.get(name)?;
                Some(TensorMeta { dims: stored.dims.clone(), format: Some(stored.format) })
            }
        }
    }

    /// Names of all tensors, in no particular order.
    pub fn tensor_names(&self) -> Vec<&str> {
        match self {
            Self::Gguf(header) => header.content.tensor_infos.keys().map(String::as_str).collect(),
            Self::Folder(folder) => folder.tensors.keys().map(String::as_str).collect(),
        }
    }
}
