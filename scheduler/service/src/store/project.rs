//! What a step makes of the rows people read: artifacts, iterations, reviews, pull requests, deliveries. The steps stay the
//! truth; all of this could be made again from them.

use cfq_proto::blob::Carried;
use cfq_proto::looping::{Artifact, Decided, Step};
use cfq_proto::pr::PrState;
use sqlx::PgConnection;

use super::as_json::AsJson;
use super::error::{Doing, plain, read};
use super::tasks::TaskRow;
use super::{Store, StoreError};

/// Artifacts above this are shortened in events: a feed is watched live by many, the artifact is asked for once.
const EVENT_ARTIFACT: usize = 16 * 1024;

pub(super) struct Shown {
    /// The step as the event tells it.
    pub step: Step,
    pub pr: Option<i64>,
    pub decided: Option<Decided>,
}

/// Refuses what contradicts the rows that are there.
pub(super) async fn project(
    connection: &mut PgConnection,
    task: &TaskRow,
    step: &Step,
) -> Result<Result<Shown, String>, StoreError> {
    let mut shown = Shown { step: step.clone(), pr: None, decided: None };
    match step {
        Step::Started { .. }
        | Step::Resolved { .. }
        | Step::Cancelled { .. }
        | Step::HandOffHeld { .. }
        | Step::HandedOff { .. }
        | Step::MergeIntent { .. } => {}
        Step::Generated { artifact } => {
            let artifact = Store::carried(connection, artifact.clone()).await?;
            if let Err(reason) = keep_artifact(connection, task, &artifact).await? {
                return Ok(Err(reason));
            }
            shown.step = Step::Generated { artifact: Carried::Inline(shortened(artifact)) };
        }
        Step::Checked { iteration, findings, quarantine } => {
            let done = sqlx::query!(
                "update iterations set findings = $3, quarantine = $4 where task = $1 and iteration = $2",
                task.id.0,
                number(*iteration),
                AsJson(findings) as _,
                quarantine.map(AsJson) as _
            )
            .execute(connection)
            .await
            .doing("keeping findings")?;
            if done.rows_affected() == 0 {
                return Ok(Err(format!("there is no iteration {iteration}")));
            }
        }
        Step::Reviewed { iteration, review, job, model } => {
            let done = sqlx::query!(
                r#"insert into reviews (task, iteration, job, model, review)
                   select $1, $2, $3, $4, $5 from iterations where task = $1 and iteration = $2
                   on conflict (task, iteration, job) do nothing"#,
                task.id.0,
                number(*iteration),
                job.0,
                plain(model),
                AsJson(review) as _
            )
            .execute(connection)
            .await
            .doing("keeping a review")?;
            if done.rows_affected() == 0 {
                return Ok(Err(format!("there is no iteration {iteration} that this review is new to")));
            }
        }
        Step::Decided { iteration, decided } => {
            sqlx::query!(
                "update iterations set decided = $3 where task = $1 and iteration = $2",
                task.id.0,
                number(*iteration),
                AsJson(decided) as _
            )
            .execute(&mut *connection)
            .await
            .doing("keeping a decision")?;
            sqlx::query!(
                "update tasks set best_iteration = $2, best_score = $3 where id = $1",
                task.id.0,
                decided.best_iteration.map(number),
                decided.best_score
            )
            .execute(connection)
            .await
            .doing("keeping the best iteration")?;
            shown.decided = Some(decided.clone());
        }
        Step::PrOpened { head, base, branch } => {
            if task.pr.is_some() {
                return Ok(Err("its pull request exists already".to_owned()));
            }
            shown.pr = Some(open_pr(connection, task, head, base, branch).await?);
        }
        Step::PrMoved { to, why } => return Ok(move_pr(connection, task, *to, why, None).await?.map(|()| shown)),
        Step::Merged { commit } => {
            return Ok(move_pr(connection, task, PrState::Merged, "merged", Some(commit)).await?.map(|()| shown));
        }
        Step::Delivered { branch, commit } => {
            sqlx::query!(
                "update tasks set delivered_branch = $2, delivered_commit = $3 where id = $1",
                task.id.0,
                plain(branch),
                plain(commit)
            )
            .execute(connection)
            .await
            .doing("keeping a delivery")?;
        }
    }
    Ok(Ok(shown))
}

async fn keep_artifact(
    connection: &mut PgConnection,
    task: &TaskRow,
    artifact: &Artifact,
) -> Result<Result<(), String>, StoreError> {
    let paths: Vec<&str> = artifact.files.iter().map(|f| f.path.as_str()).collect();
    let commit = artifact.commit.as_deref().map(plain);
    let made = sqlx::query!(
        r#"insert into iterations (task, iteration, artifact, content_hash, commit, model, paths, prompt_tokens, output_tokens)
           values ($1, $2, $3, $4, $5, $6, $7, $8, $9) on conflict do nothing"#,
        task.id.0,
        number(artifact.iteration),
        artifact.id.0,
        plain(&artifact.content_hash),
        commit,
        plain(&artifact.model),
        AsJson(paths) as _,
        i64::from(artifact.prompt_tokens),
        i64::from(artifact.output_tokens)
    )
    .execute(&mut *connection)
    .await
    .doing("keeping an iteration")?;
    if made.rows_affected() == 0 {
        return Ok(Err(format!("iteration {} exists already", artifact.iteration)));
    }
    let made = sqlx::query!(
        r#"insert into artifacts (id, task, iteration, seq, content_hash, commit, parent)
           values ($1, $2, $3, $4, $5, $6, $7) on conflict (id) do nothing"#,
        artifact.id.0,
        task.id.0,
        number(artifact.iteration),
        task.next_seq,
        plain(&artifact.content_hash),
        commit,
        plain(&artifact.parent)
    )
    .execute(&mut *connection)
    .await
    .doing("keeping an artifact")?;
    if made.rows_affected() == 0 {
        return Ok(Err(format!("artifact {} exists already", artifact.id)));
    }
    sqlx::query!("update tasks set iteration = $2 where id = $1", task.id.0, number(artifact.iteration))
        .execute(connection)
        .await
        .doing("counting an iteration")?;
    Ok(Ok(()))
}

async fn open_pr(
    connection: &mut PgConnection,
    task: &TaskRow,
    head: &str,
    base: &str,
    branch: &str,
) -> Result<i64, StoreError> {
    let pr = sqlx::query_scalar!(
        r#"insert into internal_prs (task, title, state, branch, head, base) values ($1, $2, 'pending_qc', $3, $4, $5)
           returning number"#,
        task.id.0,
        task.title,
        plain(branch),
        plain(head),
        plain(base)
    )
    .fetch_one(&mut *connection)
    .await
    .doing("opening a pull request")?;
    sqlx::query!(r#"insert into internal_pr_moves (pr, n, "to", why) values ($1, 1, 'pending_qc', 'opened')"#, pr)
        .execute(&mut *connection)
        .await
        .doing("opening a pull request")?;
    sqlx::query!("update tasks set pr = $2 where id = $1", task.id.0, pr)
        .execute(&mut *connection)
        .await
        .doing("opening a pull request")?;
    sqlx::query!("update steps set pr = $3 where task = $1 and seq = $2", task.id.0, task.next_seq, pr)
        .execute(connection)
        .await
        .doing("opening a pull request")?;
    Ok(pr)
}

/// Moves the task's pull request, if the table of its states allows it.
pub(super) async fn move_pr(
    connection: &mut PgConnection,
    task: &TaskRow,
    to: PrState,
    why: &str,
    merge_commit: Option<&str>,
) -> Result<Result<(), String>, StoreError> {
    let Some(pr) = task.pr else { return Ok(Err("it has no pull request".to_owned())) };
    let from = sqlx::query_scalar!("select state from internal_prs where number = $1 for update", pr)
        .fetch_one(&mut *connection)
        .await
        .doing("finding a pull request")?;
    let from: PrState = read("pull request state", &from)?;
    if !cfq_scheduler_core::pr_legal(from, to) {
        return Ok(Err(format!("pull request {pr} is {from}, it cannot become {to}")));
    }
    sqlx::query!(
        "update internal_prs set state = $2, merge_commit = coalesce($3, merge_commit) where number = $1",
        pr,
        to.as_str(),
        merge_commit.map(plain)
    )
    .execute(&mut *connection)
    .await
    .doing("moving a pull request")?;
    sqlx::query!(
        r#"insert into internal_pr_moves (pr, n, "to", why)
           select $1, coalesce(max(n), 0) + 1, $2, $3 from internal_pr_moves where pr = $1"#,
        pr,
        to.as_str(),
        plain(why)
    )
    .execute(connection)
    .await
    .doing("moving a pull request")?;
    Ok(Ok(()))
}

fn number(iteration: u32) -> i32 {
    i32::try_from(iteration).unwrap_or(i32::MAX)
}

/// Paths stay, contents go, the diff is cut at a line.
fn shortened(mut artifact: Artifact) -> Artifact {
    let contents: usize = artifact.files.iter().filter_map(|f| f.content.as_ref()).map(String::len).sum();
    if contents + artifact.diff.len() <= EVENT_ARTIFACT {
        return artifact;
    }
    for content in artifact.files.iter_mut().filter_map(|f| f.content.as_mut()) {
        content.clear();
    }
    if artifact.diff.len() > EVENT_ARTIFACT {
        let end = artifact.diff.char_indices().map(|(i, _)| i).take_while(|i| *i <= EVENT_ARTIFACT).last().unwrap_or(0);
        let end = artifact.diff.get(..end).and_then(|cut| cut.rfind('\n')).map_or(0, |i| i + 1);
        artifact.diff.truncate(end);
        artifact.diff.push_str("... (shortened; ask for the artifact)\n");
    }
    artifact
}
