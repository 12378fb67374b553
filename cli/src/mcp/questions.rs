//! Questions and their answers: `list_questions`, `resolve_escalation`, `answer_question`; and what ends a task for the
//! client: `cancel_task`, `acknowledge_failure`.

use cfq_proto::client::ClientError;
use cfq_proto::http::{ResolveRequest, StateReply, TaskQuery, TaskSort};
use cfq_proto::ids::{QuestionId, TaskKey};
use cfq_proto::loop_step::EscalationAction;
use cfq_proto::task::TaskState;

use super::access::Access;
use super::arguments::{AcknowledgeFailure, AnswerQuestion, CancelTask, ListQuestions, ResolveEscalation, in_range};
use super::error::ToolError;
use super::listing::position;
use super::progress::open_question;
use super::repeat::{is_unanswered, until_answered};
use super::replies::{Changed, ListedQuestion, QuestionTexts, Questions};
use crate::connect;

const DEFAULT_LIMIT: u32 = 20;

/// `list_questions`.
pub async fn list(access: &Access, arguments: ListQuestions) -> Result<Questions, ToolError> {
    let query = TaskQuery {
        states: vec![TaskState::Escalated, TaskState::WaitingOnHuman],
        sort: TaskSort::Newest,
        after: position(arguments.after.as_deref())?,
        limit: in_range("limit", arguments.limit, (1, 50), DEFAULT_LIMIT)?,
        ..TaskQuery::default()
    };
    let client = access.client()?;
    let list = client.list_tasks(&query).await?;
    let mut questions = Vec::with_capacity(list.tasks.len());
    for task in &list.tasks {
        // Somebody may answer, or delete the task, between the two requests.
        let detail = match client.task(TaskKey::Id(task.id)).await {
            Ok(detail) => detail,
            Err(ClientError::Refused { status: 404, .. }) => continue,
            Err(error) => return Err(error.into()),
        };
        let Some(escalation) = &detail.escalation else { continue };
        questions.push(ListedQuestion {
            session_id: task.id,
            task: task.number.to_string(),
            question: open_question(escalation),
            untrusted_content: QuestionTexts { title: task.title.clone(), question: escalation.explanation.clone() },
        });
    }
    Ok(Questions { questions, next: list.next })
}

/// `resolve_escalation`.
pub async fn resolve(access: &Access, arguments: ResolveEscalation) -> Result<Changed, ToolError> {
    let task = arguments.session_id.0;
    let question = match arguments.question_id {
        Some(question) => Some(question),
        // An answer that names its question can be sent again without a second effect.
        None => access.client()?.task(task).await?.escalation.map(|escalation| escalation.question),
    };
    send(access, task, question, arguments.action.into_action()?).await
}

/// `answer_question`.
pub async fn answer(access: &Access, arguments: AnswerQuestion) -> Result<Changed, ToolError> {
    send(access, arguments.session_id.0, Some(arguments.question_id), arguments.action.into_action()?).await
}

/// Sends an answer. Only an answer that names its question can be repeated without a second effect.
pub async fn send(
    access: &Access,
    task: TaskKey,
    question: Option<QuestionId>,
    action: EscalationAction,
) -> Result<Changed, ToolError> {
    let request = ResolveRequest { action, question };
    let client = access.client()?;
    let sent = match question {
        Some(_) => until_answered(|| client.resolve(task, request.clone())).await,
        None => client.resolve(task, request).await,
    };
    sent.map(changed).map_err(|error| match is_unanswered(&error) {
        true => ToolError(format!(
            "{}. The answer may have been recorded: call get_progress_summary before you answer again",
            connect::describe_error(&error)
        )),
        false => error.into(),
    })
}

/// `cancel_task`.
pub async fn cancel(access: &Access, arguments: CancelTask) -> Result<Changed, ToolError> {
    let client = access.client()?;
    Ok(changed(until_answered(|| client.cancel(arguments.session_id.0, &arguments.reason)).await?))
}

/// `acknowledge_failure`.
pub async fn acknowledge(access: &Access, arguments: AcknowledgeFailure) -> Result<Changed, ToolError> {
    let client = access.client()?;
    Ok(changed(until_answered(|| client.acknowledge(arguments.session_id.0)).await?))
}

/// The reply to a call that changed a task.
fn changed(reply: StateReply) -> Changed {
    Changed { session_id: reply.id, task: reply.number.to_string(), state: reply.state, note: reply.note }
}
