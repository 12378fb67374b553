//! Requests that control tasks.

use reqwest::Method;

use super::{Client, ClientError};
use crate::http::{BulkReply, BulkRequest, PauseRequest, StateReply, TaskPatch};
use crate::ids::TaskKey;
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
}
