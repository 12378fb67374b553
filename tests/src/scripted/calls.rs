//! The scripted model server's record of its calls: the request, the text sent, and how the call ended. The oracle uses
//! the record to check, independently of cfq, that a text was generated once and that a generation stopped.

use std::sync::{Arc, Mutex, MutexGuard};

use serde_json::Value;

/// How a call ended, as seen by the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// The complete answer was written to the connection.
    Answered,
    /// The call was answered with an error status.
    Refused,
    /// The client closed the connection before the answer was complete.
    Disconnected,
}

/// One call to a model.
#[derive(Debug, Clone)]
pub struct Call {
    pub model: String,
    pub messages: Value,
    /// The text written to the connection so far.
    pub sent: String,
    /// How the call ended; `None` while it is open.
    pub end: Option<End>,
}

/// The record of all calls, in order of arrival.
#[derive(Clone, Default)]
pub struct Calls(Arc<Mutex<Vec<Call>>>);

impl Calls {
    fn list(&self) -> MutexGuard<'_, Vec<Call>> {
        self.0.lock().unwrap()
    }

    pub fn all(&self) -> Vec<Call> {
        self.list().clone()
    }

    pub(super) fn begin(&self, body: &Value) -> OpenCall {
        let model = body["model"].as_str().unwrap_or_default().to_owned();
        let mut list = self.list();
        list.push(Call { model, messages: body["messages"].clone(), sent: String::new(), end: None });
        OpenCall { calls: self.clone(), index: list.len() - 1 }
    }
}

/// A call that is being answered. If it is dropped before its end is set, it counts as disconnected, because the server
/// drops the answer when the connection closes.
pub(super) struct OpenCall {
    calls: Calls,
    index: usize,
}

impl OpenCall {
    pub(super) fn record_sent(&self, text: &str) {
        self.calls.list()[self.index].sent.push_str(text);
    }

    /// Sets how the call ended; only the first end counts.
    pub(super) fn finish(&self, end: End) {
        self.calls.list()[self.index].end.get_or_insert(end);
    }
}

impl Drop for OpenCall {
    fn drop(&mut self) {
        self.finish(End::Disconnected);
    }
}
