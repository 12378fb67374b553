//! Requests that control tasks and dead letters.

use reqwest::Method;

use super::{Client, ClientError};
use crate::http::{
    BulkReply, BulkRequest, DeadLetterDetail, DeadLetterList, PauseRequest, RequeueReply, StateReply, TaskPatch,
};
use crate::ids::{JobId, TaskKey};
use crate::task::Priority;

impl Client {
    /// Pauses a task, at once or after the running step.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn pause(&self, key: TaskKey, reason: &str) -> Result<StateReply, ClientError> {
        self.post(&format!("/tasks/{key}/pause"), &PauseRequest { reason: reason.to_owned() }).await
    }

    /// Resumes a paused task.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn resume(&self, key: TaskKey) -> Result<StateReply, ClientError> {
        self.send(self.request(Method::POST, &format!("/tasks/{key}/resume"))).await
    }

    /// Acknowledges the failure of a task.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn acknowledge(&self, key: TaskKey) -> Result<StateReply, ClientError> {
        self.send(self.request(Method::POST, &format!("/tasks/{key}/acknowledge"))).await
    }

    /// Changes the priority of a task that has not ended.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn set_priority(&self, key: TaskKey, priority: Priority) -> Result<StateReply, ClientError> {
        self.send(self.request(Method::PATCH, &format!("/tasks/{key}")).json(&TaskPatch { priority })).await
    }

    /// Carries out an action on many tasks, or on a part of them: see [`BulkReply`].
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn act_on_tasks(&self, request: &BulkRequest) -> Result<BulkReply, ClientError> {
        self.post("/tasks/actions", request).await
    }

    /// Lists at most `limit` dead letters of tasks that have not ended; those after `after`.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn dead_letters(&self, after: Option<JobId>, limit: u32) -> Result<DeadLetterList, ClientError> {
        let after = after.map(|job| format!("&after={job}")).unwrap_or_default();
        self.get(&format!("/dead-letters?limit={limit}{after}")).await
    }

    /// Gets a dead letter with its attempts. `key` is the id of the job, or the number or id of its task.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn dead_letter(&self, key: TaskKey) -> Result<DeadLetterDetail, ClientError> {
        self.get(&format!("/dead-letters/{key}")).await
    }

    /// Queues a dead letter again.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn requeue_dead_letter(&self, key: TaskKey) -> Result<RequeueReply, ClientError> {
        self.send(self.request(Method::POST, &format!("/dead-letters/{key}/requeue"))).await
    }
}
