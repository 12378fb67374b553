//! Handling of the scheduler's commands to this node.

use std::sync::Arc;

use cfq_link::session::{Incoming, Received};
use cfq_proto::messages::{ModelReply, NodeCommand};
use cfq_proto::model::ModelId;

use super::context::{AttemptStop, NodeContext};
use super::error::with_causes;
use super::model_registry::NotUsable;
use super::unusable::UnusableReason;
use crate::models::{ModelStore, Presence};

/// Handles commands until the connection closes.
pub(super) async fn run(context: Arc<NodeContext>, store: ModelStore, mut commands: Incoming<NodeCommand>) {
    while let Some(command) = commands.next().await {
        let reply = match &command.body {
            Ok(NodeCommand::Cancel { fence }) => {
                if context.stop_attempt(fence, AttemptStop::Cancelled) {
                    tracing::info!(job = %fence.job, attempt = fence.attempt, "attempt cancelled");
                }
                continue;
            }
            Ok(NodeCommand::Report) => {
                context.registration_wanted.notify_one();
                continue;
            }
            Ok(NodeCommand::Prefill { hint }) => {
                context.prefill_queue.add(hint.clone());
                continue;
            }
            Ok(NodeCommand::Load { model }) if !model.is_file() && context.registry.status(model).is_none() => {
                // The server is asked, so other commands do not wait for the reply.
                let model = model.clone();
                tokio::spawn(add_proxied(context.clone(), model, command));
                continue;
            }
            Ok(NodeCommand::Load { model }) => context.registry.load(model, || check_installed(&store, model)),
            Ok(NodeCommand::Unload { model }) => context.registry.unload(model),
            Err(error) => {
                tracing::warn!(%error, "unreadable command ignored");
                continue;
            }
        };
        tracing::info!(command = ?command.body, ?reply, "model command handled");
        if let Err(error) = command.reply(&reply).await {
            tracing::debug!(%error, "reply not sent");
        }
    }
}

/// Serves a model of a configured server or program that is not in the configuration, if the server has it. If the server
/// is down, the model is listed as unusable, and is used once the server answers.
async fn add_proxied(context: Arc<NodeContext>, model: ModelId, command: Received<NodeCommand>) {
    let reply = match context.registry.proxies().check(&model).await {
        Ok(()) => context.registry.load(&model, || Ok(())),
        Err(NotUsable { reason, is_down }) => {
            if is_down {
                // First the health, so that the model is never listed as usable.
                context.registry.proxies().ask_about(&model).await;
                context.registry.load(&model, || Ok(()));
            }
            ModelReply::Refused { reason }
        }
    };
    tracing::info!(%model, ?reply, "model command handled");
    if let Err(error) = command.reply(&reply).await {
        tracing::debug!(%error, "reply not sent");
    }
    context.registry.proxies().ask_about(&model).await;
}

/// Checks that the model is on this machine. A load command for a model that is not in the configuration is refused if
/// the model would have to be fetched.
fn check_installed(store: &ModelStore, model: &ModelId) -> Result<(), UnusableReason> {
    match store.presence(model) {
        Ok(Presence::Present) => Ok(()),
        Ok(Presence::Missing { .. }) => Err(UnusableReason::NotInstalled { model: model.clone() }),
        Err(error) => Err(UnusableReason::Unreadable { model: model.clone(), detail: with_causes(&error) }),
    }
}
