//! Permission violations that the NATS server reports.
//!
//! The server answers a forbidden publication or subscription with an error on the connection, not with a reply, so a
//! request that waits for a reply would wait until its timeout. The session passes these errors to the waiting requests
//! instead.

use tokio::sync::broadcast;

/// Maximum number of violations buffered per receiver. A receiver that lags behind misses some of them, and its request
/// then ends by its own timeout.
const VIOLATION_CHANNEL_CAPACITY: usize = 64;

/// One publication or subscription that the server rejected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PermissionViolation {
    /// A rejected publication.
    Publish {
        /// Subject of the publication.
        subject: String,
    },
    /// A rejected subscription.
    Subscribe {
        /// Subject of the subscription.
        subject: String,
    },
}

impl PermissionViolation {
    /// Parses nats-server's messages: `Permissions Violation for Publish to "a.b"` and `... for Subscription to "a.b"`,
    /// the latter followed by `using queue "q"` if the subscription has a queue group.
    fn parse(message: &str) -> Option<Self> {
        let (action, rest) = message.split_once('"')?;
        let subject = rest.split_once('"')?.0.to_owned();
        match action.trim().to_ascii_lowercase().as_str() {
            "permissions violation for publish to" => Some(Self::Publish { subject }),
            "permissions violation for subscription to" => Some(Self::Subscribe { subject }),
            _ => None,
        }
    }
}

/// Sends the violations of one connection to all receivers. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Violations(broadcast::Sender<PermissionViolation>);

impl Violations {
    pub(crate) fn new() -> Self {
        Self(broadcast::Sender::new(VIOLATION_CHANNEL_CAPACITY))
    }

    /// Handles an error message of the server; true if it was a violation.
    pub(crate) fn handle(&self, message: &str) -> bool {
        let Some(violation) = PermissionViolation::parse(message) else { return false };
        tracing::error!(
            ?violation,
            "the nats server rejected an operation: its permissions do not match this version of cfq"
        );
        // Sending fails only if there is no receiver, and then nothing has to be done.
        drop(self.0.send(violation));
        true
    }

    pub(crate) fn watch(&self) -> ViolationWatch {
        ViolationWatch(self.0.subscribe())
    }
}

/// Receiver of the violations that are reported after the receiver was created.
#[derive(Debug)]
pub struct ViolationWatch(broadcast::Receiver<PermissionViolation>);

impl ViolationWatch {
    /// Completes when `expected` was rejected; never completes otherwise.
    pub async fn violated(&mut self, expected: &PermissionViolation) {
        loop {
            match self.0.recv().await {
                Ok(violation) if violation == *expected => return,
                Ok(_) | Err(broadcast::error::RecvError::Lagged(_)) => {}
                Err(broadcast::error::RecvError::Closed) => return std::future::pending().await,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn server_messages_are_parsed() {
        let publish = PermissionViolation::Publish { subject: "$JS.API.STREAM.NAMES".into() };
        let parse = PermissionViolation::parse;
        assert_eq!(parse(r#"Permissions Violation for Publish to "$JS.API.STREAM.NAMES""#), Some(publish));
        let subscribe = PermissionViolation::Subscribe { subject: "cfq.v1.>".into() };
        assert_eq!(parse(r#"Permissions Violation for Subscription to "cfq.v1.>""#), Some(subscribe.clone()));
        let queued = r#"Permissions Violation for Subscription to "cfq.v1.>" using queue "q""#;
        assert_eq!(parse(queued), Some(subscribe));
        for other in
            ["stale connection", r#"unknown protocol operation "x""#, r#"Permissions Violation for Publish to "#]
        {
            assert_eq!(parse(other), None, "{other}");
        }
    }

    #[tokio::test]
    async fn watch_completes_at_its_own_violation_among_others() {
        let violations = Violations::new();
        let mut watch = violations.watch();
        assert!(violations.handle(r#"Permissions Violation for Publish to "a""#));
        assert!(violations.handle(r#"Permissions Violation for Subscription to "b""#));
        assert!(!violations.handle("maximum connections exceeded"));
        watch.violated(&PermissionViolation::Subscribe { subject: "b".into() }).await;
    }
}
