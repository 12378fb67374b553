//! Assembles the service. HTTP starts first and answers at once. If Postgres or NATS is unavailable, at the start or
//! later, the service logs that once and retries; only errors that a retry cannot fix end the process.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use cfq_link::stop::{Stop, channel};
use cfq_link::tls::CertificateFileError;
use cfq_link::{LinkError, Session};
use cfq_proto::model::ModelId;
use cfq_proto::subject::Identity;
use cfq_proto::timing::Timing;
use tokio::task::JoinSet;

use crate::api::{AgentSettings, Api, ApiTokenError, JoinInfo, TokenFile};
use crate::bus::{Bus, presence};
use crate::config::{Config, DatabaseConfig, LanConfig, SchedulerLimits};
use crate::ended_calls;
use crate::feed_wakeup::FeedWakeup;
use crate::heartbeat_failures::HeartbeatFailures;
use crate::leader::Leader;
use crate::link::Link;
use crate::metrics::{Metrics, MetricsError};
use crate::retention;
use crate::server::{self, ConnectionLimits, ListenError, Tls, TlsError};
use crate::store::{Store, StoreError, StorePools, limited_election};

/// Wait between two attempts to connect to Postgres or NATS.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error(transparent)]
    ApiToken(#[from] ApiTokenError),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error(transparent)]
    Authority(#[from] CertificateFileError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    #[error("a background task of the scheduler panicked")]
    TaskPanicked {
        #[source]
        source: tokio::task::JoinError,
    },
    #[error("a background task of the scheduler ended although the scheduler was not stopped")]
    TaskEnded,
}

impl Error {
    /// Whether a restart does not help: the database belongs to another version of cfq.
    pub fn is_refusal(&self) -> bool {
        matches!(self, Self::Store(StoreError::Newer { .. } | StoreError::Altered { .. }))
    }
}

/// Migrates a database to this build's schema, then closes its connections.
pub async fn migrate(database: &DatabaseConfig) -> Result<(), Error> {
    let store = Store::new(database, Timing::default(), SchedulerLimits::default())?;
    store.migrate().await?;
    store.close().await;
    Ok(())
}

/// The HTTP server, for routes that are added to it.
#[derive(Debug)]
pub struct HttpServer {
    /// Address on which it listens.
    pub address: SocketAddr,
    /// Maximum size of a request body, in bytes.
    pub body_bytes: usize,
    /// Raised when the server stops.
    pub stop: Stop,
}

/// Serves until `shutdown` completes, then stops accepting requests, finishes those in progress and releases the leader
/// row. `added_routes` are served behind the checks of the API, without its time limit.
pub async fn run(
    config: Config,
    added_routes: impl FnOnce(HttpServer) -> Router,
    shutdown: impl Future<Output = ()>,
) -> Result<(), Error> {
    let bind = config.http.bind;
    let token = TokenFile::load(&config.http.token_file)?;
    let stores = StorePools::new(&config.database, &config.timing, &config.limits)?;
    let store = stores.requests.clone();
    let lan = config.http.lan.as_ref();
    let tls = lan.map(|lan| Tls::load(&lan.certificate_file, &lan.key_file)).transpose()?;
    let join_info = lan.map(|lan| join_info(lan, &config)).transpose()?;
    let listener = server::bind_tcp(bind, tls.is_some() || config.http.allow_plaintext).await?;
    let socket = match config.http.socket_on_stdin {
        true => Some(server::inherited_socket()?),
        false => config.http.socket.as_deref().map(server::bind_socket).transpose()?,
    };
    let address = listener.local_addr().unwrap_or(bind);
    tracing::info!(%address, socket = ?config.http.socket, "listening");
    let (stopper, stop) = channel();
    let (link, wakeup, metrics) = (Link::default(), FeedWakeup::default(), Metrics::new()?);
    let (ended_calls, calls_to_delete) = ended_calls::channel();
    let deletions = tokio::spawn(calls_to_delete.delete_all(store.clone(), link.clone()));
    let api = Api::new(
        store.clone(),
        link.clone(),
        wakeup.clone(),
        metrics.clone(),
        config.defaults.clone(),
        &config.http,
        token,
        &config.limits,
        config.retention.clone(),
        ended_calls,
        join_info,
        stop.clone(),
    );
    let server = HttpServer { address, body_bytes: config.limits.body_bytes, stop: stop.clone() };
    let followed = (api.agents.clone(), api.store.clone());
    let router = api.router(added_routes(server));
    let limits = ConnectionLimits::from(&config.limits);
    let mut tasks: JoinSet<Result<(), Error>> = JoinSet::new();
    tasks.spawn(follow_agents(followed, stop.clone()));
    let tcp = server::serve(listener, router.clone(), limits, tls, stop.clone());
    tasks.spawn(async move {
        tcp.await;
        Ok(())
    });
    if let Some(socket) = socket {
        let local = server::serve(socket, router.clone(), limits, None, stop.clone());
        tasks.spawn(async move {
            local.await;
            Ok(())
        });
    }
    // The deletion of calls ends when nothing can add one any more.
    drop(router);
    tasks.spawn(serve_backends(config.clone(), stores.clone(), link, wakeup, metrics, stop.clone()));
    tokio::pin!(shutdown);
    let mut failed = None;
    tokio::select! {
        () = &mut shutdown => {}
        ended = tasks.join_next() => failed = ended.and_then(|ended| task_result(ended).err()),
    }
    stopper.stop();
    let drained = tokio::time::timeout(config.timing.drain_timeout(), async {
        while let Some(ended) = tasks.join_next().await {
            failed = failed.take().or(task_result(ended).err());
        }
        // The servers have ended, and with them the calls of their clients.
        if let Err(error) = deletions.await {
            tracing::error!(%error, "the task that deletes calls panicked");
        }
    });
    if drained.await.is_err() {
        tracing::warn!("drain timeout reached, aborting unfinished requests");
        tasks.shutdown().await;
    }
    stores.close().await;
    tracing::info!("stopped");
    failed.map_or(Ok(()), Err)
}

/// Follows the models of the agents until the process stops.
async fn follow_agents((agents, store): (Arc<AgentSettings>, Store), mut stop: Stop) -> Result<(), Error> {
    tokio::select! {
        () = agents.follow(&store) => {}
        () = stop.raised() => {}
    }
    Ok(())
}

fn join_info(lan: &LanConfig, config: &Config) -> Result<JoinInfo, CertificateFileError> {
    let mut models: Vec<ModelId> = config.defaults.agents.models().cloned().collect();
    models.sort();
    models.dedup();
    Ok(JoinInfo {
        authority: cfq_link::tls::fingerprint_of_file(&lan.authority_file)?,
        urls: lan.urls.clone(),
        nats_port: lan.nats_port,
        models,
        timing: config.timing.clone(),
    })
}

fn task_result(ended: Result<Result<(), Error>, tokio::task::JoinError>) -> Result<(), Error> {
    ended.unwrap_or_else(|source| Err(Error::TaskPanicked { source }))
}

/// Starts and supervises everything except the HTTP server: migrates the database, connects to NATS, then starts the
/// token forwarding, the request handlers and the leader.
async fn serve_backends(
    config: Config,
    stores: StorePools,
    link: Link,
    wakeup: FeedWakeup,
    metrics: Metrics,
    stop: Stop,
) -> Result<(), Error> {
    let StorePools { requests: store, heartbeats, leader, election } = stores;
    if !migrate_until_done(&store, stop.clone()).await? {
        return Ok(());
    }
    let mut tasks: JoinSet<Result<(), Error>> = JoinSet::new();
    let commits = wakeup.clone().follow_commits(store.clone(), link.clone(), stop.clone());
    tasks.spawn(async move {
        commits.await;
        Ok(())
    });
    let extended = wakeup.calls().clone().extend(heartbeats.clone(), stop.clone());
    tasks.spawn(async move {
        extended.await;
        Ok(())
    });
    let new_tasks = link.clone().send_new_task_hints(stop.clone());
    tasks.spawn(async move {
        new_tasks.await;
        Ok(())
    });
    let expiry = retention::run(store.clone(), config.retention.clone(), stop.clone());
    tasks.spawn(async move {
        expiry.await;
        Ok(())
    });
    tasks.spawn(watch_schema(election.clone(), stop.clone()));
    let Some(session) = connect_until_done(&config, stop.clone()).await? else { return Ok(()) };
    link.set(session.clone());
    let hints = wakeup.clone().follow_hints(session.clone(), stop.clone());
    tasks.spawn(async move {
        hints.await;
        Ok(())
    });
    let tokens = wakeup.follow_tokens(session.clone(), store.clone(), stop.clone());
    tasks.spawn(async move {
        tokens.await;
        Ok(())
    });
    let scheduler = uuid::Uuid::now_v7();
    let heartbeat_failures = HeartbeatFailures::default();
    let bus = Bus {
        sender_clocks: Arc::default(),
        answers: presence::follow(&session, scheduler, &config.timing, stop.clone()).await?,
        store,
        heartbeats,
        link: link.clone(),
        session: session.clone(),
        metrics: metrics.clone(),
        concurrency: config.limits.concurrency,
        heartbeat_failures: heartbeat_failures.clone(),
    };
    let bus_stop = stop.clone();
    tasks.spawn(async move { bus.run(bus_stop).await.map_err(Error::from) });
    let leader = Leader { id: scheduler, store: leader, election, link, session, metrics, heartbeat_failures };
    let lead_stop = stop.clone();
    tasks.spawn(async move {
        leader.run(lead_stop).await;
        Ok(())
    });
    while let Some(ended) = tasks.join_next().await {
        task_result(ended)?;
        if !stop.is_raised() {
            return Err(Error::TaskEnded);
        }
    }
    Ok(())
}

/// Retries the migration while Postgres is unavailable. False if `stop` was raised first.
async fn migrate_until_done(store: &Store, mut stop: Stop) -> Result<bool, Error> {
    let mut logged = false;
    loop {
        match store.migrate().await {
            Ok(()) => return Ok(true),
            Err(error) if error.may_retry() => {
                if !logged {
                    tracing::warn!(%error, cause = ?std::error::Error::source(&error), "waiting for postgres");
                    logged = true;
                }
            }
            Err(error) => return Err(error.into()),
        }
        tokio::select! {
            () = tokio::time::sleep(RETRY_INTERVAL) => {}
            () = stop.raised() => return Ok(false),
        }
    }
}

/// Checks at intervals that no newer cfq has migrated the database. Returns an error once one has: this build would
/// misread the new schema, so the process ends. A database that is unavailable is checked again later.
async fn watch_schema(store: Store, mut stop: Stop) -> Result<(), Error> {
    loop {
        tokio::select! {
            () = tokio::time::sleep(store.timing().leader_renewal()) => {}
            () = stop.raised() => return Ok(()),
        }
        match limited_election("checking the schema's version", store.check_schema()).await {
            Err(error @ StoreError::Newer { .. }) => return Err(error.into()),
            Err(error) => tracing::debug!(%error, "cannot check the schema's version"),
            Ok(()) => {}
        }
    }
}

/// Retries the connection while NATS is unavailable. `None` if `stop` was raised first.
async fn connect_until_done(config: &Config, mut stop: Stop) -> Result<Option<Session>, Error> {
    let mut logged = false;
    loop {
        match Session::connect(&config.nats, Identity::Scheduler, &config.timing).await {
            Ok(session) => return Ok(Some(session)),
            Err(error @ LinkError::Connect { .. }) => {
                if !logged {
                    tracing::warn!(%error, cause = ?std::error::Error::source(&error), "waiting for nats");
                    logged = true;
                }
            }
            Err(error) => return Err(error.into()),
        }
        tokio::select! {
            () = tokio::time::sleep(RETRY_INTERVAL) => {}
            () = stop.raised() => return Ok(None),
        }
    }
}
