//! `cfq models load` and `unload`: asked of a running node, followed until the node's ledger says how it ended.

use std::time::Duration;

use cfq_deploy::Paths;
use cfq_inference_node::engine::candle::Bytes;
use cfq_proto::client::Client;
use cfq_proto::http::{ModelAnswer, ModelRequest};
use cfq_proto::ids::NodeId;
use cfq_proto::messages::ModelReply;
use cfq_proto::model::ModelId;
use cfq_proto::node::{ModelState, Residency};
use serde::Serialize;

use crate::connect;
use crate::exit::{self, Code};
use crate::output::{self, Output};

/// A ledger changes with the node's next beat.
const LOOK: Duration = Duration::from_millis(200);

#[derive(Serialize)]
struct Ended {
    node: NodeId,
    model: ModelId,
    /// What the node said at first.
    reply: ModelReply,
    /// None where the node forgot a model that it could not use.
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<ModelState>,
}

pub async fn load(out: Output, paths: &Paths, ask: ModelRequest) -> anyhow::Result<Code> {
    let client = connect::client(&paths.data)?;
    let answer = client.load_model(&ask).await?;
    if let ModelReply::Refused { reason } = &answer.reply {
        return Err(exit::usage(format!("{}: {reason}", answer.node)));
    }
    if matches!(answer.reply, ModelReply::Loading { .. }) {
        out.talk(&format!("{} loads {}", answer.node, answer.model));
    }
    let state = settled(&client, &answer, |state| match state.residency {
        Residency::Resident | Residency::Unusable { .. } => true,
        Residency::Available | Residency::Loading => false,
    })
    .await?;
    if let Residency::Unusable { reason } = &state.residency {
        return Err(exit::usage(format!("{} cannot load {}: {}", answer.node, answer.model, output::plain(reason))));
    }
    let already = if answer.reply == ModelReply::Loaded { "has" } else { "has loaded" };
    let words = format!(
        "{} {already} {}: {}, room for {} tokens in {} sequences",
        answer.node,
        answer.model,
        Bytes(state.need_bytes),
        state.kv_tokens_free,
        state.max_sequences
    );
    let ended = Ended { node: answer.node, model: answer.model, reply: answer.reply, state: Some(state) };
    out.data(&ended, |_| words.clone())?;
    Ok(Code::Done)
}

pub async fn unload(out: Output, paths: &Paths, ask: ModelRequest) -> anyhow::Result<Code> {
    let client = connect::client(&paths.data)?;
    let answer = client.unload_model(&ask).await?;
    match &answer.reply {
        ModelReply::Refused { reason } => return Err(exit::usage(format!("{}: {reason}", answer.node))),
        ModelReply::Ending { running, .. } if *running > 0 => {
            let what = if *running == 1 { "one sequence runs".to_owned() } else { format!("{running} sequences run") };
            out.talk(&format!("{what} on {}; it takes no more and goes after that", answer.model));
        }
        ModelReply::Ending { .. } | ModelReply::Unloaded | ModelReply::Loaded | ModelReply::Loading { .. } => {}
    }
    let state = match answer.reply {
        ModelReply::Unloaded => listed(&client, &answer).await?,
        _ => Some(
            settled(&client, &answer, |state| match state.residency {
                Residency::Available => state.running == 0,
                // It is let go since the answer, so this is a new load.
                Residency::Resident | Residency::Unusable { .. } => true,
                // Either on its way out or back in.
                Residency::Loading => false,
            })
            .await?,
        ),
    };
    let was = match (&answer.reply, state.as_ref().map(|state| &state.residency)) {
        (ModelReply::Unloaded, _) | (_, None) => "is not loaded",
        (_, Some(Residency::Resident)) => "was unloaded, and loaded again since a task wants it,",
        (_, Some(Residency::Available | Residency::Loading | Residency::Unusable { .. })) => "is unloaded",
    };
    let words = |ended: &Ended| format!("{} {was} on {}", ended.model, ended.node);
    out.data(&Ended { node: answer.node, model: answer.model, reply: answer.reply, state }, words)?;
    Ok(Code::Done)
}

/// What the node's ledger says of the model now, if anything.
async fn listed(client: &Client, answer: &ModelAnswer) -> anyhow::Result<Option<ModelState>> {
    let node = client.nodes().await?.into_iter().find(|node| node.id == answer.node);
    Ok(node.and_then(|node| node.ledger.models.into_iter().find(|state| state.model == answer.model)))
}

/// Looks until the node's ledger shows what is waited for, however long a load takes; whoever does not want to wait breaks
/// it off, and the node goes on.
async fn settled(
    client: &Client,
    answer: &ModelAnswer,
    is: impl Fn(&ModelState) -> bool,
) -> anyhow::Result<ModelState> {
    let version = match answer.reply {
        ModelReply::Loading { ledger_version } | ModelReply::Ending { ledger_version, .. } => ledger_version,
        ModelReply::Loaded | ModelReply::Unloaded | ModelReply::Refused { .. } => 0,
    };
    loop {
        let nodes = client.nodes().await?;
        let Some(node) = nodes.into_iter().find(|node| node.id == answer.node && node.alive) else {
            anyhow::bail!("{} went away meanwhile; `cfq nodes` shows when it is back", answer.node);
        };
        // An older ledger tells of what was before.
        let fresh = node.boot != answer.boot || node.ledger.version >= version;
        if fresh
            && let Some(state) = node.ledger.models.into_iter().find(|state| state.model == answer.model)
            && is(&state)
        {
            return Ok(state);
        }
        tokio::time::sleep(LOOK).await;
    }
}
