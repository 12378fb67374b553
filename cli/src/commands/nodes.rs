//! `cfq nodes`

use std::collections::BTreeSet;

use cfq_inference_node::gpu::describe_gpu;
use cfq_link::clock;
use cfq_proto::client::Client;
use cfq_proto::http::NodeView;
use cfq_proto::ids::NodeId;
use cfq_proto::model::ModelId;
use cfq_proto::node::{DeviceKind, Residency};

use crate::args::{NodeSort, NodesArgs};
use crate::commands::refresh;
use crate::exit::{self, Code};
use crate::output::{self, Line, Output, Tone, View};
use crate::plain_words;

pub async fn run(client: &Client, out: Output, args: NodesArgs) -> anyhow::Result<Code> {
    if args.watch {
        return refresh::run(out, async || {
            let mut nodes = selected(client.nodes().await?, &args);
            nodes.truncate(limit(&args));
            Ok(render(&nodes, &args, clock::unix_seconds()))
        })
        .await;
    }
    let nodes = client.nodes().await?;
    if let Some(unknown) = args.nodes.iter().find(|name| nodes.iter().all(|node| node.id != **name)) {
        let names: Vec<&str> = nodes.iter().map(|node| node.id.as_str()).collect();
        let hint = plain_words::did_you_mean(unknown.as_str(), names.iter().copied());
        return Err(exit::usage(format!("there is no node {unknown}{hint}: the nodes are {}", names.join(", "))));
    }
    let mut nodes = selected(nodes, &args);
    let (all, limit) = (nodes.len(), limit(&args));
    nodes.truncate(limit);
    out.print_list("nodes", &nodes, |nodes| render(nodes, &args, clock::unix_seconds()))?;
    if all > limit {
        out.status(&format!("{limit} of {all} nodes"));
    }
    Ok(Code::Done)
}

fn limit(args: &NodesArgs) -> usize {
    args.limit.map_or(usize::MAX, |limit| limit as usize)
}

/// The nodes that the arguments select, in their order.
pub(super) fn selected(mut nodes: Vec<NodeView>, args: &NodesArgs) -> Vec<NodeView> {
    let names: BTreeSet<&NodeId> = args.nodes.iter().collect();
    let has_model = |node: &NodeView, model: &ModelId| node.ledger.models.iter().any(|state| state.model == *model);
    nodes.retain(|node| {
        (names.is_empty() || names.contains(&node.id))
            && (args.state.is_empty() || args.state.iter().any(|wanted| wanted.as_str() == state(node)))
            && args.model.as_ref().is_none_or(|model| has_model(node, model))
    });
    match args.sort {
        // The server sorts by name, and these sorts keep that order.
        Some(NodeSort::Name) => {}
        Some(NodeSort::Running) => nodes.sort_by_key(|node| std::cmp::Reverse(node.running)),
        None => nodes.sort_by_key(|node| match state(node) {
            "unreachable" => 0,
            "draining" | "cordoned" => 1,
            _ => 2,
        }),
    }
    nodes
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

/// `now` is the time in seconds since 1970.
pub(super) fn render(nodes: &[NodeView], args: &NodesArgs, now: i64) -> Vec<Line> {
    if nodes.is_empty() {
        let is_whole = args.nodes.is_empty() && args.state.is_empty() && args.model.is_none();
        return output::plain_lines(match is_whole {
            true => "no nodes have registered yet; see `cfq logs --process node` for this machine's node",
            false => "no such nodes",
        });
    }
    let mut view = View::default();
    for node in nodes {
        push_node(node, now, &mut view);
    }
    view.lines
}

fn push_node(node: &NodeView, now: i64, view: &mut View) {
    let (word, tone) = match state(node) {
        "unreachable" => (format!("unreachable for {}", output::age(now - node.last_seen as i64)), Tone::Bad),
        "alive" => ("alive".to_owned(), Tone::Heading),
        state => (state.to_owned(), Tone::NeedsUser),
    };
    let jobs = output::count(node.running as usize, "running job");
    view.push_toned(tone, format!("{}  {word}  cfq {}  {jobs}", node.id, node.version));
    for device in &node.devices {
        let what = match device.kind {
            DeviceKind::Cpu => gib(device.memory_total),
            DeviceKind::Cuda => describe_gpu(device),
        };
        view.push(format!("  {:7} {}  {what}", device.id, device.name));
    }
    for model in &node.ledger.models {
        let (state, tone) = match &model.residency {
            Residency::Resident => ("resident".to_owned(), Tone::Plain),
            Residency::Available if model.running > 0 => ("unloading".to_owned(), Tone::Plain),
            Residency::Available => ("on disk".to_owned(), Tone::Plain),
            Residency::Loading => ("loading".to_owned(), Tone::Plain),
            Residency::Unusable { reason } => (format!("unusable: {reason}"), Tone::Bad),
        };
        let yields = match node.ledger.yields.get(&model.model) {
            Some(program) => format!("  yields to {program}"),
            None => String::new(),
        };
        view.push_toned(
            tone,
            format!(
                "  model   {}  {state}  on {}  {} of {} sequences{yields}",
                model.model, model.device, model.running, model.max_sequences
            ),
        );
    }
}
