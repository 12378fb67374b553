//! Work orders: receives them from the scheduler's stream and runs them as attempts.

use std::sync::Arc;

use cfq_link::failpoint;
use cfq_link::session::Incoming;
use cfq_proto::messages::{Heartbeat, HeartbeatReply, WorkOrder};
use tokio::sync::mpsc;
use tokio::task::JoinSet;

use super::attempt::Attempt;
use super::context::{AttemptStop, NodeContext};

/// Sends the work orders that arrive to `orders`.
pub(super) async fn receive(mut incoming: Incoming<WorkOrder>, orders: mpsc::Sender<WorkOrder>) {
    while let Some(message) = incoming.next().await {
        match message.body {
            Ok(order) => {
                failpoint::hit("node.received");
                if orders.send(order).await.is_err() {
                    return;
                }
            }
            Err(error) => tracing::error!(%error, "unreadable order dropped"),
        }
    }
}

/// Starts an attempt for the order, unless it is already running.
pub(super) fn start(context: &Arc<NodeContext>, order: WorkOrder, attempts: &mut JoinSet<()>) {
    context.prefill_queue.remove(order.task, order.role);
    match context.begin_attempt(&order) {
        Some(running) => {
            attempts.spawn(Attempt { context: context.clone(), running, order }.run());
        }
        None => tracing::debug!(job = %order.fence.job, "order delivered twice"),
    }
}

/// Graceful shutdown: stops all attempts, and waits until the scheduler has received their reports, at most for the
/// configured drain timeout.
pub(super) async fn drain(context: &NodeContext, mut attempts: JoinSet<()>) {
    context.registry.drain();
    context.keeper.heartbeat_now();
    context.stop_all_attempts(&AttemptStop::Drained);
    let ended = async { while attempts.join_next().await.is_some() {} };
    if tokio::time::timeout(context.timing.drain_timeout(), ended).await.is_err() {
        tracing::warn!(left = attempts.len(), "attempts not released in time; their leases will expire");
        return;
    }
    // The last heartbeat is sent directly, since the keeper may stop before its next one. After it, the scheduler
    // places no more jobs on this node.
    let ledger = Some(context.registry.ledger());
    let last = Heartbeat { boot: context.boot, held: Vec::new(), ledger, devices: None };
    let subject = context.subject("heartbeat");
    let request = context.session.request::<_, HeartbeatReply>(&subject, &last);
    if !matches!(tokio::time::timeout(context.timing.heartbeat(), request).await, Ok(Ok(_))) {
        tracing::debug!("no reply to the last heartbeat");
    }
}
