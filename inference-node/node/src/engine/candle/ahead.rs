//! The engine's side of [`crate::engine::Ahead`]: an expected prompt in tokens, and its pieces on their way to the batcher.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use cfq_proto::job::ChatRole;
use cfq_proto::messages::WarmUp;
use tokio::sync::oneshot;

use crate::engine::candle::{CandleEngine, Order};
use crate::engine::{Ahead, Warmed};
use crate::models::template::ChatTemplate;
use crate::models::tokenizer::Vocabulary;

/// Whether a piece is on its way: the batcher's channel has one place for it.
#[derive(Debug, Clone, Default)]
pub struct Turn(Arc<AtomicBool>);

impl Turn {
    fn take(&self) -> Option<Taken> {
        let free = !self.0.swap(true, Ordering::SeqCst);
        free.then(|| Taken(self.0.clone()))
    }
}

/// The turn, until it is dropped.
#[derive(Debug)]
struct Taken(Arc<AtomicBool>);

impl Drop for Taken {
    fn drop(&mut self) {
        self.0.store(false, Ordering::SeqCst);
    }
}

/// Asks the batcher for one pass.
#[derive(Debug)]
pub struct Piece {
    pub ahead: Arc<Ahead>,
    answer: oneshot::Sender<Warmed>,
    _turn: Taken,
}

impl Piece {
    #[cfg(test)]
    pub fn new(ahead: Arc<Ahead>) -> (Self, oneshot::Receiver<Warmed>) {
        let (answer, answered) = oneshot::channel();
        (Self { ahead, answer, _turn: Taken(Arc::default()) }, answered)
    }

    pub fn answer(self, warmed: Warmed) {
        let Self { answer, _turn: turn, .. } = self;
        // Whoever hears the answer may ask for the next at once.
        drop(turn);
        // Nobody may want to know any more.
        let _ = answer.send(warmed);
    }
}

impl CandleEngine {
    /// Cut where more text would go on, so that no token of it is the chat template's end.
    pub(super) async fn ahead(&self, expected: &WarmUp) -> Option<Ahead> {
        if !self.parts.rewinds {
            return None;
        }
        let (template, vocabulary) = (self.parts.template.clone(), self.parts.vocabulary.clone());
        let WarmUp { messages, max_tokens, deterministic, .. } = expected.clone();
        let known = tokio::task::spawn_blocking(move || common(&template, &vocabulary, messages)).await.ok()??;
        let count = known.len() as u64;
        if count + 1 > self.parts.context.min(self.room.capacity()) {
            return None;
        }
        let asked = (count + u64::from(max_tokens)).min(self.parts.context);
        let long = self.parts.original.is_some_and(|original| asked > original);
        Some(Ahead { tokens: known, long, exact: deterministic })
    }

    pub(super) async fn piece(&self, ahead: Arc<Ahead>) -> Warmed {
        let Some(turn) = self.turn.take() else { return Warmed::Busy };
        let (answer, answered) = oneshot::channel();
        let piece = Piece { ahead, answer, _turn: turn };
        match self.jobs.try_send(Order::Piece(piece)) {
            Ok(()) => answered.await.unwrap_or(Warmed::Enough),
            Err(_) => Warmed::Busy,
        }
    }
}

/// The tokens that the prompt begins with however its last message goes on, as far as two ways of going on tell; the last of
/// them may still become another one.
fn common(
    template: &ChatTemplate,
    vocabulary: &Vocabulary,
    mut messages: Vec<cfq_proto::job::ChatMessage>,
) -> Option<Vec<u32>> {
    let tokens = |messages: &[_]| vocabulary.encode_sequence(&template.render(messages).ok()?).ok();
    if messages.last()?.role != ChatRole::User {
        return None;
    }
    let mut known = tokens(&messages)?;
    messages.last_mut()?.content.push('x');
    let other = tokens(&messages)?;
    known.truncate(known.iter().zip(&other).take_while(|(a, b)| a == b).count());
    Some(known)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_piece_at_a_time() {
        let turn = Turn::default();
        let first = turn.take();
        assert!(first.is_some() && turn.take().is_none());
        drop(first);
        assert!(turn.take().is_some());
    }
}
