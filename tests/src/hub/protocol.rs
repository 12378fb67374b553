//! The replies of the hub and of its storage server, with the injected faults.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{Path, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};

use super::{Fault, File, Inner, SeenRequest, Shared, TOKEN};

/// Records a request; returns whether it carries [`TOKEN`].
fn record(inner: &mut Inner, method: &Method, path: &str, headers: &HeaderMap) -> bool {
    let text = |name| headers.get(name).map(|v: &header::HeaderValue| v.to_str().unwrap().to_owned());
    let token = text(header::AUTHORIZATION);
    let range = text(header::RANGE);
    let authorized = token.is_some();
    inner.seen.push(SeenRequest { method: method.to_string(), path: path.to_owned(), range, authorized });
    token.as_deref() == Some(&format!("Bearer {TOKEN}"))
}

fn refused(status: u16, code: &str, message: &str) -> Response {
    let status = StatusCode::from_u16(status).unwrap();
    let headers = [("x-error-code", code.to_owned()), ("x-error-message", message.to_owned())];
    (status, headers, axum::Json(json!({ "error": message }))).into_response()
}

pub(super) async fn describe(
    State(inner): State<Shared>,
    Path((org, name, revision)): Path<(String, String, String)>,
    method: Method,
    headers: HeaderMap,
) -> Response {
    let mut inner = inner.lock().unwrap();
    let repo = format!("{org}/{name}");
    let trusted = record(&mut inner, &method, &format!("/api/models/{repo}/revision/{revision}"), &headers);
    if !inner.failures.is_empty() {
        let (status, after) = inner.failures.remove(0);
        let mut response = StatusCode::from_u16(status).unwrap().into_response();
        if let Some(after) = after {
            response.headers_mut().insert(header::RETRY_AFTER, after.into());
        }
        return response;
    }
    let Some(repository) = inner.repositories.get(&repo) else {
        // As on Hugging Face, a client without authorization gets the same answer for a missing repository as for a
        // private one.
        return refused(if trusted { 404 } else { 401 }, "RepoNotFound", "Repository not found");
    };
    let commit = repository.refs.get(&revision).cloned().unwrap_or(revision);
    let Some(files) = repository.snapshots.get(&commit) else {
        return refused(404, "RevisionNotFound", "Invalid rev id");
    };
    let sibling = |(name, file): (&String, &File)| -> Value {
        if repository.sizes_omitted {
            return json!({ "rfilename": name });
        }
        let mut sibling = json!({ "rfilename": name, "size": file.size(), "blobId": file.blob_id() });
        if file.large {
            sibling["lfs"] = json!({ "sha256": file.sha256(), "size": file.size(), "pointerSize": 130 });
        }
        sibling
    };
    let siblings: Vec<Value> = files.iter().map(sibling).collect();
    axum::Json(json!({ "id": repo, "sha": commit, "gated": repository.gated, "siblings": siblings })).into_response()
}

pub(super) async fn resolve(
    State(inner): State<Shared>,
    Path((org, name, revision, path)): Path<(String, String, String, String)>,
    method: Method,
    headers: HeaderMap,
) -> Response {
    let mut inner = inner.lock().unwrap();
    let repo = format!("{org}/{name}");
    let trusted = record(&mut inner, &method, &format!("/{repo}/resolve/{revision}/{path}"), &headers);
    let storage = inner.storage.unwrap();
    let Some(repository) = inner.repositories.get(&repo) else {
        return refused(401, "RepoNotFound", "Repository not found");
    };
    if repository.gated && !trusted {
        // The answer is the same without a token and with a wrong token.
        return refused(401, "GatedRepo", "Access to this model is restricted.");
    }
    let commit = repository.refs.get(&revision).cloned().unwrap_or(revision);
    let Some(files) = repository.snapshots.get(&commit) else {
        return refused(404, "RevisionNotFound", "Invalid rev id");
    };
    let Some(file) = files.get(&path).cloned() else {
        return refused(404, "EntryNotFound", "Entry not found");
    };
    let tag = if file.large { file.sha256() } else { file.blob_id() };
    if !file.large {
        let headers = [("x-repo-commit", commit), ("etag", format!("\"{tag}\""))];
        let length = (header::CONTENT_LENGTH, file.bytes.len().to_string());
        return (headers, [length], if method == Method::HEAD { Bytes::new() } else { file.bytes }).into_response();
    }
    let headers = [
        ("x-repo-commit", commit),
        ("x-linked-etag", format!("\"{tag}\"")),
        ("x-linked-size", file.size().to_string()),
        ("accept-ranges", "bytes".to_owned()),
        ("location", format!("http://{storage}/blob/{tag}?X-Amz-Signature=secret")),
    ];
    (StatusCode::FOUND, headers).into_response()
}

pub(super) async fn blob(
    State(inner): State<Shared>,
    Path(sum): Path<String>,
    method: Method,
    headers: HeaderMap,
) -> Response {
    let (bytes, fault) = {
        let mut locked = inner.lock().unwrap();
        record(&mut locked, &method, &format!("/blob/{sum}"), &headers);
        let files = locked.repositories.values().flat_map(|r| r.snapshots.values()).flat_map(BTreeMap::values);
        let Some(bytes) = files.filter(|f| f.large).find(|f| f.sha256() == sum).map(|f| f.bytes.clone()) else {
            return StatusCode::NOT_FOUND.into_response();
        };
        let next = (!locked.faults.is_empty()).then(|| locked.faults.remove(0));
        (bytes, next.or(locked.cut_every_connection.map(Fault::CutAfter)))
    };
    if let Some(Fault::Status(status)) = fault {
        return StatusCode::from_u16(status).unwrap().into_response();
    }
    let total = bytes.len();
    let asked = headers.get(header::RANGE).and_then(|r| r.to_str().ok()?.strip_prefix("bytes=")?.strip_suffix('-'));
    let from: Option<usize> = asked.and_then(|from| from.parse().ok());
    let from = from.filter(|_| !matches!(fault, Some(Fault::IgnoreRange)));
    if from.is_some_and(|from| from >= total) {
        return StatusCode::RANGE_NOT_SATISFIABLE.into_response();
    }
    let mut rest = bytes.slice(from.unwrap_or(0)..);
    if let Some(Fault::CorruptAt(at)) = fault
        && let Some(at) = at.checked_sub(from.unwrap_or(0))
    {
        let mut changed = rest.to_vec();
        changed[at] ^= 0xff;
        rest = changed.into();
    }
    let mut response = Response::builder().header(header::ETAG, format!("\"{sum}\"")).header("accept-ranges", "bytes");
    response = response.header(header::CONTENT_LENGTH, rest.len());
    if let Some(from) = from {
        let range = format!("bytes {from}-{}/{total}", total - 1);
        response = response.status(StatusCode::PARTIAL_CONTENT).header(header::CONTENT_RANGE, range);
    }
    response.body(body(inner, rest, fault)).unwrap()
}

/// Returns the response body as a stream of 16 KiB chunks, with the fault applied.
fn body(inner: Shared, rest: Bytes, fault: Option<Fault>) -> Body {
    let limit = match fault {
        Some(Fault::CutAfter(bytes) | Fault::HangAfter(bytes)) => bytes.min(rest.len()),
        _ => rest.len(),
    };
    let (chunk, delay) = match fault {
        Some(Fault::Trickle(delay)) => (1, delay),
        _ => (16 << 10, Duration::ZERO),
    };
    let ends = limit == rest.len();
    let hangs = matches!(fault, Some(Fault::HangAfter(_)));
    let stream = futures::stream::unfold(0, move |at| {
        let (inner, rest) = (inner.clone(), rest.clone());
        async move {
            if at >= limit {
                if ends || at == usize::MAX {
                    return None;
                }
                if hangs {
                    std::future::pending::<()>().await;
                }
                // Waits so that the bytes sent so far arrive before the connection breaks.
                tokio::time::sleep(Duration::from_millis(30)).await;
                return Some((Err(std::io::Error::other("cut")), usize::MAX));
            }
            tokio::time::sleep(delay).await;
            let end = (at + chunk).min(limit);
            inner.lock().unwrap().bytes_sent += (end - at) as u64;
            Some((Ok(rest.slice(at..end)), end))
        }
    });
    Body::from_stream(stream)
}
