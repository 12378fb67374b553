//! What the NATS server does not let a client say or hear.
//!
//! The server answers a forbidden publication or subscription with an error on the connection, not with a reply: whoever
//! waits for the reply would wait out its whole limit. The session hands these errors to those waits instead.

use tokio::sync::broadcast;

/// Waits that are behind by more than this fall back on their own limits.
const BACKLOG: usize = 64;

/// One thing the server did not let us do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    Publish { subject: String },
    Subscribe { subject: String },
}

impl Refusal {
    /// nats-server's words: `Permissions Violation for Publish to "a.b"`, `... for Subscription to "a.b"`, the latter with
    /// `using queue "q"` after it where there is one.
    fn read(text: &str) -> Option<Self> {
        let (said, rest) = text.split_once('"')?;
        let subject = rest.split_once('"')?.0.to_owned();
        match said.trim().to_ascii_lowercase().as_str() {
            "permissions violation for publish to" => Some(Self::Publish { subject }),
            "permissions violation for subscription to" => Some(Self::Subscribe { subject }),
            _ => None,
        }
    }
}

/// Where a connection's refusals are told. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Refusals(broadcast::Sender<Refusal>);

impl Refusals {
    pub(crate) fn new() -> Self {
        Self(broadcast::Sender::new(BACKLOG))
    }

    /// Takes what the server said; true if it was a refusal.
    pub(crate) fn tell(&self, said: &str) -> bool {
        let Some(refusal) = Refusal::read(said) else { return false };
        tracing::error!(?refusal, "the nats server does not allow this; its grants and this program do not fit");
        // Nobody waiting is no error.
        drop(self.0.send(refusal));
        true
    }

    pub(crate) fn listen(&self) -> Heard {
        Heard(self.0.subscribe())
    }
}

/// The refusals from now on.
#[derive(Debug)]
pub struct Heard(broadcast::Receiver<Refusal>);

impl Heard {
    /// Completes when `wanted` was refused, and never if it is not.
    pub async fn heard(&mut self, wanted: &Refusal) {
        loop {
            match self.0.recv().await {
                Ok(refusal) if refusal == *wanted => return,
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
    fn the_servers_words_are_read() {
        let publish = Refusal::Publish { subject: "$JS.API.STREAM.NAMES".into() };
        assert_eq!(Refusal::read(r#"Permissions Violation for Publish to "$JS.API.STREAM.NAMES""#), Some(publish));
        let subscribe = Refusal::Subscribe { subject: "cfq.v1.>".into() };
        assert_eq!(Refusal::read(r#"Permissions Violation for Subscription to "cfq.v1.>""#), Some(subscribe.clone()));
        let queued = r#"Permissions Violation for Subscription to "cfq.v1.>" using queue "q""#;
        assert_eq!(Refusal::read(queued), Some(subscribe));
        for other in
            ["stale connection", r#"unknown protocol operation "x""#, r#"Permissions Violation for Publish to "#]
        {
            assert_eq!(Refusal::read(other), None, "{other}");
        }
    }

    #[tokio::test]
    async fn a_wait_hears_its_own_refusal_among_others() {
        let refusals = Refusals::new();
        let mut heard = refusals.listen();
        assert!(refusals.tell(r#"Permissions Violation for Publish to "a""#));
        assert!(refusals.tell(r#"Permissions Violation for Subscription to "b""#));
        assert!(!refusals.tell("maximum connections exceeded"));
        heard.heard(&Refusal::Subscribe { subject: "b".into() }).await;
    }
}
