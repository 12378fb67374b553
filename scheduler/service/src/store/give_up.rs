//! A runner gives a task up that it cannot drive (a record it cannot read, a step the rules refuse). Counted like a lost
//! runner, because another one, or another version, may be able to; but the reason is known at once and is kept, so that a
//! task that nobody can drive ends with the reason and not with a count.

use cfq_proto::ids::RunnerId;
use cfq_proto::messages::{FenceReply, GiveUp};

use super::error::Doing;
use super::hint::Hint;
use super::take_back::{Lost, take_back};
use super::tasks::lock_task;
use super::{Store, StoreError, nothing};

/// Longest reason kept, in bytes: it comes from another machine.
const LONGEST: usize = 2_000;

impl Store {
    pub async fn give_up(&self, runner: &RunnerId, ask: &GiveUp) -> Result<(FenceReply, Vec<Hint>), StoreError> {
        let mut tx = self.begin().await?;
        let Some(task) = lock_task(&mut tx, ask.fence.task).await?.filter(|t| t.is_held_by(runner, &ask.fence)) else {
            return nothing(tx, (FenceReply::Stale, vec![])).await;
        };
        let reason: String = ask.reason.chars().take(LONGEST).collect();
        let why = Lost::Gone(format!("gave it up: {reason}"));
        let hints = take_back(&mut tx, &task, &why, self.limits.max_task_losses).await?;
        tx.commit().await.doing("giving a task up")?;
        Ok((FenceReply::Committed, hints))
    }
}
