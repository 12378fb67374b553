//! Requests about schedules.

use reqwest::Method;

use super::{Client, ClientError};
use crate::http::{ScheduleList, ScheduleRemoved, ScheduleRequest, ScheduleView};

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

    /// Pauses a schedule, or continues a paused one with the first time from now on.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn pause_schedule(&self, name: &str, pause: bool) -> Result<ScheduleView, ClientError> {
        let action = if pause { "pause" } else { "resume" };
        self.send(self.request(Method::POST, &format!("/schedules/{name}/{action}"))).await
    }
}
