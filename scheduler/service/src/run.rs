//! Putting the service together. HTTP comes first and answers at once; a database or NATS that is away, at the start or
//! later, is waited for with a log line. Only what waiting cannot mend ends the process.

use std::net::SocketAddr;
use std::time::Duration;

use cfq_link::stop::{Stop, pair};
use cfq_link::{LinkError, Session};
use cfq_proto::subject::Identity;
use cfq_proto::timing::Timing;
use tokio::net::TcpListener;
use tokio::task::JoinSet;

use crate::api::{Api, Token, TokenError};
use crate::bus::Bus;
use crate::config::{Config, DatabaseConfig, Limits};
use crate::lead::Leader;
use crate::link::Link;
use crate::metrics::{Metrics, MetricsError};
use crate::pulse::Pulse;
use crate::store::{Store, StoreError, StoreSet};

/// Between two tries to reach a database or NATS that is away.
const AGAIN: Duration = Duration::from_millis(500);

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot listen on {bind}: is another cfq or another program there? Set http.bind to a free address")]
    Bind {
        bind: SocketAddr,
        #[source]
        source: std::io::Error,
    },
    #[error(transparent)]
    Token(#[from] TokenError),
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error(transparent)]
    Metrics(#[from] MetricsError),
    #[error("the HTTP server ended")]
    Http {
        #[source]
        source: std::io::Error,
    },
    #[error("a part of the scheduler ended: {part}")]
    Part { part: String },
}

/// Brings a database to this build's schema, and lets go of it.
pub async fn migrate(database: &DatabaseConfig) -> Result<(), Error> {
    let store = Store::new(database, Timing::default(), Limits::default())?;
    store.migrate().await?;
    store.close().await;
    Ok(())
}

/// Serves until `shutdown` completes, then stops intake, finishes what is in work, and hands the lead over.
pub async fn run(config: Config, shutdown: impl Future<Output = ()>) -> Result<(), Error> {
    let bind = config.http.bind;
    let token = Token::load(&config.http.token_file)?;
    let stores = StoreSet::new(&config.database, &config.timing, &config.limits)?;
    let store = stores.requests.clone();
    let listener = TcpListener::bind(bind).await.map_err(|source| Error::Bind { bind, source })?;
    tracing::info!(address = %listener.local_addr().unwrap_or(bind), "listening");
    let (stopper, stop) = pair();
    let (link, pulse, metrics) = (Link::default(), Pulse::default(), Metrics::new()?);
    let api = Api::new(
        store.clone(),
        link.clone(),
        pulse.clone(),
        metrics.clone(),
        config.defaults.clone(),
        &config.http,
        token,
        config.limits.feeds,
        stop.clone(),
    );
    let router = api.router(config.limits.body_bytes);
    let mut parts: JoinSet<Result<(), Error>> = JoinSet::new();
    let mut http_stop = stop.clone();
    parts.spawn(async move {
        let served = axum::serve(listener, router).with_graceful_shutdown(async move { http_stop.raised().await });
        served.await.map_err(|source| Error::Http { source })
    });
    parts.spawn(work(config.clone(), stores.clone(), link, pulse, metrics, stop.clone()));
    tokio::pin!(shutdown);
    let mut failed = None;
    tokio::select! {
        () = &mut shutdown => {}
        ended = parts.join_next() => failed = ended.and_then(|ended| why(ended).err()),
    }
    stopper.stop();
    let drained = tokio::time::timeout(config.timing.drain(), async {
        while let Some(ended) = parts.join_next().await {
            failed = failed.take().or(why(ended).err());
        }
    });
    if drained.await.is_err() {
        tracing::warn!("some requests were not finished in time");
        parts.shutdown().await;
    }
    stores.close().await;
    tracing::info!("stopped");
    failed.map_or(Ok(()), Err)
}

fn why(ended: Result<Result<(), Error>, tokio::task::JoinError>) -> Result<(), Error> {
    ended.unwrap_or_else(|join| Err(Error::Part { part: join.to_string() }))
}

/// Everything behind HTTP, as soon as the database and NATS are there.
async fn work(
    config: Config,
    stores: StoreSet,
    link: Link,
    pulse: Pulse,
    metrics: Metrics,
    stop: Stop,
) -> Result<(), Error> {
    let StoreSet { requests: store, beats, leader } = stores;
    if !migrated(&store, stop.clone()).await? {
        return Ok(());
    }
    let mut parts: JoinSet<Result<(), Error>> = JoinSet::new();
    let events = pulse.clone().follow_events(store.clone(), stop.clone());
    parts.spawn(async move {
        events.await;
        Ok(())
    });
    let Some(session) = connected(&config, stop.clone()).await? else { return Ok(()) };
    link.set(session.clone());
    let tokens = pulse.follow_tokens(session.clone(), store.clone(), stop.clone());
    parts.spawn(async move {
        tokens.await;
        Ok(())
    });
    let bus = Bus {
        store,
        beats,
        link: link.clone(),
        session: session.clone(),
        metrics: metrics.clone(),
        concurrency: config.limits.concurrency,
    };
    let bus_stop = stop.clone();
    parts.spawn(async move { bus.run(bus_stop).await.map_err(Error::from) });
    let leader = Leader { store: leader, link, session, metrics };
    let lead_stop = stop.clone();
    parts.spawn(async move {
        leader.run(lead_stop).await;
        Ok(())
    });
    while let Some(ended) = parts.join_next().await {
        why(ended)?;
        if !stop.is_raised() {
            return Err(Error::Part { part: "it stopped answering without being told to".to_owned() });
        }
    }
    Ok(())
}

/// False if told to stop before the database came.
async fn migrated(store: &Store, mut stop: Stop) -> Result<bool, Error> {
    let mut said = false;
    loop {
        match store.migrate().await {
            Ok(()) => return Ok(true),
            Err(error) if error.may_retry() => {
                if !said {
                    tracing::warn!(%error, cause = ?std::error::Error::source(&error), "waiting for Postgres");
                    said = true;
                }
            }
            Err(error) => return Err(error.into()),
        }
        tokio::select! {
            () = tokio::time::sleep(AGAIN) => {}
            () = stop.raised() => return Ok(false),
        }
    }
}

/// `None` if told to stop before NATS came.
async fn connected(config: &Config, mut stop: Stop) -> Result<Option<Session>, Error> {
    let mut said = false;
    loop {
        match Session::connect(&config.nats, Identity::Scheduler, &config.timing).await {
            Ok(session) => return Ok(Some(session)),
            Err(error @ LinkError::Connect { .. }) => {
                if !said {
                    tracing::warn!(%error, cause = ?std::error::Error::source(&error), "waiting for nats");
                    said = true;
                }
            }
            Err(error) => return Err(error.into()),
        }
        tokio::select! {
            () = tokio::time::sleep(AGAIN) => {}
            () = stop.raised() => return Ok(None),
        }
    }
}
