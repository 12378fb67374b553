//! Model files and what they describe: file formats and their metadata, tokenizer, chat template, architecture, RoPE.

pub(crate) mod architecture;
pub mod chat_template;
pub(crate) mod control_names;
pub mod file;
pub mod gguf;
pub(crate) mod memory_terms;
pub mod prompt_text;
pub mod random;
pub(crate) mod rope;
pub(crate) mod rope_scaling;
pub(crate) mod safetensors;
pub(crate) mod stand_ins;
pub(crate) mod tensors;
pub mod time_limit;
pub mod tokenizer;
pub(crate) mod unsupported_config;
