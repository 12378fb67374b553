//! `POST /v1/chat/completions` and `POST /v1/completions`.

use std::convert::Infallible;
use std::time::Duration;

use axum::Json;
use axum::body::Bytes;
use axum::extract::{Extension, FromRequest, Request, State};
use axum::http::{HeaderName, HeaderValue};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use cfq_proto::ids::TaskId;
use cfq_proto::job::{Completion, PromptForm};
use futures::Stream;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::sync::mpsc;

use super::chat_request::{Call, ChatRequest};
use super::error::OpenAiError;
use super::models;
use super::open_call::{OpenClientCall, Progress};
use super::parameters::{Delivery, Parameters};
use super::reply::ReplyHead;
use super::streamed_text::StreamedText;
use super::text_request::TextRequest;
use crate::api::Api;
use crate::api::access::Access;
use crate::api::error::ApiError;
use crate::api::submit::read_body;
use crate::api::validate::parse_body;
use crate::store::NewClientCall;

/// Maximum time in which the body of a request arrives.
const MAX_BODY_TIME: Duration = Duration::from_secs(8);
/// Maximum wait for the first text before a stream begins. A failure until then is sent with its HTTP status.
const MAX_WAIT_FOR_STATUS: Duration = Duration::from_secs(10);
/// Interval of comments that keep proxies and clients from closing a stream in which nothing is generated.
const KEEP_ALIVE_INTERVAL: Duration = Duration::from_secs(10);
/// Number of chunks that wait for a slow client.
const WAITING_CHUNKS: usize = 64;
/// End of a stream, after all chunks.
const DONE: &str = "[DONE]";
/// Header with the id of the call's job, for `cfq explain`.
const JOB_HEADER: HeaderName = HeaderName::from_static("x-cfq-job");

/// `POST /v1/chat/completions`.
pub async fn chat(
    State(api): State<Api>,
    Extension(access): Extension<Access>,
    request: Request,
) -> Result<Response, OpenAiError> {
    let (request, parameters) = read::<ChatRequest>(&api, request).await?;
    complete(api, access, request.model.clone(), request.into_call(&parameters)?).await
}

/// `POST /v1/completions`.
pub async fn text(
    State(api): State<Api>,
    Extension(access): Extension<Access>,
    request: Request,
) -> Result<Response, OpenAiError> {
    let (request, parameters) = read::<TextRequest>(&api, request).await?;
    complete(api, access, request.model.clone(), request.into_call(&parameters)?).await
}

/// Reads a body: the parameters of this form of request, and those that all forms have. The body is parsed once for each,
/// so that an error names the parameter.
async fn read<T: DeserializeOwned>(api: &Api, request: Request) -> Result<(T, Parameters), OpenAiError> {
    let received = tokio::time::timeout(MAX_BODY_TIME, Bytes::from_request(request, &()));
    let bytes = received.await.map_err(|_| ApiError::busy("the request body did not arrive in time: send it again"))?;
    let body = read_body(api, bytes)?;
    let parameters = parse_body(&body)?;
    Ok((parse_body(&body)?, parameters))
}

async fn complete(api: Api, access: Access, name: String, call: Call) -> Result<Response, OpenAiError> {
    let Call { prompt, tools, priority, delivery, constraint } = call;
    let form = prompt.form;
    let model = models::resolve(&api, &name).await?;
    let new = NewClientCall { id: TaskId::fresh(), token: access.token_id(), model, priority, prompt };
    let call = OpenClientCall::begin(api, access, new, delivery).await?;
    let job = HeaderValue::from_str(&call.job.to_string()).ok();
    let prefix = match form {
        PromptForm::Chat => "chatcmpl",
        PromptForm::Text => "cmpl",
    };
    let head = ReplyHead {
        id: format!("{prefix}-{}", call.job),
        created: cfq_link::clock::unix_seconds(),
        model: name,
        include_usage: delivery == Delivery::Stream { include_usage: true },
        form,
        tools,
    };
    let mut response = match reply(call, head, delivery).await {
        Ok(response) => response,
        Err(error) => error.with_constraint(constraint).into_response(),
    };
    if let Some(job) = job {
        response.headers_mut().insert(JOB_HEADER, job);
    }
    Ok(response)
}

async fn reply(mut call: OpenClientCall, head: ReplyHead, delivery: Delivery) -> Result<Response, OpenAiError> {
    match delivery {
        Delivery::Json => {
            let completion = await_completion(&mut call).await?;
            Ok(Json(head.whole(&completion)).into_response())
        }
        Delivery::Stream { .. } => {
            let first = match tokio::time::timeout(MAX_WAIT_FOR_STATUS, call.next()).await {
                Ok(Progress::Failed(error)) => return Err(error),
                Ok(progress) => Some(progress),
                Err(_) => None,
            };
            let keep_alive = KeepAlive::new().interval(KEEP_ALIVE_INTERVAL);
            Ok(Sse::new(stream(call, head, first)).keep_alive(keep_alive).into_response())
        }
    }
}

/// Waits for the whole result.
async fn await_completion(call: &mut OpenClientCall) -> Result<Box<Completion>, OpenAiError> {
    loop {
        match call.next().await {
            Progress::Tokens(_) => {}
            Progress::Done(completion) => return Ok(completion),
            Progress::Failed(error) => return Err(error),
        }
    }
}

/// The events of a call that has begun with `first`.
fn stream(
    call: OpenClientCall,
    head: ReplyHead,
    first: Option<Progress>,
) -> impl Stream<Item = Result<Event, Infallible>> + Send + 'static {
    let (events, received) = mpsc::channel(WAITING_CHUNKS);
    tokio::spawn(async move {
        let client = events.clone();
        tokio::select! {
            // The error is that the client has disconnected; dropping the call ends it.
            _disconnected = send_all(call, head, first, events) => {}
            () = client.closed() => {}
        }
    });
    futures::stream::unfold(received, |mut received| async move {
        let event: Event = received.recv().await?;
        Some((Ok(event), received))
    })
}

type Events = mpsc::Sender<Event>;

/// The client has closed the connection.
struct ClientDisconnected;

async fn send(events: &Events, data: String) -> Result<(), ClientDisconnected> {
    events.send(Event::default().data(data)).await.map_err(|_| ClientDisconnected)
}

async fn send_json(events: &Events, chunk: &Value) -> Result<(), ClientDisconnected> {
    send(events, chunk.to_string()).await
}

async fn send_all(
    mut call: OpenClientCall,
    head: ReplyHead,
    first: Option<Progress>,
    events: Events,
) -> Result<(), ClientDisconnected> {
    let mut text = StreamedText::default();
    // Text that may begin a tool call is not sent yet.
    let mut sent_bytes = 0;
    if let Some(chunk) = head.first_chunk() {
        send_json(&events, &chunk).await?;
    }
    let mut progress = match first {
        Some(progress) => progress,
        None => call.next().await,
    };
    loop {
        match progress {
            Progress::Tokens(frame) => {
                text.append(&frame);
                let certain = head.tools.safe_prefix_len(text.sent());
                if certain > sent_bytes {
                    send_json(&events, &head.text_chunk(&text.sent()[sent_bytes..certain])).await?;
                    sent_bytes = certain;
                }
            }
            Progress::Done(completion) => return send_end(&events, &head, &text, sent_bytes, &completion).await,
            // A client that sees neither the end of the choice nor [DONE] knows that the text is not complete.
            Progress::Failed(error) => return send_json(&events, &error.to_json()).await,
        }
        progress = call.next().await;
    }
}

async fn send_end(
    events: &Events,
    head: &ReplyHead,
    text: &StreamedText,
    sent_bytes: usize,
    completion: &Completion,
) -> Result<(), ClientDisconnected> {
    if let Err(interrupted) = text.check(&completion.text) {
        return send_json(events, &OpenAiError::unavailable(interrupted.to_string()).to_json()).await;
    }
    let (content, calls) = head.tools.parse_tool_calls(&completion.text);
    if let Some(rest) = content.get(sent_bytes..).filter(|rest| !rest.is_empty()) {
        send_json(events, &head.text_chunk(rest)).await?;
    }
    if !calls.is_empty() {
        send_json(events, &head.tool_calls_chunk(&calls)).await?;
    }
    send_json(events, &head.last_chunk(completion.finish, &calls)).await?;
    if head.include_usage {
        send_json(events, &head.usage_chunk(&completion.usage)).await?;
    }
    send(events, DONE.to_owned()).await
}
