//! `cfq nodes`

use cfq_inference_node::gpu::card_words;
use cfq_proto::client::Client;
use cfq_proto::http::NodeView;
use cfq_proto::node::{DeviceKind, Residency};

use crate::exit::Code;
use crate::output::{self, Output};

pub async fn run(client: &Client, out: Output) -> anyhow::Result<Code> {
    out.data(&client.nodes().await?, |nodes| render(nodes))?;
    Ok(Code::Done)
}

fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64)
}

fn render(nodes: &[NodeView]) -> String {
    if nodes.is_empty() {
        return "no nodes have joined yet; `cfq logs --process node` tells what this machine's is doing".to_owned();
    }
    let mut lines = Vec::new();
    for node in nodes {
        let state = match (node.alive, node.ledger.draining) {
            (true, false) => "alive",
            (true, true) => "draining",
            (false, _) => "away",
        };
        lines.push(format!("{}  {state}  cfq {}  {} running", node.id, node.version, node.running));
        for device in &node.devices {
            let what = match device.kind {
                DeviceKind::Cpu => gib(device.memory_total),
                DeviceKind::Cuda => output::plain(&card_words(device)),
            };
            lines.push(format!("  {:7} {}  {what}", device.id, output::plain(&device.name)));
        }
        for model in &node.ledger.models {
            let state = match &model.residency {
                Residency::Resident => "resident".to_owned(),
                Residency::Available if model.running > 0 => "ending".to_owned(),
                Residency::Available => "on disk".to_owned(),
                Residency::Loading => "loading".to_owned(),
                Residency::Unusable { reason } => format!("unusable: {}", output::plain(reason)),
            };
            let yields = match node.ledger.yields.get(&model.model) {
                Some(whom) => format!("  makes way for {}", output::plain(whom)),
                None => String::new(),
            };
            lines.push(format!(
                "  model   {}  {state}  on {}  {} of {} sequences{yields}",
                model.model, model.device, model.running, model.max_sequences
            ));
        }
    }
    lines.join("\n")
}
