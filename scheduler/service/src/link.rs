//! The NATS session, which comes later than the HTTP server and may be away: submits are accepted without it.

use std::sync::{Arc, OnceLock};

use cfq_link::Session;
use cfq_proto::messages::{NodeCommand, RunnerCommand};
use cfq_proto::subject;

use crate::store::Hint;

/// Empty until the first connection.
#[derive(Debug, Clone, Default)]
pub struct Link(Arc<OnceLock<Session>>);

impl Link {
    /// Only the first session stays; it reconnects by itself.
    pub fn set(&self, session: Session) {
        if self.0.set(session).is_err() {
            tracing::debug!("the nats session was set before");
        }
    }

    pub fn get(&self) -> Option<&Session> {
        self.0.get()
    }

    /// Tells what a committed transaction changed. Lost hints are found by asking, so errors are only noted.
    pub async fn tell(&self, hints: Vec<Hint>) {
        let Some(session) = self.get() else { return };
        for hint in hints {
            let sent = match &hint {
                Hint::Leader(what) => session.publish(subject::HINT_LEADER, what).await,
                Hint::WorkWaits => session.publish(subject::HINT_RUNNERS, &RunnerCommand::WorkWaits).await,
                Hint::JobChanged { runner, task, job } => {
                    let command = RunnerCommand::JobChanged { task: *task, job: *job };
                    session.publish(&subject::runner_command(runner), &command).await
                }
                Hint::CancelJob { node, fence } => {
                    session.publish(&subject::node_command(node), &NodeCommand::Cancel { fence: *fence }).await
                }
                Hint::CancelTask { runner, fence } => {
                    session.publish(&subject::runner_command(runner), &RunnerCommand::Cancel { fence: *fence }).await
                }
            };
            if let Err(error) = sent {
                tracing::debug!(?hint, %error, "hint not sent");
            }
        }
    }
}
