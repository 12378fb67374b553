//! One thread per model: all its sequences go through one forward pass a step.
//!
//! Each step takes one token of every decoding sequence and, beside them, as much of the waiting prompts as the measured
//! rate computes in a quarter of a second ([`super::share`]). So decoding never stalls for longer than that behind
//! somebody's long prompt, and a cancel is seen within one step. Sequences join and leave between steps.
//!
//! Sequences are admitted by what they are expected to write, so the pool can run out under them. Then the youngest
//! gives its blocks up and waits; what it has written stays, its keys and values are computed again when there is room
//! (or found, if nobody needed the blocks). The oldest is never put aside, so somebody always gets on.
//!
//! A pass that fails is of one of three kinds ([`Trouble`]). One that found no memory on its card puts everybody aside, and
//! smaller ones follow ([`super::pace`]). After a second in a row, or anything else a card's driver says, the engine is
//! broken, as after a panic: the node hands its work back and ends, and is started again.
//!
//! Between sequences, and only then, a piece of a prompt that is expected may be computed (`ahead`).

use std::collections::VecDeque;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, TryRecvError};
use std::time::{Duration, Instant};

use candle_core::Tensor;
use cfq_proto::job::FinishReason;

use crate::engine::candle::Order;
use crate::engine::candle::kv::{BLOCK, KvPool, SequenceKv};
use crate::engine::candle::lookup::Cost;
use crate::engine::candle::model::{Model, Network, Rows, Trouble};
use crate::engine::candle::pace::Pace;
use crate::engine::candle::rate::Load;
use crate::engine::candle::room::{Figures, Room};
use crate::engine::candle::sequence::{After, Job, Sequence, engine_failure};
use crate::engine::candle::share::{PIECE_LEAST, Want, share};
use crate::engine::{Ended, Warmed};
use crate::models::tokenizer::Vocabulary;

/// Longest a pass may take for the sake of prompts, all of them together.
const CHUNK_TIME: Duration = Duration::from_millis(250);
/// Rows of the passes of a model that was not measured yet.
const CHUNK_UNMEASURED: usize = 32;
/// Bounds a pass's activations.
pub const CHUNK_MOST: usize = 512;
/// Guessed rows of one pass, shared by its sequences.
pub const GUESSED_ROWS: usize = 32;

/// One that is in the forward pass; tokens from `kv.len()` on are not computed yet.
struct Running {
    sequence: Sequence,
    kv: SequenceKv,
    /// The step in which it last went through the model.
    served: u64,
}

impl Running {
    fn waiting(&self) -> &[u32] {
        &self.sequence.tokens[self.kv.len()..]
    }

    /// Blocks it will ask for, as far as its known tokens and the next block's say.
    fn lacks(&self) -> usize {
        blocks(&self.sequence).saturating_sub(self.kv.blocks())
    }
}

/// Blocks for what a sequence has, and one more to go on with.
fn blocks(sequence: &Sequence) -> usize {
    sequence.tokens.len() / BLOCK + 2
}

/// What one sequence puts through a forward pass.
struct Share {
    /// Known tokens, then guesses.
    tokens: Vec<u32>,
    guessed: usize,
    /// Rows, counted from the last, whose scores are wanted.
    scored: usize,
}

pub struct Batcher<N: Network = Model> {
    model: N,
    pool: KvPool<N::Memory>,
    vocabulary: Arc<Vocabulary>,
    jobs: Receiver<Order>,
    room: Arc<Room>,
    figures: Arc<Figures>,
    /// What a pass costs, which decides how much is guessed: [`Figures::cost`], but where a test wants the same guesses on
    /// every machine.
    cost: fn(&Figures, usize) -> Cost,
    /// Oldest first.
    running: Vec<Running>,
    /// Put aside for want of room, oldest first.
    aside: VecDeque<Sequence>,
    pace: Pace,
    /// Seen while nobody ran.
    lost: Option<String>,
    serial: u64,
    steps: u64,
}

/// Why the engine cannot go on.
struct Broken(String);

impl<N: Network> Batcher<N> {
    pub fn new(
        model: N,
        pool: KvPool<N::Memory>,
        vocabulary: Arc<Vocabulary>,
        jobs: Receiver<Order>,
        room: Arc<Room>,
        figures: Arc<Figures>,
        cost: fn(&Figures, usize) -> Cost,
    ) -> Self {
        let (running, aside) = (Vec::new(), VecDeque::new());
        let pace = Pace::FULL;
        Self {
            model,
            pool,
            vocabulary,
            jobs,
            room,
            figures,
            cost,
            running,
            aside,
            pace,
            lost: None,
            serial: 0,
            steps: 0,
        }
    }

    /// Runs until the engine is dropped, parks the keys and values it holds, and gives the model back. A panic, or a card that
    /// is lost, ends the engine: its sequences fail first, then it says why, and the node ends over it.
    pub fn run(mut self) -> Option<N> {
        let figures = self.figures.clone();
        let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| {
            while self.take_up() {
                self.step()?;
            }
            self.pool.park_all();
            Ok(())
        }));
        let Self { model, pool, jobs, running, aside, .. } = self;
        let said = match &outcome {
            Ok(Ok(())) => None,
            Ok(Err(Broken(reason))) => Some(reason.as_str()),
            Err(panic) => {
                let said = panic.downcast_ref::<String>().map(String::as_str);
                said.or_else(|| panic.downcast_ref::<&str>().copied()).or(Some("a panic without words"))
            }
        };
        let Some(said) = said else {
            drop((running, aside, jobs, pool));
            return Some(model);
        };
        let everybody = running.into_iter().map(|running| running.sequence).chain(aside);
        everybody.for_each(|sequence| sequence.end(Err(engine_failure(format!("the engine stopped: {said}")))));
        drop((jobs, pool));
        tracing::error!(reason = said, "inference engine stopped");
        figures.broken(said.to_owned());
        None
    }

    /// Lets waiting jobs join; sleeps, or computes ahead, while there is nothing to do. False when the engine is gone.
    fn take_up(&mut self) -> bool {
        self.bring_back();
        let mut piece = None;
        loop {
            let idle = self.is_idle();
            let next = match idle && piece.is_none() {
                true => self.jobs.recv().map_err(|_| TryRecvError::Disconnected),
                false => self.jobs.try_recv(),
            };
            match next {
                Ok(Order::Sequence(job)) => self.join(*job),
                Ok(Order::Piece(asked)) => piece = Some(asked),
                Err(gone_or_none) => {
                    // Whoever came with it goes first.
                    if let Some(piece) = piece.take() {
                        let warmed = if idle { self.ahead(&piece.ahead) } else { Warmed::Busy };
                        piece.answer(warmed);
                    }
                    match gone_or_none {
                        TryRecvError::Empty if self.lost.is_some() => return true,
                        TryRecvError::Empty if idle => {}
                        TryRecvError::Empty => return true,
                        TryRecvError::Disconnected => return !idle,
                    }
                }
            }
        }
    }

    fn is_idle(&self) -> bool {
        self.running.is_empty() && self.aside.is_empty()
    }

    fn join(&mut self, job: Job) {
        let mut sequence = Sequence::new(job, self.serial);
        self.serial += 1;
        match sequence.open(&self.vocabulary) {
            After::GoesOn => {}
            After::Finished(finish) => return sequence.end(Ok(finish)),
            After::Failed(reason) => return sequence.end(Err(engine_failure(reason))),
        }
        // Nobody overtakes those put aside.
        if self.aside.is_empty() && self.running.len() < self.pace.rows() {
            self.begin(sequence);
        } else {
            self.aside.push_back(sequence);
        }
    }

    fn begin(&mut self, mut sequence: Sequence) {
        let kv = self.pool.begin(&sequence.tokens, sequence.long, sequence.sampling.deterministic);
        sequence.cached.get_or_insert(kv.len());
        self.figures.holds(self.pool.tokens());
        let at = self.running.partition_point(|r| r.sequence.serial < sequence.serial);
        self.running.insert(at, Running { sequence, kv, served: 0 });
    }

    /// Lets those put aside go on, oldest first, as far as there is room for what they have and a block more, beside what
    /// the running ones still lack: who came back a moment ago has taken nothing of it yet.
    fn bring_back(&mut self) {
        while let Some(first) = self.aside.front() {
            if self.running.len() >= self.pace.rows() {
                return;
            }
            let promised: usize = self.running.iter().map(Running::lacks).sum();
            // Alone it fits whatever the pool holds.
            if !self.running.is_empty() && promised + blocks(first) > self.pool.available() {
                return;
            }
            if let Some(sequence) = self.aside.pop_front() {
                self.begin(sequence);
            }
        }
    }

    /// Takes the blocks of the youngest from it.
    fn put_aside(&mut self, why: &str) {
        let Some(Running { sequence, kv, .. }) = self.running.pop() else { return };
        tracing::debug!(tokens = sequence.tokens.len(), "sequence put aside: {why}");
        self.figures.preempted();
        self.pool.end(kv, &sequence.tokens);
        let at = self.aside.partition_point(|s| s.serial < sequence.serial);
        self.aside.insert(at, sequence);
    }

    fn drop_cancelled(&mut self) {
        for at in (0..self.running.len()).rev() {
            if self.running[at].sequence.outbox.is_cancelled() {
                let running = self.running.remove(at);
                self.leave(running, Err(Ended::Cancelled));
            }
        }
        for at in (0..self.aside.len()).rev() {
            if self.aside[at].outbox.is_cancelled()
                && let Some(sequence) = self.aside.remove(at)
            {
                sequence.end(Err(Ended::Cancelled));
            }
        }
    }

    /// What each running sequence puts through the forward pass in this step, with room for it.
    fn plan(&mut self) -> Vec<Share> {
        let wants: Vec<Want> =
            self.running.iter().map(|r| Want { waiting: r.waiting().len(), served: r.served }).collect();
        let prefilling = wants.iter().any(|w| w.waiting > 1);
        // The longest decides: its rows attend to the most.
        let prompts = self.running.iter().filter(|r| r.waiting().len() > 1);
        let before = prompts.map(|r| r.kv.len()).max().unwrap_or(0);
        let rows = share(&wants, self.chunk(CHUNK_TIME, before));
        let cost = (self.cost)(&self.figures, self.running.len());
        // Guesses are for passes that have nothing better to do.
        let most = if prefilling || !N::REWINDS { 0 } else { GUESSED_ROWS.min(self.pace.rows()) };
        let guesses = most / self.running.len().max(1);
        let running = self.running.len();
        let mut plan: Vec<Share> = Vec::with_capacity(running);
        while plan.len() < self.running.len() {
            let take = rows[plan.len()];
            let next = &mut self.running[plan.len()];
            if !self.pool.grow(&mut next.kv, take) {
                self.put_aside("the KV pool is full");
                continue;
            }
            if take > 0 {
                next.served = self.steps;
            }
            let mut tokens = next.waiting()[..take].to_vec();
            let mut guessed = 0;
            if next.waiting().len() == 1 && next.sequence.sampling.prompt_lookup {
                let Sequence { lookup, tokens: all, longest, .. } = &mut next.sequence;
                let proposed = lookup.propose(all, guesses.min(longest.saturating_sub(all.len() + 1)), cost);
                // Everybody else needs a block more at most: those are not for guesses.
                if !proposed.is_empty()
                    && self.pool.available() > running
                    && self.pool.grow(&mut next.kv, 1 + proposed.len())
                {
                    guessed = proposed.len();
                    tokens.extend(proposed);
                }
            }
            let scored = if take == next.waiting().len() { guessed + 1 } else { 0 };
            plan.push(Share { tokens, guessed, scored });
        }
        plan
    }

    fn step(&mut self) -> Result<(), Broken> {
        if let Some(reason) = self.lost.take() {
            return Err(Broken(reason));
        }
        self.drop_cancelled();
        self.steps += 1;
        let plan = self.plan();
        if plan.is_empty() {
            return Ok(());
        }
        let load = plan.iter().zip(&self.running).map(|(s, r)| Load::of(s.tokens.len(), r.kv.len())).sum();
        cfq_link::failpoint::panics("node.computing");
        let began = Instant::now();
        let parts: Vec<Rows<'_>> = self
            .running
            .iter()
            .zip(&plan)
            .filter(|(_, share)| !share.tokens.is_empty())
            .map(|(r, share)| Rows { kv: &r.kv, tokens: &share.tokens, scored: share.scored })
            .collect();
        // One that must not be changed by its company rules for all of it.
        let exact = self.running.iter().any(|r| r.sequence.sampling.deterministic);
        let scores = self.model.forward(&mut self.pool, &parts, exact);
        drop(parts);
        let outcomes = scores.and_then(|scores| self.advance(scores, &plan));
        let took = began.elapsed();
        let prefilled = plan.iter().filter(|s| s.guessed == 0 && s.tokens.len() > 1).map(|s| s.tokens.len());
        if prefilled.sum::<usize>() >= PIECE_LEAST {
            // The rows of those that decode took their part of the time.
            self.figures.prefilled(load, took);
        } else if plan.iter().all(|s| s.tokens.len() == 1) {
            self.figures.decoded(took);
        }
        match outcomes {
            Ok(outcomes) => {
                self.pace.went_well();
                for (at, outcome) in outcomes.into_iter().enumerate().rev() {
                    let how = match outcome {
                        After::GoesOn => continue,
                        After::Finished(finish) => Ok(finish),
                        After::Failed(reason) => Err(engine_failure(reason)),
                    };
                    let running = self.running.remove(at);
                    self.leave(running, how);
                }
            }
            Err(error) => self.failed(&error, plan.iter().map(|share| share.tokens.len()).sum())?,
        }
        Ok(())
    }

    /// A pass of so many rows came to nothing.
    fn failed(&mut self, error: &candle_core::Error, rows: usize) -> Result<(), Broken> {
        match self.model.trouble(error) {
            Trouble::Pass => {
                // Which sequence is at fault cannot be told, and their KV may be half written.
                for running in self.running.drain(..) {
                    self.pool.discard(running.kv);
                    running.sequence.end(Err(engine_failure(format!("the forward pass failed: {error}"))));
                }
                self.pool.clear();
                Ok(())
            }
            // What was computed before is where it was; what this pass wrote lies behind it and does not count.
            Trouble::Memory if self.pace.shortened(rows) => {
                tracing::warn!(%error, rows, "no memory for a pass: its sequences wait, and smaller passes follow");
                while !self.running.is_empty() {
                    self.put_aside("no memory for its pass");
                }
                Ok(())
            }
            Trouble::Memory => {
                Err(Broken(format!("the card has no memory even for the smallest pass, twice in a row: {error}")))
            }
            Trouble::Device => Err(Broken(format!("the card cannot be used any more: {error}"))),
        }
    }

    /// Rows of prompts that one pass may take in that time, each after `before` others of its sequence.
    fn chunk(&self, time: Duration, before: usize) -> usize {
        if !self.pace.is_full() {
            return self.pace.rows();
        }
        match self.figures.rows_in(time, before) {
            Some(rows) => (rows as usize).clamp(PIECE_LEAST, CHUNK_MOST),
            None => CHUNK_UNMEASURED,
        }
    }

    /// Samples for every sequence whose scores were computed, and counts what stays of its keys and values.
    fn advance(&mut self, scores: Option<Tensor>, plan: &[Share]) -> candle_core::Result<Vec<After>> {
        let mut scores = match scores {
            Some(scores) => scores.to_vec2::<f32>()?.into_iter(),
            None => Vec::new().into_iter(),
        };
        let (pool, vocabulary) = (&mut self.pool, &self.vocabulary);
        let outcomes = self.running.iter_mut().zip(plan).map(|(Running { sequence, kv, .. }, share)| {
            if share.tokens.is_empty() {
                return After::GoesOn;
            }
            if share.scored == 0 {
                pool.advance(kv, &sequence.tokens, share.tokens.len());
                sequence.outbox.step("");
                return After::GoesOn;
            }
            // The first row scored follows what was known; each further one follows a guess, if that was right.
            let known = sequence.tokens.len();
            let guesses = &share.tokens[share.tokens.len() - share.guessed..];
            let mut rows = scores.by_ref().take(share.scored);
            let mut right = 0;
            let mut after = None;
            for at in 0..share.scored {
                let Some(mut logits) = rows.next() else { break };
                // What was forced needs no scores.
                if sequence.tokens.len() <= known + at {
                    // Rows beyond the vocabulary are padding of the matrix.
                    logits.truncate(vocabulary.len());
                    after = Some(sequence.next_token(&mut logits, vocabulary));
                }
                let as_guessed = guesses.get(at).is_some_and(|guess| sequence.tokens.get(known + at) == Some(guess));
                right += usize::from(as_guessed);
                // The rows after a wrong guess mean nothing.
                if !as_guessed || !matches!(after, Some(After::GoesOn)) {
                    break;
                }
            }
            rows.for_each(drop);
            let computed = (share.tokens.len() - share.guessed + right).min(sequence.tokens.len() - kv.len());
            pool.advance(kv, &sequence.tokens, computed);
            sequence.lookup.judged(share.guessed, right, sequence.tokens.len());
            after.unwrap_or_else(|| After::Failed("the forward pass returned no scores".to_owned()))
        });
        Ok(outcomes.collect())
    }

    fn leave(&mut self, running: Running, how: Result<FinishReason, Ended>) {
        let Running { sequence, kv, .. } = running;
        match &how {
            Err(Ended::Failed(_)) => self.pool.discard(kv),
            Ok(_) | Err(Ended::Cancelled) => self.pool.end(kv, &sequence.tokens),
        }
        // Told when room comes back, not with every token: each change of the ledger makes a beat.
        self.figures.holds(self.pool.tokens());
        if how.is_ok() {
            self.room.wrote(sequence.tokens.len() - sequence.prompt);
        }
        sequence.end(how);
    }
}

mod ahead;
#[cfg(test)]
mod tests;
