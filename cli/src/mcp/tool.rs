//! The tools: their names, descriptions, schemas and hints, and what a call does.

use std::sync::Arc;

use cfq_proto::visible_text::{TERMINAL_CHARACTERS, visible};
use rmcp::model::{CallToolResult, JsonObject, Tool, ToolAnnotations};
use rmcp::service::{RequestContext, RoleServer};
use serde::Serialize;
use serde_json::Value;

use super::access::Access;
use super::arguments::{self, parse};
use super::error::ToolError;
use super::{
    artifact, defects, endpoint, handoff, listing, map, policies, progress, questions, replies, review, revise, schema,
    status, submission, test_suite,
};

/// A tool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToolKind {
    ExecuteTaskSpec,
    GetProgressSummary,
    ResolveEscalation,
    GetArtifact,
    FinalHandoffArchive,
    GetProjectStatus,
    SubmitTask,
    ListTasks,
    CancelTask,
    ListQuestions,
    AnswerQuestion,
    GetRepoMap,
    ReadOrgPolicies,
    ReviseCode,
    InjectAlternativePattern,
    ConfigureEndpoint,
    SetSystemPrompts,
    RunCriticReview,
    GenerateTestSuite,
    AcknowledgeFailure,
    ReportDefect,
}

/// What a call changes, for clients that ask the user before such calls.
enum Effect {
    /// Nothing.
    Reads,
    /// It adds something; a repeated call with the same arguments may add more.
    Adds,
    /// It ends or changes work; a repeated call with the same arguments has no further effect.
    Changes,
}

impl ToolKind {
    /// All tools, in the order of a task's life.
    pub const ALL: [Self; 21] = [
        Self::GetRepoMap,
        Self::ReadOrgPolicies,
        Self::ExecuteTaskSpec,
        Self::GetProgressSummary,
        Self::ResolveEscalation,
        Self::ReviseCode,
        Self::InjectAlternativePattern,
        Self::GetArtifact,
        Self::RunCriticReview,
        Self::GenerateTestSuite,
        Self::FinalHandoffArchive,
        Self::AcknowledgeFailure,
        Self::ReportDefect,
        Self::GetProjectStatus,
        Self::SubmitTask,
        Self::ListTasks,
        Self::CancelTask,
        Self::ListQuestions,
        Self::AnswerQuestion,
        Self::ConfigureEndpoint,
        Self::SetSystemPrompts,
    ];

    /// The tools for callers whose files can be reached, or for others.
    pub fn available(has_files: bool) -> Vec<Self> {
        Self::ALL.into_iter().filter(|tool| has_files || !tool.reads_files()).collect()
    }

    /// Whether the tool reads a repository on the caller's machine.
    fn reads_files(self) -> bool {
        matches!(self, Self::GetRepoMap | Self::ReadOrgPolicies)
    }

    /// Whether the tool starts work that continues after its reply.
    pub fn starts_work(self) -> bool {
        matches!(self, Self::ExecuteTaskSpec | Self::SubmitTask | Self::RunCriticReview | Self::GenerateTestSuite)
    }

    /// The tool of this name.
    pub fn find(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|tool| tool.name() == name)
    }

    /// The name in calls.
    pub fn name(self) -> &'static str {
        match self {
            Self::ExecuteTaskSpec => "execute_task_spec",
            Self::GetProgressSummary => "get_progress_summary",
            Self::ResolveEscalation => "resolve_escalation",
            Self::GetArtifact => "get_artifact",
            Self::FinalHandoffArchive => "final_handoff_archive",
            Self::GetProjectStatus => "get_project_status",
            Self::SubmitTask => "submit_task",
            Self::ListTasks => "list_tasks",
            Self::CancelTask => "cancel_task",
            Self::ListQuestions => "list_questions",
            Self::AnswerQuestion => "answer_question",
            Self::GetRepoMap => "get_repo_map",
            Self::ReadOrgPolicies => "read_org_policies",
            Self::ReviseCode => "revise_code",
            Self::InjectAlternativePattern => "inject_alternative_pattern",
            Self::ConfigureEndpoint => "configure_endpoint",
            Self::SetSystemPrompts => "set_system_prompts",
            Self::RunCriticReview => "run_critic_review",
            Self::GenerateTestSuite => "generate_test_suite",
            Self::AcknowledgeFailure => "acknowledge_failure",
            Self::ReportDefect => "report_defect",
        }
    }

    fn title(self) -> &'static str {
        match self {
            Self::ExecuteTaskSpec => "Delegate a coding task",
            Self::GetProgressSummary => "Follow a task",
            Self::ResolveEscalation => "Decide how a task continues",
            Self::GetArtifact => "Read a task's result",
            Self::FinalHandoffArchive => "Write a task's archive",
            Self::GetProjectStatus => "Show the cluster and its tasks",
            Self::SubmitTask => "Submit a task with all fields",
            Self::ListTasks => "List tasks",
            Self::CancelTask => "Cancel a task",
            Self::ListQuestions => "List open questions",
            Self::AnswerQuestion => "Answer a question",
            Self::GetRepoMap => "Map a repository",
            Self::ReadOrgPolicies => "Read the policies of a repository",
            Self::ReviseCode => "Continue a task with your review",
            Self::InjectAlternativePattern => "Continue a task with another pattern",
            Self::ConfigureEndpoint => "Change an agent's model",
            Self::SetSystemPrompts => "Give an agent instructions",
            Self::RunCriticReview => "Review a result again",
            Self::GenerateTestSuite => "Write tests for a result",
            Self::AcknowledgeFailure => "Acknowledge a failure",
            Self::ReportDefect => "Report a defect of a result",
        }
    }

    fn description(self) -> &'static str {
        match self {
            Self::ExecuteTaskSpec => {
                "Delegates a coding task to the agents of cfq: Alpha writes, Beta reviews, and Alpha revises until the \
                 review score reaches quality_threshold. Returns a session_id at once, when the task is stored; the \
                 work continues without you. Follow it with get_progress_summary."
            }
            Self::GetProgressSummary => {
                "Returns the state, scores and times of a task, and what to do next. With wait_s, the reply comes when \
                 something changed, after 45 s at the latest. If needs_decision is true, call resolve_escalation or \
                 ask the user."
            }
            Self::ResolveEscalation => {
                "Answers the question of a task that needs a decision: continue with another model or additional \
                 requirements, take the best result, or end the task."
            }
            Self::GetArtifact => {
                "Returns what Alpha wrote in one iteration, as a unified diff against the base commit; the best \
                 iteration by default."
            }
            Self::FinalHandoffArchive => {
                "Writes everything about a task to one file: specification, the best result, the artifact and the \
                 review of each iteration, and all events. Returns the file's path and its contents with checksums."
            }
            Self::GetProjectStatus => {
                "Returns whether tasks can be executed, the models that can be used, the tasks that have not ended, and \
                 those that ended last."
            }
            Self::SubmitTask => {
                "Submits a task with any field of a task file, such as labels, run_at, deadline, after or seeds. For a \
                 plain coding task, execute_task_spec is simpler. Returns a session_id at once."
            }
            Self::ListTasks => "Lists tasks, the newest first, by state and labels.",
            Self::CancelTask => {
                "Cancels a task that has not ended. Its results so far are kept; no model is called for it any more."
            }
            Self::ListQuestions => "Lists the questions of all tasks that need a decision.",
            Self::AnswerQuestion => {
                "Answers a question of list_questions, as resolve_escalation does. A repeated call takes effect once."
            }
            Self::GetRepoMap => {
                "Returns a map of a git repository: its folders, its files, and the definitions in them with line \
                 numbers, the most important ones first, within max_tokens. Use it to find out where things are before \
                 you read files or name context_files."
            }
            Self::ReadOrgPolicies => {
                "Returns the policies for the code of a git repository, its own and those of the server: how code must \
                 be written (style), what makes it safe (security), and other rules (custom). Alpha and Beta see them in \
                 every task."
            }
            Self::ReviseCode => {
                "Continues a task that needs a decision: Alpha revises the last artifact with your feedback, and Beta \
                 reviews it. The same as resolve_escalation with retry_with_constraints, with a review as input."
            }
            Self::InjectAlternativePattern => {
                "Continues a task that needs a decision, when the code written so far cannot work: Alpha revises it with \
                 the pattern that you show."
            }
            Self::ConfigureEndpoint => {
                "Changes the model of Alpha or Beta while cfq runs, for all tasks that name no model: at once for calls \
                 that wait, and for the next call of the others. Changes nothing unless a node confirms that it can use \
                 the model."
            }
            Self::SetSystemPrompts => {
                "Adds instructions to the prompts of Alpha or Beta, from the next call on, for all tasks that have none of \
                 their own. They are kept until they are changed, and replace earlier ones."
            }
            Self::RunCriticReview => {
                "Starts a separate task in which Beta reviews an artifact again. Returns the session_id of that task at \
                 once; get_progress_summary returns the score, the defects and the suggestions when its state is \
                 reviewed. Changes neither the artifact nor the task that made it."
            }
            Self::GenerateTestSuite => {
                "Delegates a task in which Beta's model writes tests for the delivered result of another task. Returns a \
                 session_id at once; the tests are reviewed and delivered as a branch, like any result."
            }
            Self::AcknowledgeFailure => {
                "Acknowledges the failure of a task, so that cfq's status no longer counts it. The task, its results and its \
                 reason are kept."
            }
            Self::ReportDefect => {
                "Records a defect that was found in the result of a merged or accepted task. It is kept with the task, and \
                 starts no work."
            }
        }
    }

    fn effect(self) -> Effect {
        match self {
            Self::GetProgressSummary
            | Self::GetArtifact
            | Self::GetProjectStatus
            | Self::GetRepoMap
            | Self::ReadOrgPolicies
            | Self::ListTasks
            | Self::ListQuestions => Effect::Reads,
            Self::ExecuteTaskSpec
            | Self::SubmitTask
            | Self::RunCriticReview
            | Self::GenerateTestSuite
            | Self::ReportDefect
            | Self::AcknowledgeFailure
            | Self::FinalHandoffArchive => Effect::Adds,
            Self::ResolveEscalation
            | Self::ReviseCode
            | Self::InjectAlternativePattern
            | Self::CancelTask
            | Self::AnswerQuestion
            | Self::ConfigureEndpoint
            | Self::SetSystemPrompts => Effect::Changes,
        }
    }

    fn input_schema(self) -> Arc<JsonObject> {
        match self {
            Self::ExecuteTaskSpec => schema::of_arguments::<arguments::ExecuteTaskSpec>(),
            Self::GetProgressSummary => schema::of_arguments::<arguments::GetProgressSummary>(),
            Self::ResolveEscalation => schema::of_arguments::<arguments::ResolveEscalation>(),
            Self::GetArtifact => schema::of_arguments::<arguments::GetArtifact>(),
            Self::FinalHandoffArchive => schema::of_arguments::<arguments::FinalHandoffArchive>(),
            Self::GetProjectStatus => schema::of_arguments::<arguments::OptionalSession>(),
            Self::SubmitTask => schema::of_arguments::<arguments::SubmitTask>(),
            Self::ListTasks => schema::of_arguments::<arguments::ListTasks>(),
            Self::CancelTask => schema::of_arguments::<arguments::CancelTask>(),
            Self::ListQuestions => schema::of_arguments::<arguments::ListQuestions>(),
            Self::AnswerQuestion => schema::of_arguments::<arguments::AnswerQuestion>(),
            Self::GetRepoMap => schema::of_arguments::<map::GetRepoMap>(),
            Self::ReadOrgPolicies => schema::of_arguments::<policies::ReadOrgPolicies>(),
            Self::ReviseCode => schema::of_arguments::<revise::ReviseCode>(),
            Self::InjectAlternativePattern => schema::of_arguments::<revise::InjectAlternativePattern>(),
            Self::ConfigureEndpoint => schema::of_arguments::<endpoint::ConfigureEndpoint>(),
            Self::SetSystemPrompts => schema::of_arguments::<endpoint::SetSystemPrompts>(),
            Self::RunCriticReview => schema::of_arguments::<review::RunCriticReview>(),
            Self::GenerateTestSuite => schema::of_arguments::<test_suite::GenerateTestSuite>(),
            Self::AcknowledgeFailure => schema::of_arguments::<arguments::AcknowledgeFailure>(),
            Self::ReportDefect => schema::of_arguments::<defects::ReportDefect>(),
        }
    }

    fn output_schema(self) -> Arc<JsonObject> {
        match self {
            Self::ExecuteTaskSpec | Self::SubmitTask | Self::RunCriticReview | Self::GenerateTestSuite => {
                schema::of_reply::<replies::Accepted>()
            }
            Self::ReportDefect => schema::of_reply::<defects::ReportDefectReply>(),
            Self::GetProgressSummary => schema::of_reply::<replies::Progress>(),
            Self::GetArtifact => schema::of_reply::<replies::ArtifactPart>(),
            Self::FinalHandoffArchive => schema::of_reply::<replies::HandoffArchive>(),
            Self::GetProjectStatus => schema::of_reply::<replies::ProjectStatus>(),
            Self::ListTasks => schema::of_reply::<replies::Tasks>(),
            Self::ListQuestions => schema::of_reply::<replies::Questions>(),
            Self::GetRepoMap => schema::of_reply::<map::MappedRepository>(),
            Self::ReadOrgPolicies => schema::of_reply::<policies::Policies>(),
            Self::ConfigureEndpoint => schema::of_reply::<endpoint::ConfiguredEndpoint>(),
            Self::SetSystemPrompts => schema::of_reply::<endpoint::SystemPromptsSet>(),
            Self::ResolveEscalation
            | Self::ReviseCode
            | Self::InjectAlternativePattern
            | Self::CancelTask
            | Self::AcknowledgeFailure
            | Self::AnswerQuestion => schema::of_reply::<replies::Changed>(),
        }
    }

    /// The definition that clients read.
    pub fn definition(self) -> Tool {
        let hints = match self.effect() {
            Effect::Reads => ToolAnnotations::new().read_only(true).idempotent(true),
            Effect::Adds => ToolAnnotations::new().read_only(false).destructive(false).idempotent(false),
            Effect::Changes => ToolAnnotations::new().read_only(false).destructive(true).idempotent(true),
        };
        Tool::new(self.name(), self.description(), self.input_schema())
            .with_title(self.title())
            .with_raw_output_schema(self.output_schema())
            .with_annotations(hints.open_world(false))
    }

    /// Executes a call.
    pub async fn call(
        self,
        access: &Access,
        arguments: Option<JsonObject>,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResult, ToolError> {
        match self {
            Self::ExecuteTaskSpec => structured(&submission::execute_task_spec(access, parse(arguments)?).await?),
            Self::SubmitTask => structured(&submission::submit_task(access, parse(arguments)?).await?),
            Self::GetProgressSummary => structured(&progress::get(access, parse(arguments)?, &context).await?),
            Self::GetArtifact => structured(&artifact::get(access, parse(arguments)?).await?),
            Self::FinalHandoffArchive => structured(&handoff::make(access, parse(arguments)?).await?),
            Self::GetProjectStatus => structured(&status::get(access, parse(arguments)?).await?),
            Self::ListTasks => structured(&listing::list_tasks(access, parse(arguments)?).await?),
            Self::CancelTask => structured(&questions::cancel(access, parse(arguments)?).await?),
            Self::ListQuestions => structured(&questions::list(access, parse(arguments)?).await?),
            Self::ResolveEscalation => structured(&questions::resolve(access, parse(arguments)?).await?),
            Self::AnswerQuestion => structured(&questions::answer(access, parse(arguments)?).await?),
            Self::GetRepoMap => structured(&map::get(access, parse(arguments)?, &context).await?),
            Self::ReadOrgPolicies => structured(&policies::read(access, parse(arguments)?).await?),
            Self::ReviseCode => structured(&revise::revise(access, parse(arguments)?).await?),
            Self::InjectAlternativePattern => structured(&revise::inject(access, parse(arguments)?).await?),
            Self::ConfigureEndpoint => structured(&endpoint::configure(access, parse(arguments)?).await?),
            Self::SetSystemPrompts => structured(&endpoint::set_prompts(access, parse(arguments)?).await?),
            Self::RunCriticReview => structured(&review::run(access, parse(arguments)?).await?),
            Self::GenerateTestSuite => structured(&test_suite::generate(access, parse(arguments)?).await?),
            Self::AcknowledgeFailure => structured(&questions::acknowledge(access, parse(arguments)?).await?),
            Self::ReportDefect => structured(&defects::report(access, parse(arguments)?).await?),
        }
    }
}

/// A successful result with structured content, which is repeated as text for clients that read only that.
fn structured<T: Serialize>(reply: &T) -> Result<CallToolResult, ToolError> {
    Ok(CallToolResult::structured(visible_json(reply)?))
}

/// The reply as JSON whose texts show control characters and invisible characters.
pub fn visible_json<T: Serialize>(reply: &T) -> Result<Value, ToolError> {
    let mut value =
        serde_json::to_value(reply).map_err(|error| ToolError(format!("cannot write the reply: {error}")))?;
    show_invisible(&mut value);
    Ok(value)
}

/// Shows control characters and invisible characters of all texts, as on a terminal, so that no part of a text is hidden.
fn show_invisible(value: &mut Value) {
    match value {
        Value::String(text) => *text = visible(text, TERMINAL_CHARACTERS).into_owned(),
        Value::Array(items) => items.iter_mut().for_each(show_invisible),
        Value::Object(fields) => fields.values_mut().for_each(show_invisible),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_tool_is_found_by_its_name_and_described() {
        let names: BTreeSet<&str> = ToolKind::ALL.map(ToolKind::name).into();
        assert_eq!(names.len(), ToolKind::ALL.len());
        for tool in ToolKind::ALL {
            assert_eq!(ToolKind::find(tool.name()), Some(tool));
            let definition = tool.definition();
            for (what, schema) in
                [("input", &definition.input_schema), ("output", definition.output_schema.as_ref().unwrap())]
            {
                assert_eq!(schema["type"], "object", "{} {what}", tool.name());
                check_descriptions(&Value::Object((**schema).clone()), &format!("{} {what}", tool.name()));
            }
        }
    }

    /// Every property has a description, and the schema has no keyword that some clients do not read.
    fn check_descriptions(schema: &Value, path: &str) {
        for keyword in ["$ref", "$defs", "oneOf", "anyOf", "const"] {
            assert!(schema.get(keyword).is_none(), "{path}: {schema}");
        }
        for (name, property) in schema["properties"].as_object().into_iter().flatten() {
            let path = format!("{path}.{name}");
            assert!(property["description"].as_str().is_some_and(|text| !text.is_empty()), "{path}");
            check_descriptions(property, &path);
            check_descriptions(&property["items"], &path);
        }
    }
}
