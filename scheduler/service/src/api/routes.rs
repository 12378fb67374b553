//! All routes, with their descriptions in the OpenAPI document.

use axum::Router;
use axum::body::Bytes;
use axum::extract::DefaultBodyLimit;
use axum::http::header::{CONTENT_TYPE, X_CONTENT_TYPE_OPTIONS};
use axum::middleware;
use axum::routing::get;
use cfq_proto::http::{
    AgentPatch, ApiTokenRequest, ApiTokenRole, BatchRequest, BulkRequest, CancelRequest, DefectReport, GcRequest,
    JoinRequest, JoinTokenRemoval, JoinTokenRequest, ModelRequest, PauseRequest, ResolveRequest, ScheduleRequest,
    SubmitRequest, TaskPatch,
};

use super::openapi::{DOCUMENT_PATH, Document, Operation, page};
use super::{
    Api, acknowledge, agents, batch, bulk, control, dead_letters, defects, events, explain, feed, gc, guard, health,
    jobs, machines, models, nodes, openai, prs, schedules, submit, tasks, tokens,
};

/// Description of the header that makes a repeated submission harmless.
const KEY_DESCRIPTION: &str = "1 to 200 characters. A second request with the same key and body creates nothing, and gets \
                               the reply of the first one";
/// Description of the header with which a feed continues.
const LAST_EVENT_DESCRIPTION: &str = "Id of the last event that the client has received: the feed continues after it";

/// Name and description of a group of operations that is registered in two parts.
const CLUSTER: (&str, &str) = ("Cluster", "Nodes, models, agents and machines");
/// A task for examples.
const TASK_EXAMPLE: &str =
    r#"{ "description": "Add a function that adds two numbers, with tests", "repo": "/home/me/project" }"#;

/// The routes, and the document that describes them.
pub fn routes() -> (Router<Api>, Document) {
    let mut document = Document::default();
    let requests = tasks(&mut document)
        .merge(results(&mut document))
        .merge(queue(&mut document))
        .merge(cluster(&mut document))
        .merge(schedules(&mut document))
        .merge(api_tokens(&mut document))
        .merge(service(&mut document))
        .merge(openai::short_routes(&mut document))
        .layer(middleware::from_fn(guard::limit_time));
    let long = feeds(&mut document).merge(openai::long_routes(&mut document));
    (requests.merge(long).merge(page().with_state(())), document)
}

/// Adds the document itself.
pub fn with_document(routes: Router<Api>, document: Document) -> Router<Api> {
    let text = Bytes::from(document.finish().to_string());
    let headers = [(CONTENT_TYPE, "application/json"), (X_CONTENT_TYPE_OPTIONS, "nosniff")];
    routes.route(DOCUMENT_PATH, get(async move || (headers, text.clone())))
}

fn tasks(document: &mut Document) -> Router<Api> {
    document
        .group("Tasks", "Submit, list, change and cancel tasks")
        .add(
            Operation::post("/api/v1/tasks", "submitTask", "Submit a task")
                .role(ApiTokenRole::Submit)
                .description(
                    "Replies once the task is stored. `repo` is an absolute path without symbolic links, `base` a full \
                     commit id. Returns 200 if the idempotency key was used before, with the same body.",
                )
                .header("Idempotency-Key", KEY_DESCRIPTION)
                .body::<SubmitRequest>()
                .example(TASK_EXAMPLE)
                .statuses(&[201, 200]),
            submit::submit,
        )
        .add(
            Operation::post("/api/v1/tasks:batch", "submitTasks", "Submit several tasks, all or none")
                .role(ApiTokenRole::Submit)
                .description("At most 100 tasks. They may have a `name`, and refer to each other by it.")
                .header("Idempotency-Key", KEY_DESCRIPTION)
                .body::<BatchRequest>()
                .statuses(&[201, 200]),
            batch::submit,
        )
        .add(
            Operation::post("/api/v1/tasks:check", "checkTask", "Check a task without submitting it")
                .role(ApiTokenRole::Submit)
                .description("Replies with the task with all defaults and the models that its agents would have now.")
                .body::<SubmitRequest>()
                .example(TASK_EXAMPLE),
            submit::check,
        )
        .add(Operation::get("/api/v1/tasks", "listTasks", "List tasks").query::<tasks::ListQuery>(), tasks::list)
        .add(Operation::get("/api/v1/tasks/{key}", "getTask", "Get a task with its iterations and jobs"), tasks::show)
        .add(
            Operation::patch("/api/v1/tasks/{key}", "changeTask", "Change the priority of a task")
                .role(ApiTokenRole::Submit)
                .body::<TaskPatch>()
                .example(r#"{ "priority": "P0" }"#),
            control::change,
        )
        .add(
            Operation::post("/api/v1/tasks/{key}/cancel", "cancelTask", "Cancel a task")
                .role(ApiTokenRole::Submit)
                .optional_body::<CancelRequest>(),
            tasks::cancel,
        )
        .add(
            Operation::post(
                "/api/v1/tasks/{key}/pause",
                "pauseTask",
                "Pause a task, at once or after the running step",
            )
            .role(ApiTokenRole::Submit)
            .optional_body::<PauseRequest>(),
            control::pause,
        )
        .add(
            Operation::post("/api/v1/tasks/{key}/resume", "resumeTask", "Resume a paused task")
                .role(ApiTokenRole::Submit),
            control::resume,
        )
        .add(
            Operation::post("/api/v1/tasks/actions", "actOnTasks", "Carry out one action on many tasks")
                .role(ApiTokenRole::Submit)
                .description(
                    "Tasks are named, or selected by `labels`, `state` or `all`. If the reply has `next`, repeat the \
                     request with it as `after`.",
                )
                .body::<BulkRequest>(),
            bulk::act,
        )
        .add(
            Operation::get("/api/v1/tasks/{key}/events", "listEvents", "List the events of a task")
                .query::<events::EventsQuery>(),
            events::list,
        )
        .into_router()
}

fn results(document: &mut Document) -> Router<Api> {
    document
        .group("Results", "Answer questions, and read and judge results")
        .add(
            Operation::post("/api/v1/tasks/{key}/resolve", "resolveTask", "Answer the question of an escalated task").role(ApiTokenRole::Submit)
                .description(
                    "With `question` (the field `escalation.question` of the task), the request can be repeated: the answer \
                     is recorded once, and never answers a later question.",
                )
                .body::<ResolveRequest>()
                .example(r#"{ "action": { "type": "accept_best_effort" } }"#),
            tasks::resolve,
        )
        .add(
            Operation::post("/api/v1/tasks/{key}/acknowledge", "acknowledgeTask", "Acknowledge the failure of a task").role(ApiTokenRole::Submit),
            acknowledge::acknowledge,
        )
        .add(
            Operation::post("/api/v1/tasks/{key}/defects", "reportDefect", "Report a defect of a result").role(ApiTokenRole::Submit)
                .description("The same location and description are recorded once.")
                .body::<DefectReport>(),
            defects::report,
        )
        .add(
            Operation::get("/api/v1/tasks/{key}/artifacts/{which}", "getArtifacts", "Get the files of an iteration")
                .description("The reply also has the earlier artifacts on which this one is based.")
                .parameter("which", "Number of the iteration, or `best`"),
            tasks::artifacts,
        )
        .add(
            Operation::get("/api/v1/artifacts/{id}", "getArtifact", "Get an artifact by its id")
                .description("The reply also has the earlier artifacts on which this one is based."),
            tasks::artifact,
        )
        .add(
            Operation::get("/api/v1/prs", "listPullRequests", "List internal pull requests").query::<prs::PrsQuery>(),
            prs::list,
        )
        .add(
            Operation::get("/api/v1/prs/{number}", "getPullRequest", "Get an internal pull request")
                .parameter("number", "Number of the pull request"),
            prs::show,
        )
        .into_router()
}

fn queue(document: &mut Document) -> Router<Api> {
    document
        .group("Queue", "The model calls of tasks")
        .add(
            Operation::get("/api/v1/jobs", "listJobs", "List jobs, newest first").query::<jobs::JobsQuery>(),
            jobs::list,
        )
        .add(
            Operation::get("/api/v1/explain/{key}", "explain", "Explain why a task or a job waits, or where it runs")
                .parameter("key", "Number (`t42`) or id of a task, or id of a job"),
            explain::explain,
        )
        .add(
            Operation::get("/api/v1/dead-letters", "listDeadLetters", "List the jobs that are no longer retried")
                .query::<dead_letters::ListQuery>(),
            dead_letters::list,
        )
        .add(
            Operation::get("/api/v1/dead-letters/{key}", "getDeadLetter", "Get a dead letter with all its attempts")
                .parameter("key", "Id of a job, or number (`t42`) or id of a task"),
            dead_letters::show,
        )
        .add(
            Operation::post("/api/v1/dead-letters/{key}/requeue", "requeueDeadLetter", "Queue a dead letter again")
                .role(ApiTokenRole::Submit)
                .description("If its task has escalated because of it, this also answers the question.")
                .parameter("key", "Id of a job, or number (`t42`) or id of a task"),
            dead_letters::requeue,
        )
        .into_router()
}

fn cluster(document: &mut Document) -> Router<Api> {
    let group = document
        .group(CLUSTER.0, CLUSTER.1)
        .add(Operation::get("/api/v1/nodes", "listNodes", "List the registered nodes"), nodes::list)
        .add(
            Operation::post("/api/v1/nodes/{name}/cordon", "cordonNode", "Give a node no new work")
                .parameter("name", "Name of the node"),
            nodes::cordon,
        )
        .add(
            Operation::post("/api/v1/nodes/{name}/uncordon", "uncordonNode", "Give a node work again")
                .parameter("name", "Name of the node"),
            nodes::uncordon,
        )
        .add(
            Operation::post("/api/v1/models/load", "loadModel", "Load a model on a node")
                .description("Replies before the model is loaded. `node` may be omitted if only one node matches.")
                .body::<ModelRequest>(),
            models::load,
        )
        .add(
            Operation::post("/api/v1/models/unload", "unloadModel", "Unload a model from a node")
                .description("Replies before the model is unloaded. `node` may be omitted if only one node matches.")
                .body::<ModelRequest>(),
            models::unload,
        )
        .add(Operation::get("/api/v1/agents", "listAgents", "List the agents with their models"), agents::list)
        .add(
            Operation::patch(
                "/api/v1/agents/{agent}",
                "changeAgent",
                "Change the model or the instructions of an agent",
            )
            .description(
                "For tasks that name no model or have no instructions of their own. `null` restores the value of the \
                     configuration. A model is used once a node has confirmed it; returns 409 if none can.",
            )
            .parameter("agent", "`alpha` or `beta`")
            .body::<AgentPatch>(),
            agents::change,
        )
        .add(Operation::get("/api/v1/machines", "listMachines", "List the machines that joined"), machines::list)
        .add(
            Operation::post("/api/v1/machines/{name}/revoke", "revokeMachine", "Take away the access of a machine")
                .parameter("name", "Name of the machine"),
            machines::revoke,
        )
        .add(
            Operation::post("/api/v1/join-tokens", "createJoinToken", "Create a token with which one machine can join")
                .description("Only this reply has the token. Returns 409 if the server was started without `--lan`.")
                .body::<JoinTokenRequest>()
                .statuses(&[201]),
            machines::create_token,
        )
        .add(
            Operation::get("/api/v1/join-tokens", "listJoinTokens", "List the join tokens that can still be used")
                .role(ApiTokenRole::Admin),
            machines::tokens,
        )
        .add(
            Operation::post("/api/v1/join-tokens/remove", "removeJoinTokens", "Revoke join tokens")
                .body::<JoinTokenRemoval>(),
            machines::remove_tokens,
        );
    let others = group.into_router();
    let join = document.group(CLUSTER.0, CLUSTER.1).add(
        Operation::post(machines::JOIN_PATH, "join", "Let a machine join")
            .description(
                "Needs a join token in the body instead of the bearer token. Can be repeated with the same key.",
            )
            .body::<JoinRequest>()
            .without_token(),
        machines::join,
    );
    others.merge(join.into_router().layer(DefaultBodyLimit::max(machines::MAX_JOIN_BYTES)))
}

fn schedules(document: &mut Document) -> Router<Api> {
    let described = |operation: Operation| operation.parameter("name", "Name of the schedule");
    document
        .group("Schedules", "Tasks that are submitted at certain times")
        .add(
            Operation::post("/api/v1/schedules", "addSchedule", "Add a schedule")
                .body::<ScheduleRequest>()
                .statuses(&[201]),
            schedules::add,
        )
        .add(Operation::get("/api/v1/schedules", "listSchedules", "List schedules"), schedules::list)
        .add(
            described(Operation::delete("/api/v1/schedules/{name}", "removeSchedule", "Remove a schedule")),
            schedules::remove,
        )
        .add(
            described(Operation::post(
                "/api/v1/schedules/{name}/run",
                "runSchedule",
                "Submit the task of a schedule now",
            ))
            .header("Idempotency-Key", KEY_DESCRIPTION)
            .statuses(&[201, 200]),
            schedules::run,
        )
        .add(
            described(Operation::post("/api/v1/schedules/{name}/pause", "pauseSchedule", "Pause a schedule")),
            schedules::pause,
        )
        .add(
            described(Operation::post("/api/v1/schedules/{name}/resume", "resumeSchedule", "Continue a schedule")),
            schedules::resume,
        )
        .into_router()
}

fn api_tokens(document: &mut Document) -> Router<Api> {
    document
        .group("Tokens", "API tokens of clients")
        .add(
            Operation::post("/api/v1/tokens", "createToken", "Create an API token")
                .description(
                    "Only this reply has the token. Each role includes the ones before it: `metrics`, `read`, `submit` (submit \
                     tasks, control these, and call models), `admin`.",
                )
                .body::<ApiTokenRequest>()
                .example(r#"{ "name": "editor", "role": "submit", "limits": { "running_tasks": 2 } }"#)
                .statuses(&[201]),
            tokens::create,
        )
        .add(
            Operation::get("/api/v1/tokens", "listTokens", "List the valid API tokens").role(ApiTokenRole::Admin),
            tokens::list,
        )
        .add(
            Operation::post("/api/v1/tokens/{name}/rotate", "rotateToken", "Replace an API token by another one")
                .description("The new token has the name, role, limits, end and tasks of the old one. Only this reply has it.")
                .parameter("name", "Name of the token"),
            tokens::rotate,
        )
        .add(
            Operation::delete("/api/v1/tokens/{name}", "revokeToken", "Revoke an API token")
                .parameter("name", "Name of the token"),
            tokens::revoke,
        )
        .into_router()
}

fn service(document: &mut Document) -> Router<Api> {
    document
        .group("Service", "State of the cluster, metrics and maintenance")
        .add(Operation::get("/api/v1/status", "getStatus", "Get the state of the cluster"), health::status)
        .add(
            Operation::post("/api/v1/gc", "collectGarbage", "Delete old tasks and lost nodes")
                .description("Deletes for at most 3 s: repeat the request until `finished` is true.")
                .body::<GcRequest>(),
            gc::collect,
        )
        .add(
            Operation::get("/metrics", "getMetrics", "Get the metrics, for Prometheus").role(ApiTokenRole::Metrics),
            health::metrics,
        )
        .add(Operation::get("/healthz", "isAlive", "Whether the process runs").without_token(), health::healthz)
        .add(
            Operation::get("/readyz", "isReady", "Whether tasks are accepted and placed")
                .description("Succeeds if the database answers, a scheduler is the leader, and NATS is connected.")
                .without_token(),
            health::readyz,
        )
        .into_router()
}

fn feeds(document: &mut Document) -> Router<Api> {
    document
        .group("Feeds", "Server-sent events. Each frame has an id; after an interruption, the feed continues after it")
        .add(
            Operation::get("/api/v1/tasks/{key}/feed", "followTask", "Follow a task, with the text as it is generated")
                .header("Last-Event-ID", LAST_EVENT_DESCRIPTION),
            feed::task,
        )
        .add(
            Operation::get("/api/v1/events", "followTasks", "Follow the events of all tasks")
                .header("Last-Event-ID", LAST_EVENT_DESCRIPTION),
            feed::all,
        )
        .into_router()
}
