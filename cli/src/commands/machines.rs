//! `cfq machines`

use std::time::{Duration, Instant};

use cfq_link::clock;
use cfq_proto::client::Client;
use cfq_proto::http::{MachineView, NodeView};
use cfq_proto::ids::NodeId;
use schemars::JsonSchema;
use serde::Serialize;

use crate::args::MachinesCommand;
use crate::commands::nodes;
use crate::exit::Code;
use crate::local_time;
use crate::output::{self, Line, Output, Tone};

/// Interval at which `cfq machines drain` looks whether the machine runs something.
const DRAIN_INTERVAL: Duration = Duration::from_millis(500);

/// What `cfq machines ls` prints with `--json`.
#[derive(Serialize, JsonSchema)]
pub struct Machines {
    machines: Vec<Machine>,
}

/// A machine that runs models: one that joined, or the server itself.
#[derive(Serialize, JsonSchema)]
pub struct Machine {
    name: NodeId,
    /// As printed by `cfq nodes`, or `revoked`, or `never connected`.
    state: &'static str,
    /// Seconds since the last heartbeat of its node.
    silent_s: Option<i64>,
    running: u32,
    version: String,
    /// Time at which it joined, in seconds since 1970; absent for the server itself.
    joined_at: Option<f64>,
}

pub async fn run(client: &Client, out: Output, command: MachinesCommand) -> anyhow::Result<Code> {
    match command {
        MachinesCommand::Ls => {
            let machines = list(client.machines().await?, client.nodes().await?, clock::unix_seconds());
            out.print_lines(&Machines { machines }, |list| render(&list.machines, output::terminal_columns()))?;
        }
        MachinesCommand::Cordon { name } => {
            let node = client.cordon_node(&name, true).await?;
            out.print(&node, |node| {
                let jobs = output::count((node.running + node.placed) as usize, "job");
                format!("{} gets no new work; it has {jobs}; `cfq machines uncordon {}` ends this", node.id, node.id)
            })?;
        }
        MachinesCommand::Uncordon { name } => {
            let node = client.cordon_node(&name, false).await?;
            out.print(&node, |node| format!("{} gets work again", node.id))?;
        }
        MachinesCommand::Drain { name, timeout } => return drain(client, out, &name, timeout).await,
        MachinesCommand::Revoke { name } => {
            let machine = client.revoke_machine(&name).await?;
            out.print(&machine, |machine| {
                format!(
                    "revoked {}: it gets no new work, its connections close within seconds, and what it runs is run again \
                     on another node",
                    machine.name
                )
            })?;
        }
    }
    Ok(Code::Done)
}

async fn drain(client: &Client, out: Output, name: &NodeId, timeout: Option<Duration>) -> anyhow::Result<Code> {
    let start = Instant::now();
    let mut node = client.cordon_node(name, true).await?;
    let mut reported = None;
    // A node without heartbeats runs nothing: its work is given to others when its leases expire.
    while node.alive && node.running + node.placed > 0 {
        let jobs = node.running + node.placed;
        let count = output::count(jobs as usize, "job");
        if timeout.is_some_and(|timeout| start.elapsed() > timeout) {
            out.status(&format!("{name} still has {count}; it stays cordoned"));
            return Ok(Code::TimedOut);
        }
        if reported != Some(jobs) {
            out.status(&format!("{name} is cordoned; waiting for {count}"));
            reported = Some(jobs);
        }
        tokio::time::sleep(DRAIN_INTERVAL).await;
        let current = client.nodes().await?.into_iter().find(|current| current.id == *name);
        node = match current {
            Some(current) => current,
            // Deleted because it has not been seen for long.
            None => break,
        };
    }
    out.print(&node, |node| {
        format!("{} runs nothing and gets no new work; `cfq machines uncordon {}` ends this", node.id, node.id)
    })?;
    Ok(Code::Done)
}

fn list(machines: Vec<MachineView>, nodes: Vec<NodeView>, now: i64) -> Vec<Machine> {
    let silent_s = |at: f64| (now - at as i64).max(0);
    let of_server = |node: &&NodeView| machines.iter().all(|machine| machine.name != node.id);
    let server = nodes.iter().filter(of_server).map(|node| Machine {
        name: node.id.clone(),
        state: nodes::state(node),
        silent_s: Some(silent_s(node.last_seen)),
        running: node.running,
        version: node.version.clone(),
        joined_at: None,
    });
    let joined = machines.iter().map(|machine| {
        let node = nodes.iter().find(|node| node.id == machine.name);
        Machine {
            name: machine.name.clone(),
            state: match (machine.revoked_at, node) {
                (Some(_), Some(node)) if node.alive => "revoked, still connected",
                (Some(_), _) => "revoked",
                (None, Some(node)) => nodes::state(node),
                (None, None) => "never connected",
            },
            silent_s: machine.last_seen.map(silent_s),
            running: node.map_or(0, |node| node.running),
            version: node.map_or(&machine.version, |node| &node.version).clone(),
            joined_at: Some(machine.joined_at),
        }
    });
    server.chain(joined).collect()
}

fn render(machines: &[Machine], terminal: Option<usize>) -> Vec<Line> {
    if machines.is_empty() {
        return output::plain_lines("no machine runs models yet; `cfq token create` prints the command that adds one");
    }
    let rows: Vec<Vec<String>> = machines
        .iter()
        .map(|machine| {
            let joined = machine.joined_at.map_or_else(|| "(server)".to_owned(), |at| local_time::describe(at as i64));
            vec![
                machine.name.to_string(),
                machine.state.to_owned(),
                machine.silent_s.map_or_else(|| "-".to_owned(), output::age),
                machine.running.to_string(),
                output::sanitize(&machine.version),
                joined,
            ]
        })
        .collect();
    let columns = [("MACHINE", 0), ("STATE", 0), ("HEARTBEAT", 2), ("JOBS", 1), ("CFQ", 3), ("JOINED", 4)];
    let tone = |machine: &Machine| match machine.state {
        "unreachable" | "never connected" => Tone::Bad,
        "cordoned" | "draining" | "revoked, still connected" => Tone::NeedsUser,
        "revoked" => Tone::Faint,
        _ => Tone::Plain,
    };
    output::list_lines(&columns, &rows, machines.iter().map(tone), terminal)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(name: &str, revoked_at: Option<f64>, last_seen: Option<f64>) -> MachineView {
        MachineView {
            name: name.parse().unwrap(),
            nats_key: "U".to_owned(),
            version: "0.1.0".to_owned(),
            joined_at: 0.0,
            revoked_at,
            alive: false,
            last_seen,
        }
    }

    fn node(name: &str, alive: bool, cordoned: bool) -> NodeView {
        serde_json::from_value(serde_json::json!({
            "id": name, "boot": uuid::Uuid::nil(), "version": "0.2.0", "alive": alive, "cordoned": cordoned, "devices": [],
            "ledger": { "version": 1, "models": [], "draining": false }, "last_seen": 98.0, "running": 1
        }))
        .unwrap()
    }

    #[test]
    fn server_and_machines_are_listed_with_their_states() {
        let machines = vec![
            machine("gpu1", None, Some(98.0)),
            machine("gpu2", None, None),
            machine("gpu3", Some(50.0), Some(98.0)),
        ];
        let nodes = vec![node("den", true, false), node("gpu1", true, true), node("gpu3", false, true)];
        let machines = list(machines, nodes, 100);
        let shown = |terminal| output::paint(&render(&machines, terminal), terminal, false);
        let text = shown(None);
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines[1], ["den", "alive", "2", "s", "1", "0.2.0", "(server)"], "{text}");
        assert_eq!(lines[2][..2], ["gpu1", "cordoned"], "{text}");
        assert_eq!(lines[3][..4], ["gpu2", "never", "connected", "-"], "{text}");
        assert_eq!(lines[4][..2], ["gpu3", "revoked"], "{text}");
        assert!(!shown(Some(40)).contains("JOINED"), "{}", shown(Some(40)));
        assert!(render(&[], None)[0].text.contains("cfq token create"));
        insta::assert_snapshot!("view_machines_ls", output::at_widths(|terminal| render(&machines, terminal)));
    }
}
