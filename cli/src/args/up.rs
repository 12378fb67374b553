//! Arguments of `cfq up` and `cfq demo`.

use std::net::SocketAddr;
use std::path::PathBuf;

use cfq_proto::model::ModelId;
use clap::{Args, ValueEnum};

#[derive(Debug, Args)]
pub struct UpArgs {
    /// Run in the background; the command returns once everything is ready
    #[arg(short, long)]
    pub detach: bool,
    /// Address of the HTTP API, for example localhost:7711 [default: server.bind in cfq.toml, else 127.0.0.1:7710]
    #[arg(long, env = "CFQ_BIND", value_name = "ADDR:PORT", value_parser = crate::bind::parse)]
    pub bind: Option<SocketAddr>,
    /// Let other machines reach this one, with TLS, and print the command with which they join
    #[arg(long, conflicts_with = "allow_plaintext")]
    pub lan: bool,
    /// Serve plain HTTP on an address other than loopback; also needs server.allow_plaintext in cfq.toml
    #[arg(long)]
    pub allow_plaintext: bool,
    #[command(flatten)]
    pub services: ServiceArgs,
    /// Default model for agents that have none configured (internal: `cfq up -d` passes its choice to the background
    /// process)
    #[arg(long, value_name = "MODEL", hide = true)]
    pub default_model: Option<ModelId>,
}

#[derive(Debug, Clone, Args)]
pub struct ServiceArgs {
    /// Postgres and NATS programs to run: installed ones (found), fetched ones (fetched), or installed ones where they
    /// exist and fetched ones otherwise (auto) [default: services.source in cfq.toml, else auto]
    // CFQ_ENGINES, the variable's name in cfq 0.1, is read in `config::service_options`.
    #[arg(long = "services", alias = "engines", value_enum, value_name = "SOURCE", env = "CFQ_SERVICES")]
    pub source: Option<SourceArg>,
    /// Folder of the Postgres programs to run, initdb and postgres, for example /usr/lib/postgresql/17/bin
    #[arg(long, value_name = "DIR", env = "CFQ_POSTGRES_BIN")]
    pub postgres_bin: Option<PathBuf>,
    /// Path of the nats-server program to run, for example /usr/local/bin/nats-server
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
    /// Model of both agents, for example ollama:box/qwen3:8b [default: the configured models, else a small model]
    #[arg(long)]
    pub model: Option<ModelId>,
    /// Sampling seed of the example task, for example 7
    #[arg(long, default_value_t = 7)]
    pub seed: u64,
    /// Print only the result
    #[arg(long)]
    pub quiet: bool,
    #[command(flatten)]
    pub services: ServiceArgs,
}
