//! `cfq machines`

use cfq_link::clock;
use cfq_proto::client::Client;
use cfq_proto::http::MachineView;

use crate::args::MachinesCommand;
use crate::exit::Code;
use crate::local_time;
use crate::output::{self, Output};

pub async fn run(client: &Client, out: Output, command: MachinesCommand) -> anyhow::Result<Code> {
    match command {
        MachinesCommand::Ls => {
            out.print(&client.machines().await?, |machines| render(machines, clock::unix_seconds()))?
        }
        MachinesCommand::Revoke { name } => {
            let machine = client.revoke_machine(&name).await?;
            out.print(&machine, |machine| {
                format!(
                    "{} has no access any more; what it was computing continues on another node, or waits for one",
                    machine.name
                )
            })?;
        }
    }
    Ok(Code::Done)
}

fn render(machines: &[MachineView], now: i64) -> String {
    if machines.is_empty() {
        return "no machine has joined; `cfq token create` prints the command to run on one".to_owned();
    }
    let rows: Vec<Vec<String>> = machines
        .iter()
        .map(|machine| {
            let heard = machine.last_seen.map_or_else(|| "never".to_owned(), |at| output::age(now - at as i64));
            let state = match (machine.revoked_at, machine.alive) {
                (Some(_), _) => "revoked",
                (None, true) => "connected",
                (None, false) => "not connected",
            };
            let joined = local_time::describe(machine.joined_at as i64);
            let version = output::sanitize(&machine.version);
            vec![machine.name.to_string(), state.to_owned(), heard, version, joined]
        })
        .collect();
    output::table(&["MACHINE", "STATE", "HEARTBEAT", "CFQ", "JOINED"], &rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_told_apart() {
        let machine = |name: &str, alive, revoked_at, last_seen| MachineView {
            name: name.parse().unwrap(),
            nats_key: "U".to_owned(),
            version: "0.1.0".to_owned(),
            joined_at: 0.0,
            revoked_at,
            alive,
            last_seen,
        };
        let text = render(
            &[
                machine("gpu1", true, None, Some(98.0)),
                machine("gpu2", false, None, None),
                machine("old", false, Some(50.0), Some(40.0)),
            ],
            100,
        );
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[1].starts_with("gpu1     connected      2 s        0.1.0"), "{text}");
        assert!(lines[2].starts_with("gpu2     not connected  never"), "{text}");
        assert!(lines[3].starts_with("old      revoked        60 s"), "{text}");
        assert!(render(&[], 0).contains("cfq token create"));
    }
}
