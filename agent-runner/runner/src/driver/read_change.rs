//! Reads the change that a task reviews, as the artifact of the task's only iteration.

use cfq_proto::blob::Payload;
use cfq_proto::ids::{ArtifactId, JobId};
use cfq_proto::loop_step::{Artifact, Step};

use super::port::{DriveError, Stopped, TaskPort};
use super::task_driver::{ActionError, TaskDriver};
use crate::workstream::{Change, content_hash};

/// Number of characters of a commit id that users see.
const SHOWN_ID_LENGTH: usize = 12;

impl<P: TaskPort> TaskDriver<P> {
    /// Records the change from the base to the commit to review.
    pub(super) async fn read_change(&mut self) -> Result<(), ActionError> {
        let Some(review) = &self.spec.review else {
            return Err(Stopped::CannotDrive(DriveError::NoArtifact).into());
        };
        let head = review.head.clone();
        let mirror = self.prepare_mirror().await?;
        let base = self.base()?.commit;
        let (of_base, of_head) = (base.clone(), head.clone());
        let read = tokio::task::spawn_blocking(move || {
            let repository = mirror.repository()?;
            Change::read(&repository, &of_base, &of_head)
        });
        let Change { files, diff, message, time } = read.await??;
        let artifact = Artifact {
            id: ArtifactId::fresh(),
            iteration: self.history.next_iteration(),
            content_hash: content_hash(&files),
            model: format!("commit {}", head.get(..SHOWN_ID_LENGTH).unwrap_or(&head)),
            commit: Some(head),
            parent: base,
            commit_time: time,
            commit_message: message,
            files,
            diff: diff.text,
            windows_1252_in_diff: diff.windows_1252,
            job: JobId::NONE,
            prompt_tokens: 0,
            output_tokens: 0,
        };
        let sent = Step::Generated { artifact: self.port.send_artifact(artifact.clone()).await? };
        let kept = Step::Generated { artifact: Payload::Inline(artifact) };
        Ok(self.commit_step_as(sent, kept, 0).await?)
    }
}
