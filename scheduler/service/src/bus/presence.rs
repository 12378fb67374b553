//! Decides whether this scheduler answers requests. All schedulers share one NATS queue group, and NATS delivers each
//! request to any member, also to one that is stopped or hangs: the request would be lost. So a scheduler leaves the
//! group while another one leads. The leader announces itself several times a second; if the announcements stop, every
//! scheduler joins the group again, because any of them may answer (every write is fenced).

use std::time::Duration;

use cfq_link::stop::Stop;
use cfq_link::{LinkError, Session};
use cfq_proto::subject::LEADER_ANNOUNCEMENTS;
use cfq_proto::timing::Timing;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use uuid::Uuid;

/// Number of announcements per renewal of the leader row. A scheduler joins the group after a renewal interval without
/// an announcement.
const ANNOUNCEMENTS_PER_RENEWAL: u32 = 5;

/// Announcement of the leader.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct LeaderAnnouncement {
    /// The scheduler that leads.
    scheduler: Uuid,
}

/// Publishes announcements until it is dropped: this scheduler leads.
pub async fn announce(session: &Session, scheduler: Uuid, timing: &Timing) {
    loop {
        if let Err(error) = session.publish(LEADER_ANNOUNCEMENTS, &LeaderAnnouncement { scheduler }).await {
            tracing::debug!(%error, "leader not announced");
        }
        tokio::time::sleep(timing.leader_renewal() / ANNOUNCEMENTS_PER_RENEWAL).await;
    }
}

/// Follows the announcements of other schedulers until `stop` is raised. The returned value is true while this
/// scheduler answers requests.
pub async fn follow(
    session: &Session,
    scheduler: Uuid,
    timing: &Timing,
    mut stop: Stop,
) -> Result<watch::Receiver<bool>, LinkError> {
    let mut announcements = session.subscribe::<LeaderAnnouncement>(LEADER_ANNOUNCEMENTS).await?;
    let silence: Duration = timing.leader_renewal();
    let (answers, follower) = watch::channel(true);
    tokio::spawn(async move {
        loop {
            let others = async {
                loop {
                    match announcements.next().await {
                        Some(message) if message.body.as_ref().is_ok_and(|leader| leader.scheduler == scheduler) => {}
                        Some(message) if message.body.is_ok() => return true,
                        Some(_) => {}
                        // The connection is closed permanently.
                        None => std::future::pending().await,
                    }
                }
            };
            let other_leads = tokio::select! {
                heard = tokio::time::timeout(silence, others) => heard == Ok(true),
                () = stop.raised() => return,
            };
            let changed = answers.send_if_modified(|answers| std::mem::replace(answers, !other_leads) == other_leads);
            match (changed, other_leads) {
                (true, true) => tracing::info!("another scheduler leads and answers the requests of nodes and runners"),
                (true, false) => tracing::info!("no other scheduler leads, answering requests of nodes and runners"),
                (false, _) => {}
            }
        }
    });
    Ok(follower)
}
