//! Reads artifacts together with the earlier artifacts that they are based on.

use cfq_proto::http::ArtifactChain;
use cfq_proto::ids::{ArtifactId, TaskId, TaskNumber};
use cfq_proto::loop_step::{Artifact, Step};
use sqlx::PgConnection;
use sqlx::types::Json;

use super::error::Doing;
use super::{Store, StoreError, payload};

impl Store {
    /// The artifact of an iteration, preceded by the earlier artifacts on whose commits it is based, oldest first. If
    /// `iteration` is `None`, the best iteration is used, or the latest if no iteration is the best yet. `None` if
    /// there is no such task or artifact.
    pub async fn artifact_chain(
        &self,
        task: TaskId,
        iteration: Option<u32>,
    ) -> Result<Option<ArtifactChain>, StoreError> {
        let mut connection = self.pool.acquire().await.doing("connecting")?;
        artifact_chain(&mut connection, task, iteration).await
    }

    /// The artifact, preceded by the earlier ones on whose commits it is based, oldest first.
    pub async fn artifact_chain_of(&self, artifact: ArtifactId) -> Result<Option<ArtifactChain>, StoreError> {
        let mut connection = self.pool.acquire().await.doing("connecting")?;
        chain_of(&mut connection, artifact).await
    }
}

/// As [`Store::artifact_chain_of`].
pub(super) async fn chain_of(
    connection: &mut PgConnection,
    artifact: ArtifactId,
) -> Result<Option<ArtifactChain>, StoreError> {
    let found = sqlx::query!("select task, iteration from artifacts where id = $1", artifact.0)
        .fetch_optional(&mut *connection)
        .await
        .doing("finding an artifact")?;
    let Some(found) = found else { return Ok(None) };
    let iteration = u32::try_from(found.iteration).unwrap_or(0);
    artifact_chain(connection, TaskId(found.task), Some(iteration)).await
}

/// As [`Store::artifact_chain`].
pub(super) async fn artifact_chain(
    connection: &mut PgConnection,
    task: TaskId,
    iteration: Option<u32>,
) -> Result<Option<ArtifactChain>, StoreError> {
    let wanted = sqlx::query!(
        r#"select t.number, coalesce($2, t.best_iteration, t.iteration) as "iteration!",
                  (select step from steps where task = t.id and kind = 'started' order by seq limit 1)
                      as "started: Json<Step>"
           from tasks t where id = $1"#,
        task.0,
        iteration.map(|n| i32::try_from(n).unwrap_or(i32::MAX))
    )
    .fetch_optional(&mut *connection)
    .await
    .doing("finding an artifact")?;
    let Some(wanted) = wanted else { return Ok(None) };
    let rows = sqlx::query!(
        r#"select a.iteration, s.step as "step: Json<Step>" from artifacts a join steps s on s.task = a.task and s.seq = a.seq
           where a.task = $1 and a.iteration <= $2 order by a.iteration desc"#,
        task.0,
        wanted.iteration
    )
    .fetch_all(&mut *connection)
    .await
    .doing("reading artifacts")?;
    let mut chain: Vec<Artifact> = Vec::new();
    for row in rows {
        let Step::Generated { artifact } = row.step.0 else { continue };
        let artifact: Artifact = payload::load(&mut *connection, artifact).await?;
        match chain.last() {
            None if row.iteration != wanted.iteration => return Ok(None),
            None => chain.push(artifact),
            // Artifacts without a commit, and artifacts whose commit is not the parent of the previous one, are
            // skipped.
            Some(child) if artifact.commit.as_deref() == Some(child.parent.as_str()) => chain.push(artifact),
            Some(_) => {}
        }
    }
    if chain.is_empty() {
        return Ok(None);
    }
    chain.reverse();
    let base = match wanted.started.map(|s| s.0) {
        Some(Step::Started { base, .. }) => base,
        _ => chain.first().map(|a| a.parent.clone()).unwrap_or_default(),
    };
    Ok(Some(ArtifactChain { number: TaskNumber(wanted.number), base, artifacts: chain }))
}
