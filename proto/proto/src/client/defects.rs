//! Reports of defects.

use super::{Client, ClientError};
use crate::http::{DefectReply, DefectReport};
use crate::ids::TaskKey;

impl Client {
    /// Reports a defect in the result of a task.
    ///
    /// # Errors
    /// See [`ClientError`].
    pub async fn report_defect(&self, key: TaskKey, defect: &DefectReport) -> Result<DefectReply, ClientError> {
        self.post(&format!("/tasks/{key}/defects"), defect).await
    }
}
