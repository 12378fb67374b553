//! The threads that compute, shared by all models of the process.
//!
//! A decode step of a small model is a hundred parallel regions of some ten microseconds each, so starting one must cost
//! less than a microsecond: workers watch for work for a while before they sleep. Pieces are taken one by one from a
//! counter and nobody waits at a barrier for threads as such, only for pieces that somebody has begun: a worker that has
//! lost its core to a neighbour holds nothing up, the others take its share.
//!
//! Results never depend on who computed a piece or in which order.
#![allow(unsafe_code)]

use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// How long an idle worker watches before it sleeps: longer than what lies between two regions of a step.
const WATCH: Duration = Duration::from_micros(200);
/// Looks between two questions after the time, or offers of the core to somebody else.
const LOOKS: u32 = 64;
/// Pieces per thread that callers should aim at: enough to even out a slow one, few enough to cost nothing.
const PIECES: usize = 4;

/// On a cache line of its own, so that those who watch one word do not slow down those who write another.
#[repr(align(128))]
struct Lone<T>(T);

type Work<'a> = dyn Fn(usize) + Sync + 'a;

struct Team {
    /// Pieces of the current region in the high half, the next one not taken in the low half.
    ticket: Lone<AtomicU64>,
    /// Pieces finished.
    done: Lone<AtomicUsize>,
    /// Valid while the current region has unfinished pieces.
    work: UnsafeCell<Option<*const Work<'static>>>,
    panicked: AtomicBool,
    sleepers: AtomicUsize,
    gate: Mutex<()>,
    bell: Condvar,
    /// Held by whose region it is: two models take turns.
    turn: Mutex<()>,
    threads: usize,
}

// SAFETY: `work` is the only part that is not `Sync` by itself. It is written only by the holder of `turn` while no piece
// is unfinished, and read only by those who have taken a piece and not finished it; see `run` and `take`.
unsafe impl Sync for Team {}
// SAFETY: as above; the pointer in `work` is to something `Sync`.
unsafe impl Send for Team {}

fn team() -> &'static Team {
    static TEAM: OnceLock<&'static Team> = OnceLock::new();
    TEAM.get_or_init(|| {
        // The same number, from the same variable, as everything else that computes in this process.
        let threads = rayon::current_num_threads().max(1);
        let team: &'static Team = Box::leak(Box::new(Team {
            ticket: Lone(AtomicU64::new(0)),
            done: Lone(AtomicUsize::new(0)),
            work: UnsafeCell::new(None),
            panicked: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            gate: Mutex::new(()),
            bell: Condvar::new(),
            turn: Mutex::new(()),
            threads,
        }));
        for at in 1..threads {
            let spawned = std::thread::Builder::new().name(format!("compute-{at}")).spawn(|| team.serve());
            if let Err(error) = spawned {
                // The others take its share.
                tracing::warn!(%error, "a compute thread did not start");
            }
        }
        team
    })
}

/// Threads that share the work.
pub fn threads() -> usize {
    team().threads
}

/// Items of one piece when `count` items are shared out.
pub fn share(count: usize) -> usize {
    count.div_ceil(threads() * PIECES).max(1)
}

thread_local! {
    /// Whether this thread is doing a piece: regions within it are its own business.
    static WITHIN: Cell<bool> = const { Cell::new(false) };
}

/// Calls `work` once for each of 0..`pieces`, on all threads, and returns when all are done. A panic of one is passed on.
pub fn run(pieces: usize, work: &Work<'_>) {
    if pieces <= 1 || threads() == 1 || WITHIN.get() || u32::try_from(pieces).is_err() {
        (0..pieces).for_each(work);
    } else {
        team().run(pieces, work);
    }
}

/// Calls `work` with each chunk of `size` values and its number, on all threads.
pub fn chunks<T: Send>(values: &mut [T], size: usize, work: impl Fn(usize, &mut [T]) + Sync) {
    let (length, from) = (values.len(), Slots::new(values));
    run(length.div_ceil(size.max(1)), &|at| {
        let begin = at * size;
        // SAFETY: chunks of different numbers do not overlap, and each number is called once.
        work(at, unsafe { from.slice(begin, size.min(length - begin)) });
    });
}

/// A slice that several pieces write to, each its own part of it.
pub struct Slots<T>(*mut T, usize);

// SAFETY: it only hands out what `slice`'s callers promise to be disjoint.
unsafe impl<T: Send> Sync for Slots<T> {}

impl<T> Slots<T> {
    pub fn new(values: &mut [T]) -> Self {
        Self(values.as_mut_ptr(), values.len())
    }

    /// # Safety
    /// While the result lives, the slice given to [`Self::new`] is not used otherwise, and no other part of it that
    /// overlaps `from..from + length` is held.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn slice(&self, from: usize, length: usize) -> &mut [T] {
        assert!(from <= self.1 && length <= self.1 - from, "{from} + {length} of {}", self.1);
        // SAFETY: inside the slice by the assertion, exclusive by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.0.add(from), length) }
    }
}

impl Team {
    fn run(&self, pieces: usize, work: &Work<'_>) {
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: only the lifetime is changed. The pointer is used for pieces of this region only, and this function
        // does not return, nor unwind, before all of them are done.
        let work = unsafe { std::mem::transmute::<*const Work<'_>, *const Work<'static>>(work) };
        // SAFETY: `turn` is ours and the region before is done, so nobody holds an unfinished piece and nobody reads.
        unsafe { *self.work.get() = Some(work) };
        self.done.0.store(0, Ordering::Relaxed);
        // Publishes the two lines above to whoever takes a piece.
        self.ticket.0.store((pieces as u64) << 32, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            let _gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
            self.bell.notify_all();
        }
        while self.take() {}
        let mut looks = 0u32;
        while self.done.0.load(Ordering::Acquire) < pieces {
            looks += 1;
            if looks.is_multiple_of(LOOKS) {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
        let panicked = self.panicked.swap(false, Ordering::Relaxed);
        drop(turn);
        assert!(!panicked, "a piece of a parallel computation panicked");
    }

    /// Takes a piece and does it. False when there is none.
    fn take(&self) -> bool {
        let mut ticket = self.ticket.0.load(Ordering::Acquire);
        loop {
            let (pieces, next) = ((ticket >> 32) as usize, (ticket & u64::from(u32::MAX)) as usize);
            if next >= pieces {
                return false;
            }
            match self.ticket.0.compare_exchange_weak(ticket, ticket + 1, Ordering::AcqRel, Ordering::Acquire) {
                Err(now) => ticket = now,
                Ok(_) => {
                    // SAFETY: the exchange found `next` not taken, so the region that the ticket is of has an unfinished
                    // piece, ours: its `run` has written `work` before (the exchange acquires that) and waits for us.
                    let work = unsafe { (*self.work.get()).map(|work| &*work) };
                    WITHIN.set(true);
                    if let Some(work) = work
                        && catch_unwind(AssertUnwindSafe(|| work(next))).is_err()
                    {
                        self.panicked.store(true, Ordering::Relaxed);
                    }
                    WITHIN.set(false);
                    self.done.0.fetch_add(1, Ordering::Release);
                    return true;
                }
            }
        }
    }

    fn idle(&self) -> bool {
        let ticket = self.ticket.0.load(Ordering::SeqCst);
        (ticket & u64::from(u32::MAX)) >= ticket >> 32
    }

    fn serve(&self) {
        let mut since: Option<Instant> = None;
        let mut looks = 0u32;
        loop {
            if self.take() {
                since = None;
                continue;
            }
            looks = looks.wrapping_add(1);
            std::hint::spin_loop();
            if looks.is_multiple_of(LOOKS) && since.get_or_insert_with(Instant::now).elapsed() > WATCH {
                // Announced before the last look: whoever publishes after that look sees the sleeper.
                self.sleepers.fetch_add(1, Ordering::SeqCst);
                let mut gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
                while self.idle() {
                    gate = self.bell.wait(gate).unwrap_or_else(PoisonError::into_inner);
                }
                drop(gate);
                self.sleepers.fetch_sub(1, Ordering::SeqCst);
                since = None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_piece_is_done_once_whoever_asks() {
        std::thread::scope(|scope| {
            for caller in 0..3 {
                scope.spawn(move || {
                    for round in 0..2000 {
                        let pieces = (round * 7 + caller) % 40;
                        let counts: Vec<AtomicUsize> = (0..pieces).map(|_| AtomicUsize::new(0)).collect();
                        run(pieces, &|at| {
                            counts[at].fetch_add(at + 1, Ordering::Relaxed);
                        });
                        for (at, count) in counts.iter().enumerate() {
                            assert_eq!(count.load(Ordering::Relaxed), at + 1, "piece {at} of {pieces}");
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn a_region_within_a_piece_is_done_there() {
        let count = AtomicUsize::new(0);
        run(5, &|_| {
            run(7, &|_| {
                count.fetch_add(1, Ordering::Relaxed);
            });
        });
        assert_eq!(count.into_inner(), 35);
    }

    #[test]
    fn chunks_are_written_each_by_one() {
        for length in [0usize, 1, 99, 100, 101] {
            let mut values = vec![0; length];
            chunks(&mut values, 10, |at, chunk| chunk.iter_mut().for_each(|v| *v += at + 1));
            assert!(values.iter().enumerate().all(|(i, v)| *v == i / 10 + 1), "{values:?}");
        }
    }

    #[test]
    fn a_panic_comes_back_and_the_team_goes_on() {
        let panicked = catch_unwind(|| run(8, &|at| assert_ne!(at, 5))).is_err();
        let sum = AtomicUsize::new(0);
        run(8, &|at| {
            sum.fetch_add(at, Ordering::Relaxed);
        });
        assert_eq!((panicked, sum.into_inner()), (true, 28));
    }
}
