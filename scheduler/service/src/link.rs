//! Shared handle to the NATS session, for code that starts before the session exists: the HTTP server starts first and
//! accepts tasks even while NATS is unavailable.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use cfq_link::stop::Stop;
use cfq_link::{LinkError, Session};
use cfq_proto::messages::{NodeCommand, RunnerCommand};
use cfq_proto::subject;
use serde::Serialize;
use tokio::sync::Notify;

use crate::store::Hint;

/// Time limit for sending one hint. While the client reconnects, messages are not sent, and its queue may be full.
const HINT_TIMEOUT: Duration = Duration::from_millis(100);

/// Minimum time between two hints about new tasks.
const NEW_TASKS_HINT_INTERVAL: Duration = Duration::from_millis(10);

/// Shared handle to the NATS session; empty until the first connection.
#[derive(Debug, Clone, Default)]
pub struct Link {
    session: Arc<OnceLock<Session>>,
    new_tasks: Arc<Notify>,
}

impl Link {
    /// Stores the first session; later calls change nothing, because a session reconnects by itself.
    pub fn set(&self, session: Session) {
        if self.session.set(session).is_err() {
            tracing::debug!("nats session was already set");
        }
    }

    pub fn get(&self) -> Option<&Session> {
        self.session.get()
    }

    /// Lets [`Self::send_new_task_hints`] send a hint. Many new tasks cause few hints, because each runner answers each
    /// hint with a request.
    pub fn on_new_task(&self) {
        self.new_tasks.notify_one();
    }

    /// Sends hints to the runners about new tasks until `stop` is raised.
    pub async fn send_new_task_hints(self, mut stop: Stop) {
        loop {
            tokio::select! {
                () = self.new_tasks.notified() => {}
                () = stop.raised() => return,
            }
            self.send_hints(vec![Hint::TaskReady]).await;
            tokio::time::sleep(NEW_TASKS_HINT_INTERVAL).await;
        }
    }

    /// Publishes one hint; nothing happens without a connection.
    pub async fn publish_hint<T: Serialize>(&self, subject: &str, hint: &T) {
        let Some(session) = self.get().filter(|session| session.is_connected()) else { return };
        match tokio::time::timeout(HINT_TIMEOUT, session.publish(subject, hint)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::debug!(subject, %error, "hint not sent"),
            Err(_) => tracing::debug!(subject, "hint not sent: the connection to nats is full"),
        }
    }

    /// Publishes the hints of a committed transaction. Receivers also poll, so a hint that cannot be sent is only
    /// logged.
    pub async fn send_hints(&self, hints: Vec<Hint>) {
        let Some(session) = self.get().filter(|session| session.is_connected()) else { return };
        for hint in hints {
            let sent = send_hint(session, &hint);
            match tokio::time::timeout(HINT_TIMEOUT, sent).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::debug!(?hint, %error, "hint not sent"),
                Err(_) => return tracing::debug!(?hint, "hints not sent: the connection to nats is full"),
            }
        }
    }
}

async fn send_hint(session: &Session, hint: &Hint) -> Result<(), LinkError> {
    match hint {
        Hint::Leader(what) => session.publish(subject::HINT_LEADER, what).await,
        Hint::TaskReady => session.publish(subject::HINT_RUNNERS, &RunnerCommand::TaskReady).await,
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
    }
}
