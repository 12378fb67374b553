//! `cfq nodes`

use cfq_inference_node::gpu::describe_gpu;
use cfq_proto::client::Client;
use cfq_proto::http::NodeView;
use cfq_proto::node::{DeviceKind, Residency};

use crate::args::NodesArgs;
use crate::commands::refresh;
use crate::exit::Code;
use crate::output::{self, Line, Output, Tone};

pub async fn run(client: &Client, out: Output, args: NodesArgs) -> anyhow::Result<Code> {
    if args.watch {
        return refresh::run(out, async || Ok(lines(&client.nodes().await?))).await;
    }
    match out.json {
        true => out.print_list("nodes", &client.nodes().await?, render)?,
        false => out.print_lines(&client.nodes().await?, |nodes| lines(nodes))?,
    }
    Ok(Code::Done)
}

fn lines(nodes: &[NodeView]) -> Vec<Line> {
    let mut lines = output::plain_lines(&render(nodes));
    let starts = lines.iter_mut().filter(|line| !line.text.starts_with(' '));
    for (line, node) in starts.zip(nodes) {
        line.tone = match state(node) {
            "unreachable" => Tone::Bad,
            "alive" => Tone::Heading,
            _ => Tone::NeedsUser,
        };
    }
    lines
}

fn gib(bytes: u64) -> String {
    format!("{:.1} GiB", bytes as f64 / (1u64 << 30) as f64)
}

/// The state of a node in one word.
pub fn state(node: &NodeView) -> &'static str {
    match (node.alive, node.ledger.draining, node.cordoned) {
        (false, ..) => "unreachable",
        (true, true, _) => "draining",
        (true, false, true) => "cordoned",
        (true, false, false) => "alive",
    }
}

fn render(nodes: &[NodeView]) -> String {
    if nodes.is_empty() {
        return "no nodes have registered yet; see `cfq logs --process node` for this machine's node".to_owned();
    }
    let mut lines = Vec::new();
    for node in nodes {
        let state = state(node);
        let jobs = output::count(node.running as usize, "running job");
        lines.push(format!("{}  {state}  cfq {}  {jobs}", node.id, node.version));
        for device in &node.devices {
            let what = match device.kind {
                DeviceKind::Cpu => gib(device.memory_total),
                DeviceKind::Cuda => output::sanitize(&describe_gpu(device)),
            };
            lines.push(format!("  {:7} {}  {what}", device.id, output::sanitize(&device.name)));
        }
        for model in &node.ledger.models {
            let state = match &model.residency {
                Residency::Resident => "resident".to_owned(),
                Residency::Available if model.running > 0 => "unloading".to_owned(),
                Residency::Available => "on disk".to_owned(),
                Residency::Loading => "loading".to_owned(),
                Residency::Unusable { reason } => {
                    format!("unusable: {}", output::indent_rest(&output::sanitize(reason)))
                }
            };
            let yields = match node.ledger.yields.get(&model.model) {
                Some(program) => format!("  yields to {}", output::sanitize(program)),
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
