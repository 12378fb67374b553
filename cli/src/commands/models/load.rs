//! `cfq models load` and `unload`: send the request to a running node, and wait until the node's ledger (its report of
//! its models and free memory) shows the result.

use std::time::{Duration, Instant};

use cfq_deploy::Paths;
use cfq_memory::Bytes;
use cfq_proto::client::Client;
use cfq_proto::http::{ModelAnswer, ModelRequest};
use cfq_proto::ids::NodeId;
use cfq_proto::messages::ModelReply;
use cfq_proto::model::ModelId;
use cfq_proto::node::{ModelState, Residency};
use schemars::JsonSchema;
use serde::Serialize;

use crate::connect;
use crate::exit::{self, Code};
use crate::output::{self, Output};

/// Interval at which the node's ledger is read. The ledger itself changes with the node's heartbeats.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Time without heartbeats after which the wait for a node ends. A load can keep a machine so busy that a few heartbeats
/// are late.
const UNREACHABLE_LIMIT: Duration = Duration::from_secs(15);

#[derive(Serialize, JsonSchema)]
pub struct LoadResult {
    node: NodeId,
    model: ModelId,
    /// The node's reply to the request, sent before a load or unload finished.
    reply: ModelReply,
    /// State of the model in the node's ledger; `None` if the ledger does not list the model.
    #[serde(skip_serializing_if = "Option::is_none")]
    state: Option<ModelState>,
}

pub async fn load(out: Output, paths: &Paths, request: ModelRequest) -> anyhow::Result<Code> {
    let client = connect::client(&paths.data)?;
    let answer = client.load_model(&request).await?;
    if let ModelReply::Refused { reason } = &answer.reply {
        return Err(exit::usage(format!("{}: {reason}", answer.node)));
    }
    if matches!(answer.reply, ModelReply::Loading { .. }) {
        out.status(&format!("loading {} on {}", answer.model, answer.node));
    }
    let state = wait_for_state(&client, &answer, |state| match state.residency {
        Residency::Resident | Residency::Unusable { .. } => true,
        Residency::Available | Residency::Loading => false,
    })
    .await?;
    if let Residency::Unusable { reason } = &state.residency {
        return Err(exit::usage(format!("{} cannot load {}: {}", answer.node, answer.model, output::sanitize(reason))));
    }
    let verb = if answer.reply == ModelReply::Loaded { "has already loaded" } else { "has loaded" };
    let text = format!(
        "{} {verb} {}: {}, KV cache for {} tokens in {} sequences",
        answer.node,
        answer.model,
        Bytes(state.need_bytes),
        state.kv_tokens_free,
        state.max_sequences
    );
    let result = LoadResult { node: answer.node, model: answer.model, reply: answer.reply, state: Some(state) };
    out.print(&result, |_| text.clone())?;
    Ok(Code::Done)
}

pub async fn unload(out: Output, paths: &Paths, request: ModelRequest) -> anyhow::Result<Code> {
    let client = connect::client(&paths.data)?;
    let answer = client.unload_model(&request).await?;
    match &answer.reply {
        ModelReply::Refused { reason } => return Err(exit::usage(format!("{}: {reason}", answer.node))),
        ModelReply::Unloading { running, .. } if *running > 0 => {
            let what = if *running == 1 { "1 sequence is".to_owned() } else { format!("{running} sequences are") };
            out.status(&format!(
                "{what} running on {}; the model accepts no new sequences and is unloaded when the running ones finish",
                answer.model
            ));
        }
        ModelReply::Unloading { .. } | ModelReply::Unloaded | ModelReply::Loaded | ModelReply::Loading { .. } => {}
    }
    let state = match answer.reply {
        ModelReply::Unloaded => current_state(&client, &answer).await?,
        _ => Some(
            wait_for_state(&client, &answer, |state| match state.residency {
                Residency::Available => state.running == 0,
                // The model was being unloaded when the node replied, so it has been loaded again since.
                Residency::Resident | Residency::Unusable { .. } => true,
                // Still unloading, or loading again.
                Residency::Loading => false,
            })
            .await?,
        ),
    };
    let outcome = match (&answer.reply, state.as_ref().map(|state| &state.residency)) {
        (ModelReply::Unloaded, _) | (_, None) => "is not loaded",
        (_, Some(Residency::Resident)) => "was unloaded, and loaded again because a task needs it,",
        (_, Some(Residency::Available | Residency::Loading | Residency::Unusable { .. })) => "is unloaded",
    };
    let text = |result: &LoadResult| format!("{} {outcome} on {}", result.model, result.node);
    out.print(&LoadResult { node: answer.node, model: answer.model, reply: answer.reply, state }, text)?;
    Ok(Code::Done)
}

/// The model's state in the node's current ledger; `None` if the ledger does not list it.
async fn current_state(client: &Client, answer: &ModelAnswer) -> anyhow::Result<Option<ModelState>> {
    let node = client.nodes().await?.into_iter().find(|node| node.id == answer.node);
    Ok(node.and_then(|node| node.ledger.models.into_iter().find(|state| state.model == answer.model)))
}

/// Polls until the node's ledger shows a state that satisfies `is_final`, without a time limit, because a load may take
/// long. If the user interrupts the wait, the node still finishes the load or unload.
async fn wait_for_state(
    client: &Client,
    answer: &ModelAnswer,
    is_final: impl Fn(&ModelState) -> bool,
) -> anyhow::Result<ModelState> {
    let version = match answer.reply {
        ModelReply::Loading { ledger_version } | ModelReply::Unloading { ledger_version, .. } => ledger_version,
        ModelReply::Loaded | ModelReply::Unloaded | ModelReply::Refused { .. } => 0,
    };
    let mut last_alive = Instant::now();
    loop {
        let nodes = client.nodes().await?;
        let Some(node) = nodes.into_iter().find(|node| node.id == answer.node && node.alive) else {
            if last_alive.elapsed() > UNREACHABLE_LIMIT {
                anyhow::bail!("{} became unreachable; `cfq nodes` shows when it is back", answer.node);
            }
            tokio::time::sleep(POLL_INTERVAL).await;
            continue;
        };
        last_alive = Instant::now();
        // A ledger of the same process with a lower version was written before the request.
        let fresh = node.boot != answer.boot || node.ledger.version >= version;
        if fresh
            && let Some(state) = node.ledger.models.into_iter().find(|state| state.model == answer.model)
            && is_final(&state)
        {
            return Ok(state);
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}
