//! Reads artifacts together with the earlier artifacts that they are based on, and internal pull requests (kept in cfq,
//! not on a forge).

use std::collections::BTreeMap;

use cfq_proto::http::{ArtifactChain, PrMove, PrView};
use cfq_proto::ids::{ArtifactId, TaskId, TaskNumber};
use cfq_proto::loop_step::{Artifact, Step};
use cfq_proto::pr::PrState;
use cfq_proto::review::CheckRun;
use sqlx::PgConnection;
use sqlx::types::Json;

use super::columns::parse;
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

    /// The internal pull request `number`; `None` if there is none.
    pub async fn pr(&self, number: i64) -> Result<Option<PrView>, StoreError> {
        Ok(self.find_prs(&[], number, number, 1).await?.pop())
    }

    /// Internal pull requests in these states (all if there are none), newest first: the first `limit` before `before`.
    pub async fn prs(&self, states: &[PrState], before: Option<i64>, limit: i64) -> Result<Vec<PrView>, StoreError> {
        let last = before.map_or(i64::MAX, |before| before.saturating_sub(1));
        self.find_prs(states, 0, last, limit).await
    }

    async fn find_prs(&self, states: &[PrState], first: i64, last: i64, limit: i64) -> Result<Vec<PrView>, StoreError> {
        let states: Vec<&str> =
            if states.is_empty() { &PrState::ALL[..] } else { states }.iter().map(|state| state.as_str()).collect();
        // The index on (state, number) is read once for each state.
        let rows = sqlx::query!(
            r#"select p.number, t.number as task, p.title, p.state, p.branch, p.head, p.base, p.merge_commit,
                      p.merge_checks as "merge_checks: Json<Vec<CheckRun>>"
               from unnest($1::text[]) as wanted (state),
                    lateral (select * from internal_prs
                             where internal_prs.state = wanted.state and internal_prs.number between $2 and $3
                             order by internal_prs.number desc limit $4) as p
                    join tasks t on t.id = p.task
               order by p.number desc limit $4"#,
            &states as &[&str],
            first,
            last,
            limit
        )
        .fetch_all(&self.pool)
        .await
        .doing("reading pull requests")?;
        let numbers: Vec<i64> = rows.iter().map(|r| r.number).collect();
        let moves = sqlx::query!(
            r#"select pr, "to", reason, extract(epoch from at)::float8 as "at!" from internal_pr_moves
               where pr = any($1) order by pr, n"#,
            &numbers
        )
        .fetch_all(&self.pool)
        .await
        .doing("reading pull requests")?;
        let mut history: BTreeMap<i64, Vec<PrMove>> = BTreeMap::new();
        for m in moves {
            let to = parse("pull request state", &m.to)?;
            history.entry(m.pr).or_default().push(PrMove { to, reason: m.reason, at: m.at });
        }
        rows.into_iter()
            .map(|r| {
                Ok(PrView {
                    number: r.number,
                    task: TaskNumber(r.task),
                    title: r.title,
                    state: parse("pull request state", &r.state)?,
                    branch: r.branch,
                    head: r.head,
                    base: r.base,
                    // Those of a merge that was planned and not carried out do not matter.
                    merge_checks: r.merge_commit.as_ref().map_or_else(Vec::new, |_| r.merge_checks.0),
                    merge_commit: r.merge_commit,
                    history: history.remove(&r.number).unwrap_or_default(),
                })
            })
            .collect()
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
