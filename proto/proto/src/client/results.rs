//! Requests about the results of tasks that have ended.

use reqwest::Method;

use super::{Client, ClientError};
use crate::http::{DefectReply, DefectReport, StateReply};
use crate::ids::TaskKey;

impl Client {
    /// Says that the user knows of a task's failure.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn acknowledge(&self, key: TaskKey) -> Result<StateReply, ClientError> {
        self.send(self.request(Method::POST, &format!("/tasks/{key}/acknowledge"))).await
    }

    /// Reports a defect in the result of a task.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn report_defect(&self, key: TaskKey, defect: &DefectReport) -> Result<DefectReply, ClientError> {
        self.post(&format!("/tasks/{key}/defects"), defect).await
    }
}
