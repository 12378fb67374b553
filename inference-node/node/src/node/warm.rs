//! What critics are expected to be asked, computed while nothing else is to do.
//!
//! A hint comes while a creator writes, and again as more of its text is known; the call itself is placed later like any other.
//! What makes it safe to be on by default: a piece is computed only while no sequence runs on any model of the same device
//! and nothing is loaded, so it takes no time from a call but the rest of one short pass; it reserves nothing and asks for no
//! load, so room, ledger and placement are as without it; it holds an engine no longer than a piece, so an unload waits no
//! longer; and it is no job, so nothing counts, retries or reports it. What it can cost is blocks that were used longest ago,
//! where a guess was wrong and the pool full: the call would have taken the same ones. And idle time, and the power for it.
//!
//! A call behind an endpoint is not computed here and does not count as work. Where the endpoint is a server on this very
//! machine the two do share it; then the creator loses what the critic gains. `critic_warm_up = false` is for that.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use cfq_proto::ids::TaskId;
use cfq_proto::messages::WarmUp;
use cfq_proto::task::Agent;
use tokio::sync::Notify;

use crate::engine::{Ahead, Engine, Warmed};
use crate::node::Shared;
use crate::node::fleet::{Fleet, Leisure};

/// Of as many tasks as may come to one node in the meantime; beyond that the oldest is forgotten.
const MOST: usize = 16;
/// A hint whose call has not come by then is about one that will not.
const LONGEST: Duration = Duration::from_secs(120);
/// An engine that was busy although nothing seemed to run is looked at again after this, unless something changes before.
const AGAIN: Duration = Duration::from_millis(100);

struct Wish {
    expected: Arc<WarmUp>,
    since: Instant,
    /// Once it was cut into tokens.
    ahead: Option<Arc<Ahead>>,
}

impl Wish {
    fn is(&self, task: TaskId, role: Agent) -> bool {
        self.expected.task == task && self.expected.role == role
    }
}

/// The hints that wait, oldest first.
pub(super) struct Expected {
    on: bool,
    wishes: Mutex<VecDeque<Wish>>,
    news: Notify,
}

/// What may be done now.
struct Turn {
    expected: Arc<WarmUp>,
    ahead: Option<Arc<Ahead>>,
    engine: Arc<dyn Engine>,
}

impl Expected {
    pub(super) fn new(on: bool) -> Self {
        Self { on, wishes: Mutex::default(), news: Notify::new() }
    }

    fn wishes(&self) -> MutexGuard<'_, VecDeque<Wish>> {
        // Plain data: whole even if a holder panicked.
        self.wishes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// In the place of what was expected before of the same task and role.
    pub(super) fn wish(&self, expected: WarmUp) {
        if !self.on {
            return;
        }
        let mut wishes = self.wishes();
        wishes.retain(|wish| !wish.is(expected.task, expected.role));
        while wishes.len() >= MOST {
            wishes.pop_front();
        }
        wishes.push_back(Wish { expected: Arc::new(expected), since: Instant::now(), ahead: None });
        drop(wishes);
        self.news.notify_one();
    }

    /// The call itself is here.
    pub(super) fn has_come(&self, task: TaskId, role: Agent) {
        self.wishes().retain(|wish| !wish.is(task, role));
    }

    /// The oldest that has leisure; what never will have is forgotten.
    fn turn(&self, fleet: &Fleet) -> Option<Turn> {
        let mut turn = None;
        self.wishes().retain(|wish| {
            if wish.since.elapsed() > LONGEST {
                return false;
            }
            match fleet.leisure(&wish.expected.model) {
                Leisure::Never => return false,
                Leisure::Now(engine) if turn.is_none() => {
                    turn = Some(Turn { expected: wish.expected.clone(), ahead: wish.ahead.clone(), engine });
                }
                Leisure::Now(_) | Leisure::Later => {}
            }
            true
        });
        turn
    }

    /// It goes on with `ahead`, or is done; unless another took its place meanwhile.
    fn after(&self, expected: &Arc<WarmUp>, ahead: Option<Arc<Ahead>>) {
        let mut wishes = self.wishes();
        let Some(at) = wishes.iter().position(|wish| Arc::ptr_eq(&wish.expected, expected)) else { return };
        match ahead {
            Some(ahead) => wishes[at].ahead = Some(ahead),
            None => drop(wishes.remove(at)),
        }
    }
}

/// Until the node stops.
pub(super) async fn warm(shared: Arc<Shared>) {
    let mut changed = shared.fleet.changes().subscribe();
    loop {
        changed.mark_unchanged();
        let Some(Turn { expected, ahead, engine }) = shared.expected.turn(&shared.fleet) else {
            tokio::select! {
                () = shared.expected.news.notified() => {}
                _ = changed.changed() => {}
            }
            continue;
        };
        let Some(ahead) = ahead else {
            let ahead = engine.foresee(&expected).await.map(Arc::new);
            shared.expected.after(&expected, ahead);
            continue;
        };
        let warmed = engine.warm(ahead.clone()).await;
        drop(engine);
        match warmed {
            Warmed::Further => {}
            Warmed::Busy => drop(tokio::time::timeout(AGAIN, changed.changed()).await),
            Warmed::Enough => {
                tracing::debug!(task = %expected.task, model = %expected.model, tokens = ahead.tokens.len(), "warmed up");
                shared.expected.after(&expected, None);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use cfq_proto::job::{ChatMessage, ChatRole, Prompt, Written};
    use cfq_proto::node::{ModelState, Residency};
    use futures::future::BoxFuture;

    use super::*;
    use crate::engine::{Admitted, Refused};
    use crate::node::fleet::{Standing, unknown};

    /// On a device, with so many sequences.
    struct Runs(&'static str, AtomicU32);

    impl Engine for Runs {
        fn state(&self) -> ModelState {
            let state = unknown(&"path:/any".parse().unwrap(), Residency::Resident);
            ModelState { device: self.0.to_owned(), running: self.1.load(Ordering::SeqCst), ..state }
        }

        fn admit_after(&self, _: Prompt, _: Written) -> BoxFuture<'_, Result<Admitted, Refused>> {
            Box::pin(async { Err(Refused::NotNow { need: None, have: 0 }) })
        }
    }

    fn fleet(models: &[(&str, &'static str)]) -> (Arc<Fleet>, Vec<Arc<Runs>>) {
        let names: Vec<&str> = models.iter().map(|(model, _)| *model).collect();
        let config = serde_json::from_value(serde_json::json!({
            "node": "den", "nats": { "url": "nats://127.0.0.1:1" }, "model_dir": "/none", "models": names,
        }));
        let (fleet, _wished, _) = Fleet::new(&config.unwrap(), Arc::default());
        let engines: Vec<Arc<Runs>> =
            models.iter().map(|(_, device)| Arc::new(Runs(device, AtomicU32::new(0)))).collect();
        for ((model, _), engine) in models.iter().zip(&engines) {
            fleet.set(&model.parse().unwrap(), Standing::Ready(engine.clone()));
        }
        (fleet, engines)
    }

    fn hint(task: TaskId, model: &str, text: &str) -> WarmUp {
        WarmUp {
            task,
            role: Agent::Beta,
            model: model.parse().unwrap(),
            messages: vec![ChatMessage { role: ChatRole::User, content: text.to_owned() }],
            max_tokens: 100,
            deterministic: false,
        }
    }

    fn text(turn: Option<Turn>) -> Option<String> {
        turn.map(|turn| turn.expected.messages[0].content.clone())
    }

    #[test]
    fn nothing_is_computed_beside_anything_that_shares_a_device() {
        let models = [("path:/a", "cuda:0,cuda:1"), ("path:/b", "cuda:1"), ("path:/c", "cpu"), ("openai:x/d", "cpu")];
        let (fleet, engines) = fleet(&models);
        let may = |model: &str| match fleet.leisure(&model.parse().unwrap()) {
            Leisure::Now(_) => "now",
            Leisure::Later => "later",
            Leisure::Never => "never",
        };
        let all = || ["path:/a", "path:/b", "path:/c", "openai:x/d", "path:/e"].map(may);
        assert_eq!(all(), ["now", "now", "now", "never", "never"]);
        engines[1].1.store(1, Ordering::SeqCst);
        assert_eq!(all(), ["later", "later", "now", "never", "never"]);
        engines[1].1.store(0, Ordering::SeqCst);
        // What an endpoint writes is computed elsewhere.
        engines[3].1.store(1, Ordering::SeqCst);
        assert_eq!(all(), ["now", "now", "now", "never", "never"]);
        fleet.set(&"path:/b".parse().unwrap(), Standing::Loading);
        assert_eq!(all(), ["later", "never", "later", "never", "never"]);
        let leaving: Arc<dyn Engine> = engines[1].clone();
        fleet.set(&"path:/b".parse().unwrap(), Standing::Leaving(Arc::downgrade(&leaving)));
        assert_eq!(all(), ["now", "never", "now", "never", "never"]);
        fleet.drain();
        assert_eq!(all(), ["never"; 5]);
    }

    #[test]
    fn the_latest_word_counts_until_the_call_comes() {
        let (fleet, engines) = fleet(&[("path:/a", "cuda:0"), ("path:/b", "cpu")]);
        let expected = Expected::new(true);
        let [one, two] = [TaskId::fresh(), TaskId::fresh()];
        expected.wish(hint(one, "path:/a", "short"));
        let old = expected.turn(&fleet).unwrap().expected;
        expected.wish(hint(one, "path:/a", "longer"));
        expected.wish(hint(two, "path:/b", "other"));
        // What was under way for the earlier word says nothing about the later one.
        expected.after(&old, None);
        assert_eq!(text(expected.turn(&fleet)), Some("longer".to_owned()));
        // Who has to wait holds nobody up elsewhere.
        engines[0].1.store(1, Ordering::SeqCst);
        assert_eq!(text(expected.turn(&fleet)), Some("other".to_owned()));
        engines[0].1.store(0, Ordering::SeqCst);
        expected.has_come(one, Agent::Alpha);
        assert_eq!(text(expected.turn(&fleet)), Some("longer".to_owned()), "a creator's call is not the critic's");
        expected.has_come(one, Agent::Beta);
        assert_eq!(text(expected.turn(&fleet)), Some("other".to_owned()));
        let done = expected.turn(&fleet).unwrap().expected;
        expected.after(&done, None);
        assert!(expected.turn(&fleet).is_none());
        // A model that is not loaded is not waited for, and there is an end to what is kept.
        expected.wish(hint(one, "path:/gone", "lost"));
        assert!(expected.turn(&fleet).is_none() && expected.wishes().is_empty());
        (0..2 * MOST).for_each(|_| expected.wish(hint(TaskId::fresh(), "path:/a", "one of many")));
        assert_eq!(expected.wishes().len(), MOST);
        let off = Expected::new(false);
        off.wish(hint(one, "path:/a", "short"));
        assert!(off.turn(&fleet).is_none());
    }
}
