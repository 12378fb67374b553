//! Arguments of `cfq join`, `cfq machines` and `cfq service`.

use cfq_proto::ids::NodeId;
use clap::{Args, Subcommand};

#[derive(Debug, Args)]
pub struct JoinArgs {
    /// URL of the server, such as https://192.168.1.5:7710 [default: the server that this machine joined]
    pub url: Option<String>,
    /// Join token that the server printed; `-` reads it from standard input
    pub token: Option<String>,
    /// Name of this machine in the cluster, for example gpu1 [default: the token's name, else the host name]
    #[arg(long, requires = "token")]
    pub name: Option<NodeId>,
    /// Run in the background; the command returns once this machine is connected
    #[arg(short, long)]
    pub detach: bool,
    /// This machine has joined just now (internal: for the background process)
    #[arg(long, hide = true)]
    pub just_joined: bool,
}

#[derive(Debug, Subcommand)]
pub enum MachinesCommand {
    /// List the machines that run models, and whether they are connected
    Ls,
    /// Give a machine no new work; what it runs continues
    Cordon {
        /// Name of the machine, as printed by `cfq machines ls`
        name: NodeId,
    },
    /// Give a cordoned machine work again
    Uncordon {
        /// Name of the machine, as printed by `cfq machines ls`
        name: NodeId,
    },
    /// Cordon a machine, and wait until it runs nothing
    Drain {
        /// Name of the machine, as printed by `cfq machines ls`
        name: NodeId,
        /// Maximum wait, for example 90s or 10m [default: none]
        #[arg(long, value_name = "TIME", value_parser = crate::local_time::parse_duration)]
        timeout: Option<std::time::Duration>,
    },
    /// Revoke a machine's access within seconds; to come back, it has to join again with a new token
    Revoke {
        /// Name of the machine, as printed by `cfq machines ls`
        name: NodeId,
    },
}

#[derive(Debug, Subcommand)]
pub enum ServiceCommand {
    /// Start cfq with this machine: `cfq join` if it has joined a server, else `cfq up`
    Install(ServiceInstallArgs),
    /// Stop cfq, and remove the unit
    Uninstall,
    /// Show whether the unit exists, is enabled and runs
    Status,
}

#[derive(Debug, Args)]
pub struct ServiceInstallArgs {
    /// Run `cfq up --lan`, also if this machine has joined a server
    #[arg(long)]
    pub lan: bool,
    /// Print the systemd unit, and change nothing
    #[arg(long)]
    pub print: bool,
}
