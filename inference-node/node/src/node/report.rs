//! The report of an attempt's outcome to the scheduler.

use std::time::Duration;

use cfq_link::lease::{LeaseHandle, LeaseStatus};
use cfq_link::{LinkError, Session, clock, failpoint};
use cfq_proto::job::{JobFailure, Outcome};
use cfq_proto::messages::{FenceReply, JobResult};

/// Wait before a request is repeated after the scheduler replied that it was unavailable.
pub(super) const RETRY_INTERVAL: Duration = Duration::from_millis(200);

/// Repeats the report until it is committed or the attempt is stale, as long as the lease is held. If the result is too
/// large to be sent, or the scheduler refuses it permanently, a failure is reported once in its place: otherwise the
/// attempt would keep its lease and look as if it were still running.
pub(super) async fn report_until_final(session: &Session, subject: &str, mut report: JobResult, lease: &LeaseHandle) {
    let fence = report.fence;
    let mut replaced = false;
    failpoint::hit("node.before_report");
    loop {
        if lease.settled().await == LeaseStatus::Lost {
            tracing::info!(job = %fence.job, "lease lost before the report was committed");
            return;
        }
        // Recorded as progress, so that waiting for the scheduler does not count as a stalled step.
        lease.record_step();
        let refusal = match session.request::<_, FenceReply>(subject, &report).await {
            Ok(FenceReply::Committed) => {
                failpoint::hit("node.reported");
                let outcome = outcome_name(&report.outcome);
                tracing::info!(job = %fence.job, attempt = fence.attempt, outcome, "outcome reported");
                return;
            }
            Ok(FenceReply::Stale) => {
                tracing::info!(job = %fence.job, attempt = fence.attempt, "report is stale");
                return;
            }
            Ok(FenceReply::Refused { reason }) => Some(reason.to_string()),
            Err(error @ LinkError::TooLarge { .. }) => Some(error.to_string()),
            Ok(FenceReply::Unavailable { reason }) => {
                tracing::debug!(%reason, "scheduler unavailable; the report is repeated");
                None
            }
            Err(error) => {
                tracing::debug!(%error, "no reply; the report is repeated");
                None
            }
        };
        match refusal {
            Some(reason) if replaced => {
                tracing::error!(job = %fence.job, %reason, "failure cannot be stored either; the lease expires");
                return;
            }
            Some(reason) => {
                tracing::error!(job = %fence.job, %reason, "result cannot be stored; a failure is reported");
                replaced = true;
                let reason = format!("the result could not be written: {reason}");
                report.outcome = Outcome::Failed { failure: JobFailure::Engine { reason } };
            }
            None => tokio::time::sleep(RETRY_INTERVAL + clock::jitter(RETRY_INTERVAL / 2)).await,
        }
    }
}

fn outcome_name(outcome: &Outcome) -> &'static str {
    match outcome {
        Outcome::Done { .. } => "done",
        Outcome::Failed { .. } => "failed",
        Outcome::Released { .. } => "released",
    }
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use super::*;
    use cfq_link::NatsConfig;
    use cfq_link::lease::{HeartbeatExtras, LeaseKeeper};
    use cfq_proto::envelope;
    use cfq_proto::ids::{BootId, JobId, LeaseId, NodeId};
    use cfq_proto::messages::JobFence;
    use cfq_proto::subject::{self, Identity};
    use cfq_proto::timing::Timing;
    use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
    use tokio::net::{TcpListener, TcpStream};
    use tokio::sync::mpsc;

    /// Reads one client's messages as a NATS server does, commits every result, and sends it to `results`.
    async fn handle(stream: TcpStream, max_bytes: usize, results: mpsc::Sender<JobResult>) {
        let (read, mut write) = stream.into_split();
        let info = format!(
            "INFO {{\"server_id\":\"x\",\"version\":\"2.12.3\",\"proto\":1,\"headers\":true,\"max_payload\":{max_bytes}}}\r\n"
        );
        write.write_all(info.as_bytes()).await.unwrap();
        let mut read = BufReader::new(read);
        let mut subscription = String::new();
        loop {
            let mut line = String::new();
            if read.read_line(&mut line).await.unwrap_or(0) == 0 {
                return;
            }
            let words: Vec<&str> = line.split_whitespace().collect();
            match *words.as_slice() {
                ["PING"] => write.write_all(b"PONG\r\n").await.unwrap(),
                ["SUB", _, id] => id.clone_into(&mut subscription),
                ["PUB", subject, reply_to, length] => {
                    let mut body = vec![0; length.parse::<usize>().unwrap() + 2];
                    read.read_exact(&mut body).await.unwrap();
                    if subject.ends_with(".result") {
                        results.send(envelope::decode(body.trim_ascii_end()).unwrap()).await.unwrap();
                        let reply = envelope::encode(&FenceReply::Committed).unwrap();
                        let head = format!("MSG {reply_to} {subscription} {}\r\n", reply.len());
                        write.write_all(&[head.as_bytes(), &reply, b"\r\n"].concat()).await.unwrap();
                    }
                }
                _ => {}
            }
        }
    }

    #[tokio::test]
    async fn result_that_is_too_large_to_be_sent_is_reported_as_a_failure() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let nats =
            NatsConfig { url: format!("nats://{}", listener.local_addr().unwrap()), ca_file: None, seed_file: None };
        let (sender, mut results) = mpsc::channel(16);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(handle(stream, 4096, sender.clone()));
            }
        });
        let (node, boot, timing) = (NodeId::new("den").unwrap(), BootId::fresh(), Timing::default());
        let identity = Identity::Node(node.clone());
        let session = Session::connect(&nats, identity.clone(), &timing).await.unwrap();
        let heartbeats = subject::node(&node, "heartbeat");
        let keeper = LeaseKeeper::start(nats, identity, boot, heartbeats, timing, HeartbeatExtras::default).unwrap();
        let fence = JobFence { job: JobId::fresh(), attempt: 1, lease: LeaseId::fresh() };
        let lease = keeper.hold(fence.lease, Instant::now());

        let failure = JobFailure::Engine { reason: "x".repeat(5000) };
        let report = JobResult { fence, boot, outcome: Outcome::Failed { failure } };
        let subject = subject::node(&node, "result");
        let reported = report_until_final(&session, &subject, report, &lease);
        tokio::time::timeout(Duration::from_secs(5), reported).await.expect("the report ends");
        let Outcome::Failed { failure: JobFailure::Engine { reason } } = results.recv().await.unwrap().outcome else {
            panic!("another outcome")
        };
        assert!(reason.contains("could not be written") && reason.contains("4096 bytes"), "{reason}");
        assert!(results.is_empty(), "reported once");
        keeper.stop();
    }
}
