//! NATS subjects, and which of them each kind of client may use. The sender's name is a fixed token, so identity is what
//! the server checked, not what a body claims. `cfq-deploy` renders [`grants`] into the server's configuration.

use crate::ids::{BootId, JobId, NodeId, RunnerId};

/// The JetStream stream that carries work to nodes.
pub const WORK_STREAM: &str = "WORK";
/// All subjects of [`WORK_STREAM`].
pub const WORK_ALL: &str = "cfq.v1.work.>";
/// What every runner listens to besides its own commands.
pub const HINT_RUNNERS: &str = "cfq.v1.hint.runners";
/// Any scheduler tells the leader that something changed.
pub const HINT_LEADER: &str = "cfq.v1.hint.leader";
/// What runners foresee, for the leader.
pub const WARM_ALL: &str = "cfq.v1.runner.*.warm";
/// What the scheduler answers.
pub const NODES_ALL: &str = "cfq.v1.node.*.*";
pub const RUNNERS_ALL: &str = "cfq.v1.runner.*.*";

pub fn work(node: &NodeId, boot: BootId) -> String {
    format!("cfq.v1.work.{node}.{boot}")
}

/// The node's durable consumer. One a node, so that grants can name it; the scheduler makes it anew with each boot's
/// subject as its filter, which leaves an older boot's messages behind to age out.
pub fn consumer(node: &NodeId) -> String {
    node.to_string()
}

/// `verb` is the last token: `hello`, `beat`, `accept`, `refuse`, `result`, `blob_put`, `blob_get`.
pub fn node(node: &NodeId, verb: &str) -> String {
    format!("cfq.v1.node.{node}.{verb}")
}

pub fn tokens(node: &NodeId, job: JobId) -> String {
    format!("cfq.v1.node.{node}.tokens.{job}")
}

/// Token frames of one job, from whichever node runs it; `*` as the job for all.
pub fn tokens_of(job: &str) -> String {
    format!("cfq.v1.node.*.tokens.{job}")
}

/// `verb` is the last token: `hello`, `lease`, `beat`, `step`, `job`, `job_look`, `job_cancel`, `warm`, `release`, `give_up`,
/// `blob_put`, `blob_get`.
pub fn runner(runner: &RunnerId, verb: &str) -> String {
    format!("cfq.v1.runner.{runner}.{verb}")
}

pub fn node_command(node: &NodeId) -> String {
    format!("cfq.v1.cmd.node.{node}")
}

pub fn runner_command(runner: &RunnerId) -> String {
    format!("cfq.v1.cmd.runner.{runner}")
}

/// The sender of a request on `cfq.v1.{node,runner}.<id>.<verb>`, and the verb.
pub fn sender(subject: &str) -> Option<(&str, &str)> {
    let mut tokens = subject.split('.');
    let head = (tokens.next()?, tokens.next()?, tokens.next()?);
    if head.0 != "cfq" || head.1 != "v1" || !matches!(head.2, "node" | "runner") {
        return None;
    }
    let found = (tokens.next()?, tokens.next()?);
    tokens.next().is_none().then_some(found)
}

/// Who connects to NATS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Identity {
    Scheduler,
    Node(NodeId),
    Runner(RunnerId),
}

impl Identity {
    /// Replies come to this client's own inboxes and no other's.
    pub fn inbox_prefix(&self) -> String {
        match self {
            Self::Scheduler => "_INBOX_scheduler".to_owned(),
            Self::Node(id) => format!("_INBOX_node_{id}"),
            Self::Runner(id) => format!("_INBOX_runner_{id}"),
        }
    }
}

/// Subjects a client may publish and subscribe to; everything else is refused by the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grants {
    pub publish: Vec<String>,
    pub subscribe: Vec<String>,
    /// May answer requests it received.
    pub responses: bool,
}

pub fn grants(identity: &Identity) -> Grants {
    let inbox = format!("{}.>", identity.inbox_prefix());
    match identity {
        Identity::Scheduler => Grants {
            publish: vec!["cfq.v1.>".into(), "$JS.API.>".into(), "$JS.ACK.>".into()],
            subscribe: vec!["cfq.v1.>".into(), inbox],
            responses: true,
        },
        Identity::Node(id) => Grants {
            publish: vec![
                format!("cfq.v1.node.{id}.>"),
                format!("$JS.API.CONSUMER.MSG.NEXT.{WORK_STREAM}.{id}"),
                format!("$JS.ACK.{WORK_STREAM}.{id}.>"),
            ],
            subscribe: vec![format!("cfq.v1.cmd.node.{id}"), inbox],
            responses: true,
        },
        Identity::Runner(id) => Grants {
            publish: vec![format!("cfq.v1.runner.{id}.>")],
            // Tokens as they are written: a runner is granted whatever task is ready, so there is none it may not read.
            subscribe: vec![format!("cfq.v1.cmd.runner.{id}"), HINT_RUNNERS.into(), tokens_of("*"), inbox],
            responses: true,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sender_is_read_from_the_subject() {
        assert_eq!(sender("cfq.v1.node.den.beat"), Some(("den", "beat")));
        assert_eq!(sender("cfq.v1.runner.r1.step"), Some(("r1", "step")));
        for other in ["cfq.v2.node.den.beat", "cfq.v1.node.den.tokens.x", "cfq.v1.work.den.x", "cfq.v1.node.den"] {
            assert_eq!(sender(other), None, "{other}");
        }
    }

    #[test]
    fn a_node_may_not_speak_for_another() {
        let g = grants(&Identity::Node(NodeId::new("den").unwrap()));
        assert!(g.publish.iter().all(|s| s.contains(".den")));
        assert!(!g.subscribe.iter().any(|s| s == ">" || s.starts_with("cfq.v1.>")));
    }
}
