//! What a scripted model server saw and said: for each call what was asked, what was sent, and how it ended. It is the outside
//! view of "generated once" and of "stopped".

use std::sync::{Arc, Mutex, MutexGuard};

use serde_json::Value;

/// How a call ended, seen from the server.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// All of the answer was handed to the connection.
    Answered,
    /// Refused with a status.
    Refused,
    /// The client closed the connection before the answer was whole.
    Left,
}

#[derive(Debug, Clone)]
pub struct Call {
    pub model: String,
    pub messages: Value,
    /// The text that was handed to the connection.
    pub sent: String,
    /// `None` while it goes on.
    pub end: Option<End>,
}

/// Every call, in the order they came.
#[derive(Clone, Default)]
pub struct Calls(Arc<Mutex<Vec<Call>>>);

impl Calls {
    fn list(&self) -> MutexGuard<'_, Vec<Call>> {
        self.0.lock().unwrap()
    }

    pub fn all(&self) -> Vec<Call> {
        self.list().clone()
    }

    pub(super) fn begin(&self, body: &Value) -> Ongoing {
        let model = body["model"].as_str().unwrap_or_default().to_owned();
        let mut list = self.list();
        list.push(Call { model, messages: body["messages"].clone(), sent: String::new(), end: None });
        Ongoing { calls: self.clone(), index: list.len() - 1 }
    }
}

/// A call that is being answered. Dropped before its end was told, its client has left: the server drops an answer when the
/// connection closes.
pub(super) struct Ongoing {
    calls: Calls,
    index: usize,
}

impl Ongoing {
    pub(super) fn sent(&self, text: &str) {
        self.calls.list()[self.index].sent.push_str(text);
    }

    pub(super) fn ends(&self, end: End) {
        self.calls.list()[self.index].end.get_or_insert(end);
    }
}

impl Drop for Ongoing {
    fn drop(&mut self) {
        self.ends(End::Left);
    }
}
