//! Effects of a step that changes the task's state: the reason shown for the new state, the question that an escalation
//! or a held hand-off opens, and the pull request that the end of a task closes.

use cfq_convergence::recommendation;
use cfq_proto::event::EventBody;
use cfq_proto::ids::QuestionId;
use cfq_proto::loop_step::{ActionKind, Decided, Decision, EscalationAction, EscalationReason, Step};
use cfq_proto::pr::PrState;
use cfq_proto::task::TaskState;
use sqlx::PgConnection;

use super::StoreError;
use super::columns::{AsJson, parse, pg_text};
use super::error::Doing;
use super::events::append;
use super::project::move_pr;
use super::tasks::TaskRow;

/// Reason for the task's new state, shown to users.
pub(super) fn reason(task: &TaskRow, step: &Step) -> String {
    match step {
        Step::Decided { decided, .. } => match &decided.decision {
            Decision::Escalate { reason, .. } => format!("{reason}: {}", decided.explanation),
            Decision::Fail { reason } => reason.clone(),
            Decision::Converged | Decision::ReviewComplete | Decision::Revise => decided.explanation.clone(),
        },
        Step::Resolved { action, by } => match action {
            EscalationAction::SwitchLlm { target_agent, suggested_model: Some(model) } => {
                format!("{by}: {target_agent} continues with {model}")
            }
            EscalationAction::SwitchLlm { target_agent, suggested_model: None } => {
                format!("{by}: {target_agent} retries with the same model")
            }
            EscalationAction::RetryWithConstraints { .. } => format!("{by}: retry with constraints"),
            EscalationAction::AcceptBestEffort => format!("{by}: best effort accepted"),
            EscalationAction::Abort => format!("aborted by {by}"),
            EscalationAction::Fail { reason: Some(reason) } => format!("failed by {by}: {reason}"),
            EscalationAction::Fail { reason: None } => format!("failed by {by}"),
        },
        Step::Cancelled { by } => format!("cancelled by {by}"),
        Step::HandOffHeld { reason, .. } => format!("{reason}\nnext: {}", next_commands(task)),
        Step::HandedOff { reason } if reason.is_empty() => "handed off".to_owned(),
        Step::HandedOff { reason } => reason.clone(),
        Step::Started { .. }
        | Step::Generated { .. }
        | Step::Checked { .. }
        | Step::Reviewed { .. }
        | Step::PrOpened { .. }
        | Step::PrMoved { .. }
        | Step::MergeIntent { .. }
        | Step::Merged { .. }
        | Step::Delivered { .. } => String::new(),
    }
}

/// Text for users: the commands that they can run while a hand-off is held.
fn next_commands(task: &TaskRow) -> String {
    let number = task.number;
    let show_pr = task.pr.map(|pr| format!("`cfq pr show {pr}` shows how far the hand-off got, ")).unwrap_or_default();
    format!(
        "{show_pr}`cfq pull {number}` copies the result into a clone, \
         `cfq resolve {number} --action accept_best_effort` repeats what may succeed now, and ends the task"
    )
}

/// Opens a question when a step escalates the task or holds its hand-off. Closes the open question when a step resolves
/// or cancels the task.
pub(super) async fn update_questions(
    connection: &mut PgConnection,
    task: &TaskRow,
    step: &Step,
    decided: Option<&Decided>,
) -> Result<(), StoreError> {
    if let Some(Decided {
        decision: Decision::Escalate { reason, available_actions }, explanation, best_score, ..
    }) = decided
    {
        let advice = recommendation(*reason, *best_score, task.threshold);
        let text = format!("{reason}: {explanation}");
        return open_question(connection, task, *reason, available_actions, text, &advice).await;
    }
    if let Step::HandOffHeld { reason, available_actions } = step {
        let (kind, advice) = (EscalationReason::WorkflowError, next_commands(task));
        return open_question(connection, task, kind, available_actions, reason.clone(), &advice).await;
    }
    let (state, answer, by) = match step {
        Step::Resolved { action, by } => ("answered", Some(action), by.as_str()),
        Step::Cancelled { by } => ("closed", None, by.as_str()),
        Step::Started { .. }
        | Step::Generated { .. }
        | Step::Checked { .. }
        | Step::Reviewed { .. }
        | Step::Decided { .. }
        | Step::PrOpened { .. }
        | Step::PrMoved { .. }
        | Step::MergeIntent { .. }
        | Step::Merged { .. }
        | Step::Delivered { .. }
        | Step::HandOffHeld { .. }
        | Step::HandedOff { .. } => return Ok(()),
    };
    let closed = sqlx::query_scalar!(
        r#"update questions set state = $2, answer = $3, answered_by = $4, answered_at = now()
           where task = $1 and state = 'open' returning id"#,
        task.id.0,
        state,
        answer.map(AsJson) as _,
        pg_text(by)
    )
    .fetch_all(&mut *connection)
    .await
    .doing("answering a question")?;
    for question in closed.into_iter().map(QuestionId) {
        let answer = answer.map_or("closed", |a| a.kind().as_str()).to_owned();
        append(connection, task.id, &EventBody::QuestionAnswered { question, answer, by: by.to_owned() }).await?;
    }
    Ok(())
}

async fn open_question(
    connection: &mut PgConnection,
    task: &TaskRow,
    reason: EscalationReason,
    actions: &[ActionKind],
    text: String,
    advice: &str,
) -> Result<(), StoreError> {
    let question = QuestionId::fresh();
    // Dangerous output is the only escalation that notifies the user at once (L13).
    let priority = if reason == EscalationReason::DangerousOutputDetected { 0i16 } else { 1 };
    sqlx::query!(
        r#"insert into questions (id, task, priority, text, reason, actions, recommendation)
               values ($1, $2, $3, $4, $5, $6, $7)"#,
        question.0,
        task.id.0,
        priority,
        pg_text(&text),
        AsJson(&reason) as _,
        AsJson(actions) as _,
        advice
    )
    .execute(&mut *connection)
    .await
    .doing("opening a question")?;
    append(connection, task.id, &EventBody::QuestionOpened { question, text }).await
}

/// Closes the open pull request of a task that ended without a merge.
pub(super) async fn close_pr(connection: &mut PgConnection, task: &TaskRow, to: TaskState) -> Result<(), StoreError> {
    let ended = to.is_terminal();
    let Some(pr) = task.pr.filter(|_| ended) else { return Ok(()) };
    let state = sqlx::query_scalar!("select state from internal_prs where number = $1", pr)
        .fetch_one(&mut *connection)
        .await
        .doing("finding a pull request")?;
    let state: PrState = parse("pull request state", &state)?;
    if !matches!(state, PrState::Merged | PrState::Closed) {
        // The transition from every open state to closed is legal, so this cannot be refused.
        let _closed = move_pr(connection, task, PrState::Closed, &format!("the task is {to}"), None).await?;
    }
    Ok(())
}
