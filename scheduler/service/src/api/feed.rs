//! Event feeds as server-sent events. Events come from Postgres, in order, each with its position as id, so a client
//! that reconnects with `Last-Event-ID` misses none. If events after its position were deleted, or the database was
//! restored, it receives a `reset` frame. Tokens are sent as they are generated, and have no id. If a job runs when the
//! feed is opened, its text so far follows the events. A slow reader loses tokens but no events, and does not slow other
//! readers.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::{Extension, Path, State};
use axum::http::HeaderMap;
use axum::response::sse::{Event as Frame, KeepAlive, Sse};
use cfq_proto::http::{FeedReset, FeedResetReason, TokensData};
use cfq_proto::ids::TaskId;
use cfq_proto::messages::{JobFence, TokenFrame};
use futures::Stream;
use tokio::sync::broadcast::{Receiver, error::RecvError};

use super::Api;
use super::access::Access;
use super::error::ApiError;
use super::feed_position::{GlobalPosition, TaskPosition};
use super::open_limit::OpenPermit;
use super::tasks::find;
use crate::store::{FeedPosition, StoreError};

/// Interval at which a feed queries the database even without a wake-up. This is necessary for two reasons: a
/// notification may be lost, and the global feed can show an event only after all older transactions have ended, which
/// may be after the event's notification.
const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// Interval of comments that keep proxies and clients from closing an idle feed.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// Interval at which an open feed checks whether its token is still the current one.
const TOKEN_CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Seconds after which a client should retry if too many feeds are open.
pub const RETRY_AFTER_SECONDS: u32 = 5;

type FeedReply = Result<Sse<axum::response::sse::KeepAliveStream<FrameStream>>, ApiError>;
type FrameStream = std::pin::Pin<Box<dyn Stream<Item = Result<Frame, Infallible>> + Send>>;

/// Opens the feed of one task: its events after `Last-Event-ID` (a [`TaskPosition`]), then new events and tokens as they
/// arrive.
pub async fn task(
    State(api): State<Api>,
    Extension(access): Extension<Access>,
    Path(key): Path<String>,
    headers: HeaderMap,
) -> FeedReply {
    let position = last_event_id::<TaskPosition>(&headers)?.unwrap_or_default();
    let task = find(&api, &key).await?;
    let open = OpenFeed::new(&api, &access)?;
    let end = end_of_feeds(api.clone(), access);
    let reader = TaskFeed {
        wakeups: api.wakeup.events(),
        tokens: api.wakeup.tokens(),
        api,
        task,
        position,
        is_checked: false,
        sent_text: SentText::Unknown,
        ready: VecDeque::new(),
        next_poll: Instant::now(),
        _open: open,
    };
    stream(reader, end)
}

/// Opens the feed of all tasks: their events after `Last-Event-ID` (a [`FeedPosition`]), without tokens.
pub async fn all(State(api): State<Api>, Extension(access): Extension<Access>, headers: HeaderMap) -> FeedReply {
    let position = last_event_id::<FeedPosition>(&headers)?.map(GlobalPosition::after).unwrap_or_default();
    let open = OpenFeed::new(&api, &access)?;
    let end = end_of_feeds(api.clone(), access);
    stream(GlobalFeed { wakeups: api.wakeup.events(), api, position, ready: VecDeque::new(), _open: open }, end)
}

fn last_event_id<T: std::str::FromStr>(headers: &HeaderMap) -> Result<Option<T>, ApiError> {
    let Some(value) = headers.get("Last-Event-ID") else { return Ok(None) };
    let parsed = value.to_str().ok().and_then(|v| v.trim().parse().ok());
    parsed
        .map(Some)
        .ok_or_else(|| ApiError::invalid("Last-Event-ID", "Last-Event-ID: must be the id of an event of this feed"))
}

/// Guard of an open feed. Until it is dropped, the feed counts towards the limit and the gauge of open feeds.
struct OpenFeed {
    api: Api,
    _permit: OpenPermit,
}

impl OpenFeed {
    fn new(api: &Api, access: &Access) -> Result<Self, ApiError> {
        let permit = api.feeds.open(access, None)?;
        api.metrics.open_event_feeds.inc();
        Ok(Self { api: api.clone(), _permit: permit })
    }
}

impl Drop for OpenFeed {
    fn drop(&mut self) {
        self.api.metrics.open_event_feeds.dec();
    }
}

trait FeedReader: Send + 'static {
    /// The next frame; `None` ends the feed.
    fn next(&mut self) -> impl Future<Output = Option<Frame>> + Send;
}

/// Completes when a feed must end: the scheduler stops, or the token of its request is no longer valid.
async fn end_of_feeds(api: Api, access: Access) {
    let mut stop = api.stop.clone();
    let invalid = async {
        while api.guard.tokens().is_valid(&access).await {
            tokio::time::sleep(TOKEN_CHECK_INTERVAL).await;
        }
    };
    tokio::select! {
        () = stop.raised() => {}
        () = invalid => {}
    }
}

fn stream<R: FeedReader>(reader: R, end: impl Future<Output = ()> + Send + 'static) -> FeedReply {
    let frames = futures::stream::unfold((reader, Box::pin(end)), |(mut reader, mut end)| async move {
        let frame = tokio::select! {
            frame = reader.next() => frame,
            () = end.as_mut() => None,
        };
        frame.map(|frame| (Ok(frame), (reader, end)))
    });
    let frames: FrameStream = Box::pin(frames);
    Ok(Sse::new(frames).keep_alive(KeepAlive::new().interval(KEEP_ALIVE_INTERVAL)))
}

struct TaskFeed {
    api: Api,
    task: TaskId,
    position: TaskPosition,
    /// Whether the position was compared with the database since the feed was opened or a query failed: the database
    /// may have been restored.
    is_checked: bool,
    sent_text: SentText,
    ready: VecDeque<Frame>,
    /// Time of the next database query; a wake-up sets it to now. Tokens are forwarded without a query.
    next_poll: Instant,
    wakeups: Receiver<Option<TaskId>>,
    tokens: Receiver<Arc<TokenFrame>>,
    _open: OpenFeed,
}

impl FeedReader for TaskFeed {
    async fn next(&mut self) -> Option<Frame> {
        loop {
            if let Some(frame) = self.ready.pop_front() {
                return Some(frame);
            }
            if Instant::now() < self.next_poll {
                if let Some(frame) = self.wait().await {
                    return Some(frame);
                }
                continue;
            }
            self.api.metrics.event_feed_polls.inc();
            match self.read().await {
                Ok(TaskFeedRead::Frames) => continue,
                Ok(TaskFeedRead::Nothing) if matches!(self.sent_text, SentText::Unknown) => {
                    if let Some(frame) = self.text_so_far().await {
                        return Some(frame);
                    }
                }
                Ok(TaskFeedRead::Nothing) => {}
                Ok(TaskFeedRead::Ended) => return None,
                Err(error) => {
                    self.is_checked = false;
                    tracing::debug!(%error, "feed query failed, retrying");
                }
            }
            self.next_poll = Instant::now() + POLL_INTERVAL;
        }
    }
}

/// Result of one reading of a task's feed.
enum TaskFeedRead {
    /// Frames are ready. There may be more than one query returns: query again once they are sent.
    Frames,
    Nothing,
    /// The task was deleted, or an event cannot be sent.
    Ended,
}

/// The text that a feed has sent of a job that was running when the feed was opened.
enum SentText {
    /// The feed has not sent all events yet, and no text.
    Unknown,
    /// The text of this attempt, up to this offset.
    Until(JobFence, u64),
    /// No text that may arrive a second time.
    Nothing,
}

impl SentText {
    /// The part of the frame that is not sent yet, if there is any. Frames of earlier attempts and jobs that arrived
    /// before the text was sent are dropped: their place is before events that were sent already.
    fn take_new(&mut self, frame: &TokenFrame) -> Option<Frame> {
        let Self::Until(fence, end) = self else { return token_frame(frame) };
        if (frame.fence.job, frame.fence.attempt) < (fence.job, fence.attempt) {
            return None;
        }
        let sent = usize::try_from(end.saturating_sub(frame.offset)).unwrap_or(usize::MAX);
        if frame.fence != *fence || sent == 0 {
            *self = Self::Nothing;
            return token_frame(frame);
        }
        let new = frame.text.get(sent..).filter(|new| !new.is_empty())?;
        token_frame(&TokenFrame { offset: *end, text: new.to_owned(), ..frame.clone() })
    }
}

impl TaskFeed {
    /// A frame with the text so far of the task's running job, if there is one.
    async fn text_so_far(&mut self) -> Option<Frame> {
        let texts = self.api.wakeup.texts();
        let Some(text) = texts.of(self.task) else {
            self.sent_text = SentText::Nothing;
            return None;
        };
        match self.api.store.is_running(self.task, &text.fence).await {
            Ok(true) => {
                self.sent_text = SentText::Until(text.fence, text.offset.saturating_add(text.text.len() as u64));
                token_frame(&text)
            }
            Ok(false) => {
                texts.forget(self.task, &text.fence);
                self.sent_text = SentText::Nothing;
                None
            }
            Err(error) => {
                tracing::debug!(%error, "the text so far is sent later");
                None
            }
        }
    }

    async fn read(&mut self) -> Result<TaskFeedRead, StoreError> {
        if !self.is_checked {
            let Some((epoch, last)) = self.api.store.task_feed_end(self.task).await? else {
                return Ok(TaskFeedRead::Ended);
            };
            if self.position.is_lost(&epoch, last) {
                self.position.task_seq = 0;
                self.ready.extend(reset_frame(FeedResetReason::Restored));
            }
            self.position.epoch = Some(epoch.name);
            self.is_checked = true;
        }
        for event in self.api.store.task_events(self.task, self.position.task_seq).await? {
            self.position.task_seq = event.task_seq;
            match event_frame(self.position.to_string(), &event) {
                Some(frame) => self.ready.push_back(frame),
                None => return Ok(TaskFeedRead::Ended),
            }
        }
        Ok(if self.ready.is_empty() { TaskFeedRead::Nothing } else { TaskFeedRead::Frames })
    }

    /// The next token frame of this task, or `None` when the database should be queried for events.
    async fn wait(&mut self) -> Option<Frame> {
        let next_poll = tokio::time::sleep_until(self.next_poll.into());
        tokio::pin!(next_poll);
        loop {
            tokio::select! {
                biased;
                wakeup = self.wakeups.recv() => match wakeup {
                    Ok(Some(task)) if task != self.task => {}
                    Ok(_) | Err(RecvError::Lagged(_)) => {
                        self.next_poll = Instant::now();
                        return None;
                    }
                    Err(RecvError::Closed) => { (&mut next_poll).await; return None; }
                },
                token = self.tokens.recv() => match token {
                    Ok(frame) if frame.task == self.task => {
                        if let Some(frame) = self.sent_text.take_new(&frame) {
                            return Some(frame);
                        }
                    }
                    Ok(_) | Err(RecvError::Lagged(_)) => {}
                    Err(RecvError::Closed) => { (&mut next_poll).await; return None; }
                },
                () = &mut next_poll => return None,
            }
        }
    }
}

struct GlobalFeed {
    api: Api,
    position: GlobalPosition,
    ready: VecDeque<Frame>,
    wakeups: Receiver<Option<TaskId>>,
    _open: OpenFeed,
}

impl FeedReader for GlobalFeed {
    async fn next(&mut self) -> Option<Frame> {
        loop {
            if let Some(frame) = self.ready.pop_front() {
                return Some(frame);
            }
            match self.api.store.feed_page(self.position.cursor()).await {
                Ok(page) => {
                    let reset = self.position.check(&page);
                    self.ready.extend(reset.and_then(reset_frame));
                    if reset == Some(FeedResetReason::Restored) {
                        continue;
                    }
                    for (cursor, event) in page.events {
                        let id = self.position.advance(cursor).to_string();
                        self.ready.push_back(event_frame(id, &event)?);
                    }
                    if !self.ready.is_empty() {
                        continue;
                    }
                }
                Err(error) => tracing::debug!(%error, "feed query failed, retrying"),
            }
            tokio::select! {
                wakeup = self.wakeups.recv() => if let Err(RecvError::Closed) = wakeup {
                    tokio::time::sleep(POLL_INTERVAL).await
                },
                () = tokio::time::sleep(POLL_INTERVAL) => {}
            }
        }
    }
}

fn event_frame(id: String, event: &cfq_proto::event::Event) -> Option<Frame> {
    match Frame::default().event("event").id(id).json_data(event) {
        Ok(frame) => Some(frame),
        Err(error) => {
            tracing::error!(%error, event = event.id, "event cannot be serialized, the feed ends");
            None
        }
    }
}

/// A `reset` frame. It has no id, so a client that reconnects before the next event receives it again.
fn reset_frame(reason: FeedResetReason) -> Option<Frame> {
    let message = match reason {
        FeedResetReason::Restored => {
            "the database was restored, so Last-Event-ID is not a position in it: all events follow, also those that were \
             received before"
        }
        FeedResetReason::Deleted => "events after Last-Event-ID were deleted with ended tasks; the kept events follow",
    };
    Frame::default().event("reset").json_data(&FeedReset { reason, message: message.to_owned() }).ok()
}

fn token_frame(frame: &TokenFrame) -> Option<Frame> {
    let data = TokensData {
        job: frame.fence.job,
        attempt: frame.fence.attempt,
        role: frame.role,
        offset: frame.offset,
        text: frame.text.clone(),
    };
    Frame::default().event("tokens").json_data(&data).ok()
}
