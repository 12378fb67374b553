//! Event feeds as server-sent events. Events come from Postgres, in order, each with its position as id, so a client that
//! comes back with `Last-Event-ID` misses nothing; tokens come as they are made, carry no id and are never repeated. A
//! reader that is too slow loses tokens, never events, and slows nobody else.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::{Path, State};
use axum::http::HeaderMap;
use axum::response::sse::{Event as Frame, KeepAlive, Sse};
use cfq_link::stop::Stop;
use cfq_proto::http::TokensData;
use cfq_proto::ids::TaskId;
use cfq_proto::messages::TokenFrame;
use futures::Stream;
use tokio::sync::broadcast::{Receiver, error::RecvError};
use tokio::sync::{OwnedSemaphorePermit, TryAcquireError};

use super::Api;
use super::error::ApiError;
use super::tasks::find;
use crate::store::FeedCursor;

/// A feed looks by itself this often: a notification may be lost, and the global feed trails running transactions.
const LOOK: Duration = Duration::from_millis(500);
/// Comments keep proxies and clients from giving up on a quiet feed.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

type Frames = Result<Sse<axum::response::sse::KeepAliveStream<FrameStream>>, ApiError>;
type FrameStream = std::pin::Pin<Box<dyn Stream<Item = Result<Frame, Infallible>> + Send>>;

/// One task's events after `Last-Event-ID` (its `task_seq`), then live ones and tokens.
pub async fn task(State(api): State<Api>, Path(key): Path<String>, headers: HeaderMap) -> Frames {
    let after = last_id::<i64>(&headers)?.unwrap_or(0);
    let task = find(&api, &key).await?;
    let open = Open::new(&api)?;
    let reader = TaskFeed {
        wakes: api.pulse.events(),
        tokens: api.pulse.tokens(),
        api,
        task,
        after,
        ready: VecDeque::new(),
        look: Instant::now(),
        _open: open,
    };
    stream(reader)
}

/// All tasks' events after `Last-Event-ID`, without tokens.
pub async fn all(State(api): State<Api>, headers: HeaderMap) -> Frames {
    let cursor = last_id::<FeedCursor>(&headers)?.unwrap_or_default();
    let open = Open::new(&api)?;
    stream(GlobalFeed { wakes: api.pulse.events(), api, cursor, ready: VecDeque::new(), _open: open })
}

fn last_id<T: std::str::FromStr>(headers: &HeaderMap) -> Result<Option<T>, ApiError> {
    let Some(value) = headers.get("Last-Event-ID") else { return Ok(None) };
    let parsed = value.to_str().ok().and_then(|v| v.trim().parse().ok());
    parsed
        .map(Some)
        .ok_or_else(|| ApiError::invalid("Last-Event-ID", "Last-Event-ID: must be the id of an event of this feed"))
}

/// Counts an open feed.
struct Open {
    api: Api,
    _permit: OwnedSemaphorePermit,
}

impl Open {
    fn new(api: &Api) -> Result<Self, ApiError> {
        let permit = api.feeds.clone().try_acquire_owned().map_err(|error| match error {
            TryAcquireError::NoPermits | TryAcquireError::Closed => {
                ApiError::busy("too many feeds are open; close some")
            }
        })?;
        api.metrics.feeds.inc();
        Ok(Self { api: api.clone(), _permit: permit })
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.api.metrics.feeds.dec();
    }
}

trait Reader: Send + 'static {
    /// The next frame; `None` ends the feed.
    fn next(&mut self) -> impl Future<Output = Option<Frame>> + Send;
    fn stop(&self) -> Stop;
}

fn stream<R: Reader>(reader: R) -> Frames {
    let frames = futures::stream::unfold(reader, |mut reader| async move {
        let mut stop = reader.stop();
        let frame = tokio::select! {
            frame = reader.next() => frame,
            () = stop.raised() => None,
        };
        frame.map(|frame| (Ok(frame), reader))
    });
    let frames: FrameStream = Box::pin(frames);
    Ok(Sse::new(frames).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)))
}

struct TaskFeed {
    api: Api,
    task: TaskId,
    after: i64,
    ready: VecDeque<Frame>,
    /// When the database is asked next; a wake makes it now. Tokens pass without asking.
    look: Instant,
    wakes: Receiver<Option<TaskId>>,
    tokens: Receiver<Arc<TokenFrame>>,
    _open: Open,
}

impl Reader for TaskFeed {
    async fn next(&mut self) -> Option<Frame> {
        loop {
            if let Some(frame) = self.ready.pop_front() {
                return Some(frame);
            }
            if Instant::now() < self.look {
                if let Some(frame) = self.wait().await {
                    return Some(frame);
                }
                continue;
            }
            self.api.metrics.feed_looks.inc();
            match self.api.store.task_events(self.task, self.after).await {
                Ok(events) if !events.is_empty() => {
                    for event in events {
                        self.after = event.task_seq;
                        self.ready.push_back(framed(event.task_seq.to_string(), &event)?);
                    }
                    // A page may be full: look again once these are read.
                    continue;
                }
                Ok(_) => {}
                Err(error) => tracing::debug!(%error, "feed waits for the database"),
            }
            self.look = Instant::now() + LOOK;
        }
    }

    fn stop(&self) -> Stop {
        self.api.stop.clone()
    }
}

impl TaskFeed {
    /// A token frame of this task, or `None` when it is time to look for events.
    async fn wait(&mut self) -> Option<Frame> {
        let look = tokio::time::sleep_until(self.look.into());
        tokio::pin!(look);
        loop {
            tokio::select! {
                biased;
                wake = self.wakes.recv() => match wake {
                    Ok(Some(task)) if task != self.task => {}
                    Ok(_) | Err(RecvError::Lagged(_)) => {
                        self.look = Instant::now();
                        return None;
                    }
                    Err(RecvError::Closed) => { (&mut look).await; return None; }
                },
                token = self.tokens.recv() => match token {
                    Ok(frame) if frame.task == self.task => return tokens(&frame),
                    Ok(_) | Err(RecvError::Lagged(_)) => {}
                    Err(RecvError::Closed) => { (&mut look).await; return None; }
                },
                () = &mut look => return None,
            }
        }
    }
}

struct GlobalFeed {
    api: Api,
    cursor: FeedCursor,
    ready: VecDeque<Frame>,
    wakes: Receiver<Option<TaskId>>,
    _open: Open,
}

impl Reader for GlobalFeed {
    async fn next(&mut self) -> Option<Frame> {
        loop {
            if let Some(frame) = self.ready.pop_front() {
                return Some(frame);
            }
            match self.api.store.all_events(self.cursor).await {
                Ok(events) if !events.is_empty() => {
                    for (cursor, event) in events {
                        self.cursor = cursor;
                        self.ready.push_back(framed(cursor.to_string(), &event)?);
                    }
                    continue;
                }
                Ok(_) => {}
                Err(error) => tracing::debug!(%error, "feed waits for the database"),
            }
            tokio::select! {
                wake = self.wakes.recv() => if let Err(RecvError::Closed) = wake { tokio::time::sleep(LOOK).await },
                () = tokio::time::sleep(LOOK) => {}
            }
        }
    }

    fn stop(&self) -> Stop {
        self.api.stop.clone()
    }
}

fn framed(id: String, event: &cfq_proto::event::Event) -> Option<Frame> {
    match Frame::default().event("event").id(id).json_data(event) {
        Ok(frame) => Some(frame),
        Err(error) => {
            tracing::error!(%error, event = event.id, "an event cannot be written as JSON; the feed ends here");
            None
        }
    }
}

fn tokens(frame: &TokenFrame) -> Option<Frame> {
    let data = TokensData {
        job: frame.fence.job,
        attempt: frame.fence.attempt,
        role: frame.role,
        offset: frame.offset,
        text: frame.text.clone(),
    };
    Frame::default().event("tokens").json_data(&data).ok()
}
