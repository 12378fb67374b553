//! Work orders: pulled from the scheduler's stream, and run as attempts.

use std::sync::Arc;

use cfq_link::failpoint;
use cfq_proto::messages::{Heartbeat, HeartbeatReply, WorkOrder};
use cfq_proto::subject::WORK_STREAM;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

use super::attempt::Attempt;
use super::context::{NodeContext, StopReason};

/// Pulls orders from the consumer and passes them on once they are acknowledged.
pub(super) async fn pull(
    context: Arc<NodeContext>,
    mut consumer: watch::Receiver<Option<String>>,
    orders: mpsc::Sender<WorkOrder>,
) {
    loop {
        let name = match consumer.wait_for(Option::is_some).await {
            Ok(name) => name.clone().unwrap_or_default(),
            Err(_) => return,
        };
        let delivery = match context.session.pull::<WorkOrder>(WORK_STREAM, &name, context.timing.poll()).await {
            Ok(Some(delivery)) => delivery,
            Ok(None) => continue,
            Err(error) => {
                // There is no such consumer: the stream was lost, or belongs to another boot. A registration creates it
                // again.
                tracing::warn!(%error, "cannot pull work");
                context.registration_wanted.notify_one();
                tokio::time::sleep(context.timing.heartbeat() / 4).await;
                continue;
            }
        };
        if let Err(error) = delivery.double_ack().await {
            // It may be delivered twice, which changes nothing.
            tracing::warn!(%error, "acknowledgement of an order not confirmed");
        }
        match delivery.body {
            Ok(order) => {
                failpoint::hit("node.pulled");
                if orders.send(order).await.is_err() {
                    return;
                }
            }
            Err(error) => tracing::error!(%error, "unreadable order dropped"),
        }
    }
}

/// Starts an attempt for the order, unless it runs already.
pub(super) fn start(context: &Arc<NodeContext>, order: WorkOrder, attempts: &mut JoinSet<()>) {
    context.prefill_queue.remove(order.task, order.role);
    match context.begin_attempt(&order) {
        Some(running) => {
            attempts.spawn(Attempt { context: context.clone(), running, order }.run());
        }
        None => tracing::debug!(job = %order.fence.job, "order delivered twice"),
    }
}

/// Stops every attempt, and waits until the scheduler has all reports or the drain time is over.
pub(super) async fn drain(context: &NodeContext, mut attempts: JoinSet<()>) {
    context.registry.drain();
    context.keeper.heartbeat_now();
    context.stop_all_attempts(&StopReason::Drained);
    let ended = async { while attempts.join_next().await.is_some() {} };
    if tokio::time::timeout(context.timing.drain(), ended).await.is_err() {
        tracing::warn!(left = attempts.len(), "attempts not released in time; their leases will expire");
        return;
    }
    // Sent directly, since the keeper may stop before its next heartbeat; the scheduler places nothing here afterwards.
    let ledger = Some(context.registry.ledger());
    let last = Heartbeat { boot: context.boot, held: Vec::new(), ledger, devices: None };
    let subject = context.subject("heartbeat");
    let request = context.session.request::<_, HeartbeatReply>(&subject, &last);
    if !matches!(tokio::time::timeout(context.timing.heartbeat(), request).await, Ok(Ok(_))) {
        tracing::debug!("no reply to the last heartbeat");
    }
}
