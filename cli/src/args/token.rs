//! Arguments of `cfq token`.

use std::path::PathBuf;
use std::time::Duration;

use cfq_proto::http::ApiTokenRole;
use cfq_proto::ids::ApiTokenName;
use clap::{Args, Subcommand, ValueEnum};

use crate::local_time::parse_ttl;

#[derive(Debug, Subcommand)]
pub enum TokenCommand {
    /// Print the path of the file with the owner's API token, which allows everything and is also a key for OpenAI clients
    Path,
    /// Replace a token by a new one; the old one stops working at once, and running work continues
    Rotate {
        /// Name of a client's token, as printed by `cfq token ls`; it keeps its role, limits and tasks [default: the owner's
        /// token, in the file of `cfq token path`]
        #[arg(value_name = "NAME")]
        name: Option<ApiTokenName>,
    },
    /// Create a token: for a machine that joins, or for a client of the API
    Create(TokenCreateArgs),
    /// List the tokens of clients, and the join tokens that can still be used
    Ls,
    /// Revoke tokens
    #[command(group = clap::ArgGroup::new("which").args(["tokens", "all"]).required(true))]
    Rm {
        /// Names of API tokens, or ids of join tokens, as printed by `cfq token ls`
        #[arg(value_name = "NAME|ID")]
        tokens: Vec<String>,
        /// Revoke all join tokens; API tokens stay
        #[arg(long)]
        all: bool,
    },
}

#[derive(Debug, Args)]
pub struct TokenCreateArgs {
    /// What the token allows; without --role, it lets one machine join
    #[arg(long, default_value = "node")]
    pub role: RoleArg,
    /// Name of the token, for example editor; for a machine, the name that it must join under, for example gpu1
    /// [default for a machine: it chooses its name]
    #[arg(long)]
    pub name: Option<String>,
    /// How long the token is valid, for example 30m, 2h or 90d; at most 7d for a machine, 3650d otherwise [default: 30m for
    /// a machine, otherwise until it is revoked]
    #[arg(long, value_name = "TIME", value_parser = parse_ttl)]
    pub ttl: Option<Duration>,
    /// With the role submit: maximum number of tasks that have not ended, for example 50
    #[arg(long, value_name = "N")]
    pub open_tasks: Option<u32>,
    /// With the role submit: maximum number of tasks that run at the same time, for example 2; others wait
    #[arg(long, value_name = "N")]
    pub running_tasks: Option<u32>,
    /// With the role submit: maximum number of open calls of OpenAI clients, for example 4
    #[arg(long, value_name = "N")]
    pub calls: Option<u32>,
    /// With the role submit: repository on which its tasks may work, for example ~/shop; can be repeated [default: all]
    #[arg(long = "repo", value_name = "DIR")]
    pub repositories: Vec<PathBuf>,
}

/// What a token allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum RoleArg {
    /// Lets one machine join
    Node,
    /// Read the metrics
    Metrics,
    /// Read everything
    Read,
    /// Also submit tasks, control these tasks, and call models
    Submit,
    /// Everything
    Admin,
}

impl RoleArg {
    /// The role of an API token; `None` for a join token.
    pub fn of_api(self) -> Option<ApiTokenRole> {
        match self {
            Self::Node => None,
            Self::Metrics => Some(ApiTokenRole::Metrics),
            Self::Read => Some(ApiTokenRole::Read),
            Self::Submit => Some(ApiTokenRole::Submit),
            Self::Admin => Some(ApiTokenRole::Admin),
        }
    }
}
