//! The HTTP API under `/api/v1`, and the OpenAI-compatible API under `/v1`. Every request needs the bearer token (health checks excepted) and an allowed Host; a
//! foreign Origin is refused, so that a web page in the user's browser cannot reach a cfq on the user's machine. Every
//! refusal has an `ErrorReply` as its body.

mod access;
mod acknowledge;
mod agents;
mod batch;
mod bulk;
mod control;
mod dead_letters;
mod defects;
mod error;
mod error_form;
mod events;
mod explain;
mod feed;
mod feed_position;
mod gc;
mod guard;
mod health;
mod jobs;
mod machines;
mod models;
mod nodes;
mod open_limit;
mod open_tasks;
mod openai;
mod openapi;
mod prs;
mod routes;
mod schedules;
mod servable;
mod submit;
mod tasks;
mod token;
mod tokens;
mod validate;

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Instant;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request};
use axum::middleware::{self, Next};
use cfq_link::stop::Stop;
use cfq_proto::http::ApiTokenRole;
use tokio::sync::Semaphore;

use crate::config::{Defaults, HttpConfig, RetentionConfig, SchedulerLimits};
use crate::ended_calls::EndedCalls;
use crate::feed_wakeup::FeedWakeup;
use crate::link::Link;
use crate::metrics::Metrics;
use crate::store::{Hint, Run, Store};

use open_limit::OpenLimit;
use open_tasks::OpenTaskLimit;
use servable::SharedNodes;

pub use agents::AgentSettings;
pub use machines::JoinInfo;
pub use token::{ApiTokenError, TokenFile};

/// State that all handlers share.
#[derive(Debug, Clone)]
pub struct Api {
    pub store: Store,
    pub link: Link,
    pub wakeup: FeedWakeup,
    pub metrics: Metrics,
    pub defaults: Arc<Defaults>,
    pub agents: Arc<agents::AgentSettings>,
    pub guard: Arc<guard::Guard>,
    feeds: OpenLimit,
    calls: OpenLimit,
    ended_calls: EndedCalls,
    pub open_tasks: Arc<OpenTaskLimit>,
    pub nodes: Arc<SharedNodes>,
    body_bytes: usize,
    /// How machines join; `None` if other machines cannot reach this server.
    join_info: Option<Arc<machines::JoinInfo>>,
    joins: Arc<Semaphore>,
    pub retention: RetentionConfig,
    pub stop: Stop,
    /// Start of the process.
    started: Instant,
}

impl Api {
    #[expect(clippy::too_many_arguments, reason = "called in one place, which assembles the parts of the process")]
    pub fn new(
        store: Store,
        link: Link,
        wakeup: FeedWakeup,
        metrics: Metrics,
        defaults: Defaults,
        http: &HttpConfig,
        token: TokenFile,
        limits: &SchedulerLimits,
        retention: RetentionConfig,
        ended_calls: EndedCalls,
        join_info: Option<JoinInfo>,
        stop: Stop,
    ) -> Self {
        Self {
            guard: Arc::new(guard::Guard::new(http, access::Tokens::new(token, store.clone()))),
            store,
            link,
            wakeup,
            metrics,
            agents: Arc::new(agents::AgentSettings::new(defaults.agents.clone())),
            defaults: Arc::new(defaults),
            feeds: OpenLimit::new("event feeds", limits.feeds, feed::RETRY_AFTER_SECONDS),
            calls: OpenLimit::new("calls", limits.client_calls, openai::CALL_RETRY_AFTER_SECONDS),
            ended_calls,
            open_tasks: Arc::new(OpenTaskLimit::new(limits.open_tasks)),
            nodes: Arc::default(),
            body_bytes: limits.body_bytes,
            join_info: join_info.map(Arc::new),
            joins: Arc::new(Semaphore::new(machines::MAX_CONCURRENT_JOINS)),
            retention,
            stop,
            started: Instant::now(),
        }
    }

    /// Sends the hints of a change, unless it was only tried.
    async fn send_hints(&self, hints: Vec<Hint>, run: Run) {
        match run {
            Run::Commit => self.link.send_hints(hints).await,
            Run::Dry => {}
        }
    }

    /// The routes of the API, and the added ones behind the same checks.
    pub fn router(self, added: Router) -> Router {
        let (routes, document) = routes::routes();
        routes::with_document(routes, document)
            .merge(added.with_state(()).layer(middleware::from_fn(|request: Request, next: Next| {
                access::require_role(ApiTokenRole::Read, request, next)
            })))
            .fallback(error_form::unknown_path)
            .method_not_allowed_fallback(error_form::unsupported_method)
            .layer(DefaultBodyLimit::max(self.body_bytes))
            .layer(middleware::from_fn_with_state(self.clone(), guard::authorize))
            .route_layer(middleware::from_fn_with_state(self.clone(), guard::record_metrics))
            .with_state(self)
    }
}

/// The OpenAPI document of both APIs.
pub fn openapi_document() -> serde_json::Value {
    routes::routes().1.finish()
}

/// Router of connections from other machines that do not use TLS although the server has it.
pub fn plaintext_router() -> Router {
    Router::new().fallback(error::plaintext)
}

/// Router of connections above the limit: every request is refused.
pub fn refusing_router() -> Router {
    Router::new().fallback(error::too_many_connections)
}
