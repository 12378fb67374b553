//! What an attempt has written is told every second, or every 64 tokens, beside the generation and without holding it up. A
//! node that is lost then costs what it wrote since, not all of it.

use std::sync::Arc;
use std::time::Duration;

use cfq_proto::job::Written;
use cfq_proto::messages::{FenceReply, JOURNAL_MOST, JobFence, Journal};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::time::{Instant, sleep_until};

use super::Shared;
use super::attempt::Attempt;

const EVERY: Duration = Duration::from_secs(1);
const TOKENS: usize = 64;

/// Dropped with its generation; what was not told by then is in the result, or is written again.
pub(super) struct Notes(Option<UnboundedSender<Vec<u32>>>);

impl Notes {
    /// `resumed`: tokens it took over. Nothing is told of an engine without a vocabulary.
    pub fn of(attempt: &Attempt, vocabulary: Option<i64>, resumed: u32) -> Self {
        Self(vocabulary.map(|vocabulary| {
            let (sender, receiver) = unbounded_channel();
            let teller = Teller { shared: attempt.shared.clone(), fence: attempt.in_hand.fence, vocabulary, resumed };
            tokio::spawn(teller.run(receiver));
            sender
        }))
    }

    pub fn wrote(&mut self, tokens: Vec<u32>) {
        if let Some(sender) = &self.0
            && !tokens.is_empty()
            && sender.send(tokens).is_err()
        {
            self.0 = None;
        }
    }
}

struct Teller {
    shared: Arc<Shared>,
    fence: JobFence,
    vocabulary: i64,
    resumed: u32,
}

impl Teller {
    async fn run(self, mut written: UnboundedReceiver<Vec<u32>>) {
        let mut tokens: Vec<u32> = Vec::new();
        let mut told = 0;
        let mut due = Instant::now() + EVERY;
        loop {
            tokio::select! {
                more = written.recv() => match more {
                    Some(more) => tokens.extend(more),
                    // The generation is over; its end says the rest.
                    None => return,
                },
                () = sleep_until(due) => {}
            }
            if tokens.len() == told {
                due = due.max(Instant::now() + EVERY);
                continue;
            }
            if tokens.len() - told < TOKENS && Instant::now() < due {
                continue;
            }
            if self.resumed as usize + tokens.len() > JOURNAL_MOST {
                return;
            }
            match self.tell(told, &tokens[told..]).await {
                Some(true) => told = tokens.len(),
                Some(false) => return,
                // Not heard, or the other side has less than was told: all of it again.
                None => told = 0,
            }
            due = Instant::now() + EVERY;
        }
    }

    /// `None` if it was not kept, false if it is not wanted.
    async fn tell(&self, told: usize, tokens: &[u32]) -> Option<bool> {
        let Self { shared, fence, vocabulary, resumed } = self;
        let written = Written { vocabulary: *vocabulary, tokens: tokens.to_vec() };
        let ask =
            Journal { fence: *fence, boot: shared.boot, resumed: *resumed, after: resumed + told as u32, written };
        match shared.session.request::<_, FenceReply>(&shared.subject("journal"), &ask).await {
            Ok(FenceReply::Committed) => {
                cfq_link::failpoint::hit("node.journalled");
                Some(true)
            }
            Ok(FenceReply::Stale) => Some(false),
            Ok(FenceReply::Refused { reason }) => {
                tracing::warn!(job = %fence.job, reason, "what is written is not journalled");
                Some(false)
            }
            Ok(FenceReply::Unavailable { reason }) => {
                tracing::debug!(reason, "journal not kept yet");
                None
            }
            Err(error) => {
                tracing::debug!(%error, "journal not kept yet");
                None
            }
        }
    }
}
