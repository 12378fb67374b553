//! NATS subjects, and the permissions of each kind of client. The sender's name is a fixed token of the subject, so a
//! receiver knows the sender that the NATS server authenticated and does not rely on a name in the body. `cfq-deploy`
//! renders [`grants`] into the server's configuration.

use crate::ids::{BootId, JobId, NodeId, RunnerId};

/// JetStream stream that carries work to nodes.
pub const WORK_STREAM: &str = "WORK";
/// All subjects of [`WORK_STREAM`].
pub const WORK_ALL: &str = "cfq.v1.work.>";
/// Subject of the hints for all runners; each runner also subscribes to its own commands.
pub const HINT_RUNNERS: &str = "cfq.v1.hint.runners";
/// Subject of the hints for the leader: a scheduler publishes here that something changed.
pub const HINT_LEADER: &str = "cfq.v1.hint.leader";
/// Subject of the hints between schedulers: a scheduler publishes here which tasks may have new events.
pub const HINT_EVENTS: &str = "cfq.v1.hint.events";
/// Subject on which the leader announces itself to the other schedulers.
pub const LEADER_ANNOUNCEMENTS: &str = "cfq.v1.leader";
/// Subject of the requests of schedulers to the leader for its plan of a job.
pub const LEADER_EXPLAIN: &str = "cfq.v1.leader.explain";
/// Subject filter for the prefill hints of all runners; the leader subscribes to it.
pub const PREFILL_HINTS_ALL: &str = "cfq.v1.runner.*.prefill_hint";

/// Subject of the work orders for one boot of a node, on which the scheduler publishes them into [`WORK_STREAM`].
pub fn work(node: &NodeId, boot: BootId) -> String {
    format!("cfq.v1.work.{node}.{boot}")
}

/// Subject on which JetStream pushes the work orders to one boot of a node. The node must subscribe to exactly this
/// subject: JetStream does not notice a subscription with a wildcard.
pub fn order(node: &NodeId, boot: BootId) -> String {
    format!("cfq.v1.order.{node}.{boot}")
}

/// Name of the durable consumer that pushes the work orders for one boot of a node.
pub fn consumer(node: &NodeId, boot: BootId) -> String {
    format!("{node}_{boot}")
}

/// Subject of a node's requests. `verb` is the last token: `register`, `heartbeat`, `preparing`, `accept`, `refuse`,
/// `journal`, `result`, `blob_put`, `blob_get`.
pub fn node(node: &NodeId, verb: &str) -> String {
    format!("cfq.v1.node.{node}.{verb}")
}

/// Subject of the token frames of a job that runs on `node`.
pub fn tokens(node: &NodeId, job: JobId) -> String {
    format!("cfq.v1.node.{node}.tokens.{job}")
}

/// Subject filter for the token frames of one job on any node; pass `*` for the token frames of all jobs.
pub fn tokens_of(job: &str) -> String {
    format!("cfq.v1.node.*.tokens.{job}")
}

/// Subject of a runner's requests. `verb` is the last token: `register`, `lease`, `heartbeat`, `step`, `job_submit`,
/// `job_get`, `job_cancel`, `prefill_hint`, `release`, `abandon`, `blob_put`, `blob_get`.
pub fn runner(runner: &RunnerId, verb: &str) -> String {
    format!("cfq.v1.runner.{runner}.{verb}")
}

/// Subject of the commands for a node.
pub fn node_command(node: &NodeId) -> String {
    format!("cfq.v1.cmd.node.{node}")
}

/// Subject of the commands for a runner.
pub fn runner_command(runner: &RunnerId) -> String {
    format!("cfq.v1.cmd.runner.{runner}")
}

/// Subject on which a scheduler sends a message to itself, to test whether the server delivers messages.
pub fn round_trip(id: &uuid::Uuid) -> String {
    format!("cfq.v1.round_trip.{}", id.simple())
}

/// Returns sender and verb of a request on `cfq.v1.{node,runner}.<id>.<verb>`; `None` for any other subject.
pub fn sender(subject: &str) -> Option<(&str, &str)> {
    let mut tokens = subject.split('.');
    let head = (tokens.next()?, tokens.next()?, tokens.next()?);
    if head.0 != "cfq" || head.1 != "v1" || !matches!(head.2, "node" | "runner") {
        return None;
    }
    let found = (tokens.next()?, tokens.next()?);
    tokens.next().is_none().then_some(found)
}

/// Returns whether a reply subject is below the inbox prefix of the `node` or `runner` named `sender`. The NATS server
/// does not check the reply subject of a request: without this check, a client could name any subject that the scheduler
/// may publish to, such as another node's work or the JetStream API.
pub fn is_inbox_of(kind: &str, sender: &str, reply: &str) -> bool {
    reply.strip_prefix(&format!("{INBOX_PREFIX}{kind}_{sender}.")).is_some_and(|rest| !rest.is_empty())
}

/// Beginning of the inbox prefix of every client.
const INBOX_PREFIX: &str = "_INBOX_";

/// Identity of a client of the NATS server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Identity {
    /// A scheduler; all schedulers share one identity.
    Scheduler,
    /// A node.
    Node(NodeId),
    /// A runner.
    Runner(RunnerId),
}

impl Identity {
    /// Prefix of the inboxes that replies are sent to; each client may only read its own inboxes.
    pub fn inbox_prefix(&self) -> String {
        match self {
            Self::Scheduler => format!("{INBOX_PREFIX}scheduler"),
            Self::Node(id) => format!("{INBOX_PREFIX}node_{id}"),
            Self::Runner(id) => format!("{INBOX_PREFIX}runner_{id}"),
        }
    }
}

/// Permissions of a client; the server rejects everything else.
///
/// Only the scheduler may publish to `$JS.>`. JetStream sends replies and status messages to the reply subject of a
/// request, with its own permissions and without checking those of the client. So a client that may send JetStream one
/// request, for example a pull or an acknowledgement, can publish to every subject.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Grants {
    /// Subjects the client may publish to.
    pub publish: Vec<String>,
    /// Subjects the client may subscribe to.
    pub subscribe: Vec<String>,
    /// True if the client may publish to the reply subjects of the messages that it receives. It must be false for a
    /// client that receives messages of clients other than the scheduler: their senders choose the reply subjects.
    pub responses: bool,
}

/// Returns the permissions of a client.
pub fn grants(identity: &Identity) -> Grants {
    let inbox = format!("{}.>", identity.inbox_prefix());
    match identity {
        Identity::Scheduler => Grants {
            publish: vec!["cfq.v1.>".into(), "$JS.API.>".into()],
            subscribe: vec!["cfq.v1.>".into(), inbox],
            responses: true,
        },
        Identity::Node(id) => Grants {
            publish: vec![format!("cfq.v1.node.{id}.>")],
            subscribe: vec![format!("cfq.v1.cmd.node.{id}"), format!("cfq.v1.order.{id}.*"), inbox],
            responses: true,
        },
        Identity::Runner(id) => Grants {
            publish: vec![format!("cfq.v1.runner.{id}.>")],
            // Includes the token frames of all jobs: any ready task may be granted to a runner, so a runner may read
            // the frames of every task.
            subscribe: vec![format!("cfq.v1.cmd.runner.{id}"), HINT_RUNNERS.into(), tokens_of("*"), inbox],
            responses: false,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sender_is_read_from_the_subject() {
        assert_eq!(sender("cfq.v1.node.den.heartbeat"), Some(("den", "heartbeat")));
        assert_eq!(sender("cfq.v1.runner.r1.step"), Some(("r1", "step")));
        for other in ["cfq.v2.node.den.heartbeat", "cfq.v1.node.den.tokens.x", "cfq.v1.work.den.x", "cfq.v1.node.den"] {
            assert_eq!(sender(other), None, "{other}");
        }
    }

    #[test]
    fn inbox_belongs_to_one_client() {
        for (kind, name, identity) in [
            ("node", "den", Identity::Node(NodeId::new("den").unwrap())),
            ("runner", "den", Identity::Runner(RunnerId::new("den").unwrap())),
        ] {
            assert!(is_inbox_of(kind, name, &format!("{}.abc.1", identity.inbox_prefix())));
        }
        let foreign = [
            "_INBOX_runner_den.a",
            "_INBOX_node_denmark.a",
            "_INBOX_node_den",
            "_INBOX_node_den.",
            "_INBOX_scheduler.a",
            "_INBOX.a",
            "cfq.v1.work.den.x",
            "$JS.API.STREAM.DELETE.WORK",
            "",
        ];
        assert!(foreign.iter().all(|reply| !is_inbox_of("node", "den", reply)));
    }

    #[test]
    fn node_may_publish_only_under_its_own_name() {
        let g = grants(&Identity::Node(NodeId::new("den").unwrap()));
        assert_eq!(g.publish, ["cfq.v1.node.den.>"]);
        assert!(!g.subscribe.iter().any(|s| s == ">" || s.starts_with("cfq.v1.>")));
    }

    #[test]
    fn only_the_scheduler_may_publish_to_jetstream() {
        for identity in [Identity::Node(NodeId::new("den").unwrap()), Identity::Runner(RunnerId::new("r1").unwrap())] {
            let publish = grants(&identity).publish;
            assert!(publish.iter().all(|subject| subject.starts_with("cfq.v1.")), "{publish:?}");
        }
    }
}
