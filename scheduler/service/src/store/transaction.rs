//! Transactions that report their tasks after the commit, so that event feeds are woken. `NOTIFY` is not used, because
//! Postgres lets transactions with notifications commit only one after another.

use std::ops::{Deref, DerefMut};

use cfq_proto::ids::TaskId;
use sqlx::{PgConnection, Postgres, Transaction};
use tokio::sync::broadcast;

use super::StoreError;
use super::error::Doing;

/// Capacity of the channel, in tasks.
const CHANNEL_TASKS: usize = 4_096;

/// What a committed transaction may have changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Committed {
    /// A task; it may have new events.
    Task(TaskId),
    /// A call of an API client; calls have no events.
    Call(TaskId),
}

/// Channel of what committed transactions of this process may have changed. Clones share the channel.
#[derive(Debug, Clone)]
pub struct CommittedTasks(broadcast::Sender<Committed>);

impl Default for CommittedTasks {
    fn default() -> Self {
        Self(broadcast::Sender::new(CHANNEL_TASKS))
    }
}

impl CommittedTasks {
    pub fn subscribe(&self) -> broadcast::Receiver<Committed> {
        self.0.subscribe()
    }

    pub(super) fn send(&self, committed: Committed) {
        // `send` fails if there is no subscriber, which is not an error.
        drop(self.0.send(committed));
    }
}

/// Whether the change of a transaction is committed, or only tried: everything is checked, and nothing changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Run {
    Commit,
    Dry,
}

/// A transaction on one connection of the pool. It is rolled back if it is dropped.
#[derive(Debug)]
pub(super) struct Tx {
    transaction: Transaction<'static, Postgres>,
    committed: CommittedTasks,
    changed: Vec<Committed>,
}

impl Tx {
    pub fn new(transaction: Transaction<'static, Postgres>, committed: CommittedTasks) -> Self {
        Self { transaction, committed, changed: Vec::new() }
    }

    /// Reports the task after the commit.
    pub fn report(&mut self, task: TaskId) {
        self.report_change(Committed::Task(task));
    }

    /// Reports the task or call after the commit.
    pub fn report_change(&mut self, changed: Committed) {
        if !self.changed.contains(&changed) {
            self.changed.push(changed);
        }
    }

    pub async fn commit(self) -> Result<(), sqlx::Error> {
        self.transaction.commit().await?;
        self.changed.into_iter().for_each(|changed| self.committed.send(changed));
        Ok(())
    }

    /// Ends the transaction. `doing` names the change in errors.
    pub async fn finish(self, run: Run, doing: &'static str) -> Result<(), StoreError> {
        match run {
            Run::Commit => self.commit().await.doing(doing),
            Run::Dry => self.rollback().await.doing(doing),
        }
    }

    pub async fn rollback(self) -> Result<(), sqlx::Error> {
        self.transaction.rollback().await
    }
}

impl Deref for Tx {
    type Target = PgConnection;
    fn deref(&self) -> &PgConnection {
        &self.transaction
    }
}

impl DerefMut for Tx {
    fn deref_mut(&mut self) -> &mut PgConnection {
        &mut self.transaction
    }
}
