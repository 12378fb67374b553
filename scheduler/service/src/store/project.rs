//! Projection of steps onto the rows that users read: artifacts, iterations, reviews, pull requests, deliveries. The
//! steps are the source of truth; these rows can be rebuilt from them.

use cfq_proto::blob::Payload;
use cfq_proto::loop_step::{Artifact, Decided, Step};
use cfq_proto::pr::PrState;
use sqlx::PgConnection;

use super::columns::{AsJson, parse, pg_text};
use super::error::Doing;
use super::step_rejection::StepRejection;
use super::tasks::TaskRow;
use super::{StoreError, main_branch, payload};

/// Maximum size of an artifact in an event, in bytes. Larger artifacts are shortened, because each open feed sends them
/// to its reader; the full artifact can be requested separately.
const MAX_EVENT_ARTIFACT_BYTES: usize = 16 * 1024;

/// Result of projecting a step.
pub(super) struct Projection {
    /// The step in the form that its event contains: an artifact in it may be shortened.
    pub step: Step,
    /// Number of the pull request that the step opened.
    pub pr: Option<i64>,
    pub decided: Option<Decided>,
}

/// Projects the next step of a locked task, or returns why the step contradicts the existing rows.
pub(super) async fn project(
    connection: &mut PgConnection,
    task: &TaskRow,
    step: &Step,
) -> Result<Result<Projection, StepRejection>, StoreError> {
    let mut projection = Projection { step: step.clone(), pr: None, decided: None };
    match step {
        Step::Started { .. }
        | Step::Resolved { .. }
        | Step::Cancelled { .. }
        | Step::HandOffHeld { .. }
        | Step::HandedOff { .. } => {}
        Step::MergeIntent { ran, .. } => {
            sqlx::query!("update internal_prs set merge_checks = $2 where number = $1", task.pr, AsJson(ran) as _)
                .execute(connection)
                .await
                .doing("writing the checks of a merge")?;
        }
        Step::Generated { artifact } => {
            let artifact = payload::load(connection, artifact.clone()).await?;
            if let Err(rejection) = insert_artifact(connection, task, &artifact).await? {
                return Ok(Err(rejection));
            }
            projection.step = Step::Generated { artifact: Payload::Inline(shortened(artifact)) };
        }
        Step::Checked { iteration, findings, quarantine, ran } => {
            let done = sqlx::query!(
                "update iterations set checked = true, findings = $3, quarantine = $4, ran = $5
                 where task = $1 and iteration = $2",
                task.id.0,
                number(*iteration),
                AsJson(findings) as _,
                quarantine.map(AsJson) as _,
                AsJson(ran) as _
            )
            .execute(connection)
            .await
            .doing("writing findings")?;
            if done.rows_affected() == 0 {
                return Ok(Err(StepRejection::NoIteration { iteration: *iteration }));
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
                pg_text(model),
                AsJson(review) as _
            )
            .execute(connection)
            .await
            .doing("writing a review")?;
            if done.rows_affected() == 0 {
                return Ok(Err(StepRejection::NoIterationOrReviewExists { iteration: *iteration }));
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
            .doing("writing a decision")?;
            sqlx::query!(
                "update tasks set best_iteration = $2, best_score = $3 where id = $1",
                task.id.0,
                decided.best_iteration.map(number),
                decided.best_score
            )
            .execute(connection)
            .await
            .doing("writing the best iteration")?;
            projection.decided = Some(decided.clone());
        }
        Step::PrOpened { head, base, branch } => {
            if task.pr.is_some() {
                return Ok(Err(StepRejection::PrExists));
            }
            projection.pr = Some(open_pr(connection, task, head, base, branch).await?);
        }
        Step::PrMoved { to, reason } => {
            return Ok(move_pr(connection, task, *to, reason, None).await?.map(|()| projection));
        }
        Step::Merged { commit } => {
            if let Err(rejection) = main_branch::advance(connection, task, commit).await? {
                return Ok(Err(rejection));
            }
            return Ok(move_pr(connection, task, PrState::Merged, "merged", Some(commit)).await?.map(|()| projection));
        }
        Step::Delivered { branch, commit } => {
            sqlx::query!(
                "update tasks set delivered_branch = $2, delivered_commit = $3 where id = $1",
                task.id.0,
                pg_text(branch),
                pg_text(commit)
            )
            .execute(connection)
            .await
            .doing("writing a delivery")?;
        }
    }
    Ok(Ok(projection))
}

async fn insert_artifact(
    connection: &mut PgConnection,
    task: &TaskRow,
    artifact: &Artifact,
) -> Result<Result<(), StepRejection>, StoreError> {
    let paths: Vec<&str> = artifact.files.iter().map(|f| f.path.as_str()).collect();
    let commit = artifact.commit.as_deref().map(pg_text);
    let inserted = sqlx::query!(
        r#"insert into iterations (task, iteration, artifact, content_hash, commit, model, paths, prompt_tokens, output_tokens,
                                   checked)
           values ($1, $2, $3, $4, $5, $6, $7, $8, $9, false) on conflict do nothing"#,
        task.id.0,
        number(artifact.iteration),
        artifact.id.0,
        pg_text(&artifact.content_hash),
        commit,
        pg_text(&artifact.model),
        AsJson(paths) as _,
        i64::from(artifact.prompt_tokens),
        i64::from(artifact.output_tokens)
    )
    .execute(&mut *connection)
    .await
    .doing("writing an iteration")?;
    if inserted.rows_affected() == 0 {
        return Ok(Err(StepRejection::IterationExists { iteration: artifact.iteration }));
    }
    let inserted = sqlx::query!(
        r#"insert into artifacts (id, task, iteration, seq, content_hash, commit, parent)
           values ($1, $2, $3, $4, $5, $6, $7) on conflict (id) do nothing"#,
        artifact.id.0,
        task.id.0,
        number(artifact.iteration),
        task.next_seq,
        pg_text(&artifact.content_hash),
        commit,
        pg_text(&artifact.parent)
    )
    .execute(&mut *connection)
    .await
    .doing("writing an artifact")?;
    if inserted.rows_affected() == 0 {
        return Ok(Err(StepRejection::ArtifactExists { id: artifact.id }));
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
        r#"insert into internal_prs (task, title, state, branch, head, base, repo_hash)
           select $1, $2, 'pending_qc', $3, $4, $5, md5(spec ->> 'repo') from tasks where id = $1
           returning number"#,
        task.id.0,
        task.title,
        pg_text(branch),
        pg_text(head),
        pg_text(base)
    )
    .fetch_one(&mut *connection)
    .await
    .doing("opening a pull request")?;
    sqlx::query!(r#"insert into internal_pr_moves (pr, n, "to", reason) values ($1, 1, 'pending_qc', 'opened')"#, pr)
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

/// Moves the task's pull request to another state, or returns why that is illegal.
pub(super) async fn move_pr(
    connection: &mut PgConnection,
    task: &TaskRow,
    to: PrState,
    reason: &str,
    merge_commit: Option<&str>,
) -> Result<Result<(), StepRejection>, StoreError> {
    let Some(pr) = task.pr else { return Ok(Err(StepRejection::NoPr)) };
    let from = sqlx::query_scalar!("select state from internal_prs where number = $1 for update", pr)
        .fetch_one(&mut *connection)
        .await
        .doing("finding a pull request")?;
    let from: PrState = parse("pull request state", &from)?;
    if !cfq_scheduler_core::pr_transition_allowed(from, to) {
        return Ok(Err(StepRejection::PrState { pr, from, to }));
    }
    sqlx::query!(
        "update internal_prs set state = $2, merge_commit = coalesce($3, merge_commit) where number = $1",
        pr,
        to.as_str(),
        merge_commit.map(pg_text)
    )
    .execute(&mut *connection)
    .await
    .doing("moving a pull request")?;
    sqlx::query!(
        r#"insert into internal_pr_moves (pr, n, "to", reason)
           select $1, coalesce(max(n), 0) + 1, $2, $3 from internal_pr_moves where pr = $1"#,
        pr,
        to.as_str(),
        pg_text(reason)
    )
    .execute(connection)
    .await
    .doing("moving a pull request")?;
    Ok(Ok(()))
}

fn number(iteration: u32) -> i32 {
    i32::try_from(iteration).unwrap_or(i32::MAX)
}

/// If the artifact is too large for an event, removes the contents of its files and cuts its diff at the end of a line.
fn shortened(mut artifact: Artifact) -> Artifact {
    let contents: usize = artifact.files.iter().filter_map(|f| f.content.as_ref()).map(String::len).sum();
    if contents + artifact.diff.len() <= MAX_EVENT_ARTIFACT_BYTES {
        return artifact;
    }
    for content in artifact.files.iter_mut().filter_map(|f| f.content.as_mut()) {
        content.clear();
    }
    if artifact.diff.len() > MAX_EVENT_ARTIFACT_BYTES {
        let ends = artifact.diff.char_indices().map(|(i, _)| i);
        let end = ends.take_while(|i| *i <= MAX_EVENT_ARTIFACT_BYTES).last().unwrap_or(0);
        let end = artifact.diff.get(..end).and_then(|cut| cut.rfind('\n')).map_or(0, |i| i + 1);
        artifact.diff.truncate(end);
        artifact.diff.push_str("... (shortened; request the artifact for the rest)\n");
    }
    artifact
}
