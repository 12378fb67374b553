//! The main branch of a repository, which the mirrors of all runners follow: its commit, and the recorded merges from
//! which a runner rebuilds it.

use std::path::Path;

use cfq_proto::ids::{RunnerId, TaskId};
use cfq_proto::loop_step::Step;
use cfq_proto::messages::{MainGet, MainReply, MainState, RecordedMerge, RefusedReason};
use sqlx::PgConnection;
use sqlx::types::Json;

use super::artifacts::artifact_chain;
use super::columns::pg_text;
use super::error::Doing;
use super::step_rejection::StepRejection;
use super::tasks::{TaskRow, lock_task};
use super::{Store, StoreError, payload, roll_back};

/// Maximum number of merges in one reply. A runner whose mirror misses more asks again.
const MAX_MERGES_PER_REPLY: i64 = 16;

impl Store {
    /// The main branch of a repository, and the first merges that the sender's mirror misses.
    pub async fn main_branch(&self, runner: &RunnerId, request: &MainGet) -> Result<MainReply, StoreError> {
        let mut tx = self.begin().await?;
        let task = lock_task(&mut tx, request.fence.task).await?;
        if !task.is_some_and(|task| task.is_held_by(runner, &request.fence)) {
            return roll_back(tx, MainReply::Stale).await;
        }
        let expected = repository_of(&mut tx, request.fence.task).await?;
        if !is_same_path(&request.repository, &expected) {
            let reason = RefusedReason::OtherRepository { expected };
            return roll_back(tx, MainReply::Refused { reason }).await;
        }
        let repository = pg_text(&request.repository);
        let found = sqlx::query!(
            r#"select main,
                      exists (select from internal_prs where repository = $1 and base = $2) as "has_base!",
                      (select merge_number from internal_prs where repository = $1 and merge_commit = $3
                       order by merge_number desc limit 1) as after
               from repositories where path = $1"#,
            repository,
            pg_text(&request.base),
            request.after.as_deref().map(pg_text)
        )
        .fetch_optional(&mut *tx)
        .await
        .doing("finding a repository")?;
        let Some(found) = found else { return roll_back(tx, MainReply::NoMerge).await };
        let is_known = request.after.is_none() || found.after.is_some();
        let mut state =
            MainState { commit: found.main, has_base: found.has_base, knows_after: is_known, merges: Vec::new() };
        if is_known && request.after.as_ref() != Some(&state.commit) {
            state.merges = merges_after(&mut tx, &repository, found.after.unwrap_or(0)).await?;
        }
        let state = payload::store(&mut tx, request.fence.task, state).await?;
        tx.commit().await.doing("reading a main branch")?;
        Ok(MainReply::Main { state })
    }
}

/// Path of the task's repository, as submitted.
async fn repository_of(connection: &mut PgConnection, task: TaskId) -> Result<String, StoreError> {
    sqlx::query_scalar!(r#"select spec->>'repo' as "repo!" from tasks where id = $1"#, task.0)
        .fetch_one(connection)
        .await
        .doing("finding a task's repository")
}

/// Whether a runner names the repository that the user submitted. A runner names it without symbolic links, so a task
/// has to be submitted with such a path; otherwise a runner could claim that it leads to another repository.
fn is_same_path(named: &str, submitted: &str) -> bool {
    Path::new(named) == Path::new(submitted)
}

/// The merges with a number above `after`, oldest first, at most [`MAX_MERGES_PER_REPLY`].
async fn merges_after(
    connection: &mut PgConnection,
    repository: &str,
    after: i64,
) -> Result<Vec<RecordedMerge>, StoreError> {
    let rows = sqlx::query!(
        r#"select p.task, a.iteration,
                  (select step from steps s where s.task = p.task and s.kind = 'merge_intent' order by seq desc limit 1)
                      as "intent!: Json<Step>"
           from internal_prs p join artifacts a on a.task = p.task and a.commit = p.head
           where p.repository = $1 and p.merge_number > $2 order by p.merge_number limit $3"#,
        repository,
        after,
        MAX_MERGES_PER_REPLY
    )
    .fetch_all(&mut *connection)
    .await
    .doing("reading merges")?;
    let mut merges = Vec::new();
    for row in rows {
        let Step::MergeIntent { old, new, commit_time, message, .. } = row.intent.0 else { continue };
        let iteration = u32::try_from(row.iteration).unwrap_or_default();
        let Some(mut chain) = artifact_chain(&mut *connection, TaskId(row.task), Some(iteration)).await? else {
            continue;
        };
        for artifact in &mut chain.artifacts {
            artifact.diff.clear();
        }
        merges.push(RecordedMerge { old, new, commit_time, message, base: chain.base, artifacts: chain.artifacts });
    }
    Ok(merges)
}

/// Moves the main branch of the repository in the task's last merge intent to `commit`, or returns why that is
/// impossible. Intents of older runners name no repository: then only their mirror has a main branch.
pub(super) async fn advance(
    connection: &mut PgConnection,
    task: &TaskRow,
    commit: &str,
) -> Result<Result<(), StepRejection>, StoreError> {
    let intent = sqlx::query_scalar!(
        r#"select step as "step: Json<Step>" from steps where task = $1 and kind = 'merge_intent'
           order by seq desc limit 1"#,
        task.id.0
    )
    .fetch_optional(&mut *connection)
    .await
    .doing("finding a merge intent")?;
    let Some(Step::MergeIntent { old, new, repository, .. }) = intent.map(|step| step.0) else {
        return Ok(Ok(()));
    };
    if repository.is_empty() {
        return Ok(Ok(()));
    }
    let expected = repository_of(connection, task.id).await?;
    if !is_same_path(&repository, &expected) {
        return Ok(Err(StepRejection::OtherRepository { named: repository, expected }));
    }
    if new != commit {
        return Ok(Err(StepRejection::NotTheIntendedMerge { intended: new }));
    }
    let number = sqlx::query_scalar!(
        r#"insert into repositories (path, main, merges) values ($1, $2, 1)
           on conflict (path) do update set main = excluded.main, merges = repositories.merges + 1
           where repositories.main = $3
           returning merges"#,
        pg_text(&repository),
        pg_text(&new),
        pg_text(&old)
    )
    .fetch_optional(&mut *connection)
    .await
    .doing("moving a main branch")?;
    let Some(number) = number else { return Ok(Err(StepRejection::MainMoved { repository })) };
    sqlx::query!(
        "update internal_prs set repository = $2, merge_number = $3 where number = $1",
        task.pr,
        pg_text(&repository),
        number
    )
    .execute(connection)
    .await
    .doing("numbering a merge")?;
    Ok(Ok(()))
}
