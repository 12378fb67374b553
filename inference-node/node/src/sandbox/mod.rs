//! Child processes that parse what comes from strangers: the headers of model files, tokenizers and chat templates.
//!
//! A chat template is a program, and a tokenizer contains regular expressions. Their memory cannot be limited inside the
//! node's process, and a thread cannot be killed. So a child process, another start of the same program, does this work:
//! - Before a model is loaded, [`Sandbox::inspect`] reads everything in its file except the weights, and renders test
//!   conversations. The node opens the file only after that.
//! - [`Sandbox::start`] starts a child that stays as long as the model is loaded and turns messages into tokens.
//!
//! A child has an empty environment and no files but the model's; `limits.rs` lists its other limits. A child that
//! exceeds its memory or time is killed: the prompt fails, and the next prompt gets a new child. After
//! [`MAX_CONSECUTIVE_KILLS`] kills in a row, the model takes no more prompts until it is loaded again.

mod client;
mod limits;
mod messages;
mod prompts;
mod serve;

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use cfq_engine::ModelFacts;
use cfq_memory::Bytes;
use cfq_proto::model::ModelId;

use self::client::Child;
pub use self::messages::FileFault;
pub use self::prompts::SandboxedPrompts;
pub use self::serve::serve;

/// Limits of a child that this kernel does not offer, in words; empty if it offers all, or on systems other than Linux.
pub fn missing_limits() -> Vec<&'static str> {
    limits::missing()
}

/// Number of prompts in a row whose child is killed, after which the model takes no more prompts.
pub const MAX_CONSECUTIVE_KILLS: u32 = 3;

/// Limits of a child process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SandboxLimits {
    /// Maximum address space without that of the program itself, in bytes.
    pub memory_bytes: u64,
    /// Maximum time from the start until the file is read.
    pub start: Duration,
    /// Maximum time for one prompt.
    pub prompt: Duration,
}

impl Default for SandboxLimits {
    /// The tokenizer of the largest published vocabularies takes less than a gigabyte while it is read, and a prompt of
    /// a million tokens takes half a gigabyte and some seconds.
    fn default() -> Self {
        Self { memory_bytes: 2 << 30, start: Duration::from_secs(60), prompt: Duration::from_secs(30) }
    }
}

/// How child processes are started: a program and its arguments, with which it calls [`serve`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sandbox {
    /// The program.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// Limits of each child.
    pub limits: SandboxLimits,
}

/// Why a child process did not do its work.
#[derive(Debug, thiserror::Error)]
pub enum SandboxError {
    /// The process or its thread was not started.
    #[error("cannot start the process that reads {path}")]
    Start {
        /// Path of the model.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// The file cannot be used.
    #[error("{detail}")]
    File {
        /// Kind of the fault.
        fault: FileFault,
        /// The error, with its causes.
        detail: String,
    },
    /// The child was killed because of its time.
    #[error("it takes longer than {} s", limit.as_secs_f64())]
    OutOfTime {
        /// The limit.
        limit: Duration,
    },
    /// The child ended by itself or was killed by the kernel.
    #[error("its process ended with {exit}, most likely because it needs more than {}", Bytes(*memory_bytes))]
    Ended {
        /// The exit code or the signal.
        exit: String,
        /// The child's limit of memory.
        memory_bytes: u64,
    },
    /// The child's reply is invalid.
    #[error("its process sent an invalid reply: {reason}")]
    Reply {
        /// What is wrong with it.
        reason: String,
    },
    /// The caller no longer waits for the reply.
    #[error("it was cancelled")]
    Cancelled,
}

impl Sandbox {
    /// Starts the running program again, with these arguments.
    ///
    /// # Errors
    /// If its path is unknown.
    pub fn of_this_program<A: Into<OsString>>(args: impl IntoIterator<Item = A>) -> io::Result<Self> {
        // On Linux this path names the running program even after its file was replaced.
        let program = match cfg!(target_os = "linux") {
            true => PathBuf::from("/proc/self/exe"),
            false => std::env::current_exe()?,
        };
        Ok(Self { program, args: args.into_iter().map(Into::into).collect(), limits: SandboxLimits::default() })
    }

    /// Reads the file or folder at `path` in a child, except its weights, and renders test conversations. Blocks.
    ///
    /// # Errors
    /// [`SandboxError`].
    pub fn inspect(&self, path: &Path) -> Result<ModelFacts, SandboxError> {
        Child::start(self, path).map(|(_child, facts)| facts)
    }

    /// Starts the child that prepares the prompts of `model`, whose file or folder is at `path`. Blocks until the child
    /// has read the file.
    ///
    /// # Errors
    /// [`SandboxError`].
    pub fn start(&self, model: &ModelId, path: &Path) -> Result<(SandboxedPrompts, ModelFacts), SandboxError> {
        SandboxedPrompts::start(self.clone(), model.clone(), path.to_owned())
    }
}
