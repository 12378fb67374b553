//! Requests about schedules.

use reqwest::Method;

use super::{Client, ClientError};
use crate::http::{ScheduleList, ScheduleRemoved, ScheduleRequest, ScheduleView, SubmitReply};

impl Client {
    /// Adds a schedule.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn add_schedule(&self, request: &ScheduleRequest) -> Result<ScheduleView, ClientError> {
        self.post("/schedules", request).await
    }

    /// Lists all schedules.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn schedules(&self) -> Result<ScheduleList, ClientError> {
        self.get("/schedules").await
    }

    /// Removes a schedule. Its tasks stay.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn remove_schedule(&self, name: &str) -> Result<ScheduleRemoved, ClientError> {
        self.send(self.request(Method::DELETE, &format!("/schedules/{name}"))).await
    }

    /// Submits the task of a schedule now. A repeat with the same idempotency key creates no second task.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn run_schedule(&self, name: &str, idempotency_key: &str) -> Result<SubmitReply, ClientError> {
        let request = self.request(Method::POST, &format!("/schedules/{name}/run"));
        self.send(request.header("Idempotency-Key", idempotency_key)).await
    }

    /// Pauses a schedule, or continues a paused one with the first time from now on.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn pause_schedule(&self, name: &str, pause: bool) -> Result<ScheduleView, ClientError> {
        let action = if pause { "pause" } else { "resume" };
        self.send(self.request(Method::POST, &format!("/schedules/{name}/{action}"))).await
    }
}
