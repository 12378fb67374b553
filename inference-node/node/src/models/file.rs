//! A model's file or folder, whichever container it comes in, with one way to ask what it says.

use std::path::Path;

use cfq_memory::Format;

use crate::models::header::{Header, HeaderError, format_of};
use crate::models::safetensors::{self, Folder};

/// One fact under both of its names: in a GGUF header (after the architecture's name and a dot), and in config.json.
#[derive(Debug, Clone, Copy)]
pub struct Key {
    pub gguf: &'static str,
    pub config: &'static str,
}

/// What is known of a tensor before it is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorFacts {
    /// Rows first.
    pub dims: Vec<u64>,
    /// `None`: a format without matrix kernels.
    pub format: Option<Format>,
}

#[derive(Debug)]
pub enum ModelFile {
    Gguf(Header),
    Folder(Folder),
}

impl ModelFile {
    /// Reads what stands before the weights.
    pub fn read(path: &Path) -> Result<Self, HeaderError> {
        if path.is_dir() || safetensors::is_named(path) {
            Folder::read(path).map(Self::Folder)
        } else {
            Header::read(path).map(Self::Gguf)
        }
    }

    pub fn path(&self) -> &Path {
        match self {
            Self::Gguf(header) => &header.path,
            Self::Folder(folder) => &folder.path,
        }
    }

    /// Bytes on disk.
    pub fn size(&self) -> u64 {
        match self {
            Self::Gguf(header) => header.size,
            Self::Folder(folder) => folder.size,
        }
    }

    pub fn is_gguf(&self) -> bool {
        matches!(self, Self::Gguf(_))
    }

    /// The architecture's name in this container's words.
    pub fn architecture(&self) -> &str {
        match self {
            Self::Gguf(header) => header.text("general.architecture").unwrap_or("(none)"),
            Self::Folder(folder) => folder.config.get("model_type").and_then(|v| v.as_str()).unwrap_or("(none)"),
        }
    }

    fn gguf_key(&self, key: Key) -> String {
        format!("{}.{}", self.architecture(), key.gguf)
    }

    /// The name by which a message should call the fact.
    pub fn name_of(&self, key: Key) -> String {
        match self {
            Self::Gguf(_) => self.gguf_key(key),
            Self::Folder(_) => key.config.to_owned(),
        }
    }

    /// A value of config.json; dots lead into objects. Null is absent.
    pub fn config(&self, path: &str) -> Option<&serde_json::Value> {
        match self {
            Self::Gguf(_) => None,
            Self::Folder(folder) => {
                path.split('.').try_fold(&folder.config, |value, part| value.get(part)).filter(|v| !v.is_null())
            }
        }
    }

    pub fn number(&self, key: Key) -> Option<u64> {
        match self {
            Self::Gguf(header) => header.number(&self.gguf_key(key)),
            Self::Folder(_) => self.config(key.config)?.as_u64(),
        }
    }

    pub fn real(&self, key: Key) -> Option<f32> {
        match self {
            Self::Gguf(header) => header.real(&self.gguf_key(key)),
            Self::Folder(_) => self.config(key.config)?.as_f64().map(|v| v as f32),
        }
    }

    pub fn unsupported(&self, what: impl Into<String>) -> HeaderError {
        HeaderError::Unsupported { path: self.path().to_owned(), what: what.into() }
    }

    pub fn tensor(&self, name: &str) -> Option<TensorFacts> {
        match self {
            Self::Gguf(header) => {
                let info = header.content.tensor_infos.get(name)?;
                let dims = info.shape.dims().iter().map(|d| *d as u64).collect();
                Some(TensorFacts { dims, format: format_of(info.ggml_dtype) })
            }
            Self::Folder(folder) => {
                let stored = folder.tensors.get(name)?;
                Some(TensorFacts { dims: stored.dims.clone(), format: Some(stored.format) })
            }
        }
    }

    pub fn tensor_names(&self) -> Vec<&str> {
        match self {
            Self::Gguf(header) => header.content.tensor_infos.keys().map(String::as_str).collect(),
            Self::Folder(folder) => folder.tensors.keys().map(String::as_str).collect(),
        }
    }
}
