//! The main branch of a repository, which the mirrors of all runners follow: its commit, and the recorded merges from
//! which a runner rebuilds it.

use std::collections::BTreeMap;
use std::path::Path;

use cfq_proto::ids::{RunnerId, TaskId};
use cfq_proto::loop_step::Step;
use cfq_proto::messages::{MainGet, MainReply, MainState, RecordedMerge, RefusedReason};
use sqlx::PgConnection;
use sqlx::types::{Json, Uuid};

use super::artifacts::artifact_chain;
use super::columns::{AsJson, pg_text};
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
                      exists (select from internal_prs where repository = $1 and base = $2)
                          or exists (select from recorded_merges where repository = $1 and base = $2) as "has_base!",
                      greatest((select max(merge_number) from internal_prs where repository = $1 and merge_commit = $3),
                               (select max(number) from recorded_merges where repository = $1 and merge_commit = $3))
                          as after
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

/// The merges with a number above `after`, oldest first, at most [`MAX_MERGES_PER_REPLY`]. Those of deleted tasks are
/// read last, so a task that is deleted meanwhile is found there.
async fn merges_after(
    connection: &mut PgConnection,
    repository: &str,
    after: i64,
) -> Result<Vec<RecordedMerge>, StoreError> {
    let mut merges = BTreeMap::new();
    let kept = sqlx::query!(
        r#"select task, merge_number as "number!" from internal_prs where repository = $1 and merge_number > $2
           order by merge_number limit $3"#,
        repository,
        after,
        MAX_MERGES_PER_REPLY
    )
    .fetch_all(&mut *connection)
    .await
    .doing("reading merges")?;
    for row in kept {
        if let Some(merge) = merge_of(&mut *connection, TaskId(row.task)).await? {
            merges.insert(row.number, merge);
        }
    }
    let deleted = sqlx::query!(
        r#"select number, record as "record!: Json<RecordedMerge>" from recorded_merges
           where repository = $1 and number > $2 and record is not null order by number limit $3"#,
        repository,
        after,
        MAX_MERGES_PER_REPLY
    )
    .fetch_all(connection)
    .await
    .doing("reading merges")?;
    merges.extend(deleted.into_iter().map(|row| (row.number, row.record.0)));
    Ok(merges.into_values().take(MAX_MERGES_PER_REPLY as usize).collect())
}

/// The merge of a task's pull request; `None` if the steps do not contain it.
async fn merge_of(connection: &mut PgConnection, task: TaskId) -> Result<Option<RecordedMerge>, StoreError> {
    let row = sqlx::query!(
        r#"select a.iteration,
                  (select step from steps s where s.task = p.task and s.kind = 'merge_intent' order by seq desc limit 1)
                      as "intent: Json<Step>"
           from internal_prs p join artifacts a on a.task = p.task and a.commit = p.head
           where p.task = $1 and p.merge_number is not null"#,
        task.0
    )
    .fetch_optional(&mut *connection)
    .await
    .doing("reading a merge")?;
    let Some(row) = row else { return Ok(None) };
    let Some(Step::MergeIntent { old, new, commit_time, message, .. }) = row.intent.map(|step| step.0) else {
        return Ok(None);
    };
    let iteration = u32::try_from(row.iteration).unwrap_or_default();
    let Some(mut chain) = artifact_chain(connection, task, Some(iteration)).await? else { return Ok(None) };
    for artifact in &mut chain.artifacts {
        artifact.diff.clear();
    }
    Ok(Some(RecordedMerge { old, new, commit_time, message, base: chain.base, artifacts: chain.artifacts }))
}

/// Records the merges of these tasks apart from the tasks, which may then be deleted. The tasks are locked.
pub(super) async fn record_merges(connection: &mut PgConnection, tasks: &[Uuid]) -> Result<(), StoreError> {
    let merged = sqlx::query!(
        r#"select task, repository as "repository!", merge_number as "number!", merge_commit as "merge_commit!", base
           from internal_prs where task = any($1) and merge_number is not null"#,
        tasks
    )
    .fetch_all(&mut *connection)
    .await
    .doing("finding the merges of expired tasks")?;
    for row in merged {
        let merge = match merge_of(&mut *connection, TaskId(row.task)).await {
            Ok(merge) => merge,
            Err(error) if error.may_retry() => return Err(error),
            Err(error) => {
                tracing::warn!(task = %row.task, %error, "the merge of an expired task cannot be read, so it is not kept");
                None
            }
        };
        sqlx::query!(
            "insert into recorded_merges (repository, number, merge_commit, base, record) values ($1, $2, $3, $4, $5)",
            row.repository,
            row.number,
            row.merge_commit,
            row.base,
            merge.map(AsJson) as _
        )
        .execute(&mut *connection)
        .await
        .doing("recording a merge")?;
    }
    Ok(())
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
