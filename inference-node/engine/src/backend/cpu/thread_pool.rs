//! The thread pool that computes forward passes, shared by all models of the process.
//!
//! A decode step of a small model is a hundred parallel regions of some ten microseconds each, so starting a region
//! must cost less than a microsecond: workers spin for a while before they sleep. Threads claim chunks one by one from
//! an atomic counter. A region ends when all its chunks are done; there is no barrier over threads, so a worker that
//! the system has descheduled delays only the chunk it has claimed, and the other workers take the rest.
//!
//! Results never depend on which thread computed a chunk or in which order.
#![allow(unsafe_code)]

use std::cell::{Cell, UnsafeCell};
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

/// How long an idle worker spins before it sleeps: longer than the gap between two regions of a step.
const SPIN_DURATION: Duration = Duration::from_micros(200);
/// Number of spins between two clock reads of an idle worker, or between two yields of a waiting caller.
const SPINS_PER_CHECK: u32 = 64;
/// Number of chunks per thread: enough to compensate for a slow thread, few enough that claiming them takes negligible
/// time.
const CHUNKS_PER_THREAD: usize = 4;

/// A value on its own cache line, so that threads polling it are not slowed by writes to its neighbours.
#[repr(align(128))]
struct CachePadded<T>(T);

type Work<'a> = dyn Fn(usize) + Sync + 'a;

struct ThreadPool {
    /// High half: number of chunks of the current region. Low half: index of the next unclaimed chunk.
    ticket: CachePadded<AtomicU64>,
    /// Number of finished chunks of the current region.
    done: CachePadded<AtomicUsize>,
    /// The current region's function; valid while the region has unfinished chunks.
    work: UnsafeCell<Option<*const Work<'static>>>,
    panicked: AtomicBool,
    sleepers: AtomicUsize,
    sleep_lock: Mutex<()>,
    wake: Condvar,
    /// Held while a region runs: the regions of two models run one after the other.
    region_lock: Mutex<()>,
    threads: usize,
}

// SAFETY: `work` is the only field that is not `Sync` by itself. It is written only by the holder of `region_lock`
// while no chunk is unfinished, and read only by threads with a claimed, unfinished chunk; see `run` and
// `run_next_chunk`.
unsafe impl Sync for ThreadPool {}
// SAFETY: as above; the pointer in `work` is to a `Sync` function.
unsafe impl Send for ThreadPool {}

fn pool() -> &'static ThreadPool {
    static POOL: OnceLock<&'static ThreadPool> = OnceLock::new();
    POOL.get_or_init(|| {
        // rayon's thread count (RAYON_NUM_THREADS), which all other computation in this process also uses.
        let threads = rayon::current_num_threads().max(1);
        let pool: &'static ThreadPool = Box::leak(Box::new(ThreadPool {
            ticket: CachePadded(AtomicU64::new(0)),
            done: CachePadded(AtomicUsize::new(0)),
            work: UnsafeCell::new(None),
            panicked: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            sleep_lock: Mutex::new(()),
            wake: Condvar::new(),
            region_lock: Mutex::new(()),
            threads,
        }));
        for at in 1..threads {
            let spawned = std::thread::Builder::new().name(format!("compute-{at}")).spawn(|| pool.worker_loop());
            if let Err(error) = spawned {
                // The other threads compute the chunks instead.
                tracing::warn!(%error, "cannot start a compute thread; the pool runs with fewer threads");
            }
        }
        pool
    })
}

/// Number of threads in the pool, the caller included.
pub fn threads() -> usize {
    pool().threads
}

/// Items per chunk when `count` items are distributed over the pool.
pub fn chunk_size(count: usize) -> usize {
    count.div_ceil(threads() * CHUNKS_PER_THREAD).max(1)
}

thread_local! {
    /// Whether this thread is running a chunk: a nested region runs on this thread alone.
    static IN_REGION: Cell<bool> = const { Cell::new(false) };
}

/// Calls `work` once for each of 0..`chunks`, on all threads, and returns when all are done. If a chunk panics, this
/// function panics.
pub fn run(chunks: usize, work: &Work<'_>) {
    if chunks <= 1 || threads() == 1 || IN_REGION.get() || u32::try_from(chunks).is_err() {
        (0..chunks).for_each(work);
    } else {
        pool().run(chunks, work);
    }
}

/// Calls `work` with the index and values of each chunk of `size` values, on all threads.
pub fn for_each_chunk<T: Send>(values: &mut [T], size: usize, work: impl Fn(usize, &mut [T]) + Sync) {
    let (length, from) = (values.len(), DisjointSlice::new(values));
    run(length.div_ceil(size.max(1)), &|at| {
        let begin = at * size;
        // SAFETY: chunks of different indices do not overlap, and each index is called once.
        work(at, unsafe { from.slice(begin, size.min(length - begin)) });
    });
}

/// A slice that several chunks write to, each to its own part. It borrows the slice, which cannot be used otherwise in
/// the meantime.
pub struct DisjointSlice<'a, T> {
    start: *mut T,
    length: usize,
    borrowed: PhantomData<&'a mut [T]>,
}

// SAFETY: `slice`, its only access, requires its callers to keep the parts disjoint.
unsafe impl<T: Send> Sync for DisjointSlice<'_, T> {}

impl<'a, T> DisjointSlice<'a, T> {
    pub fn new(values: &'a mut [T]) -> Self {
        Self { start: values.as_mut_ptr(), length: values.len(), borrowed: PhantomData }
    }

    /// The part `from..from + length`.
    ///
    /// # Safety
    /// While the result lives, no other part that overlaps `from..from + length` is held.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn slice(&self, from: usize, length: usize) -> &mut [T] {
        let whole = self.length;
        assert!(from <= whole && length <= whole - from, "{from} + {length} exceeds the slice's length {whole}");
        // SAFETY: inside the slice by the assertion; exclusive by the contract of this function, and because `self`
        // borrows the slice.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(from), length) }
    }
}

impl ThreadPool {
    fn run(&self, chunks: usize, work: &Work<'_>) {
        let region = self.region_lock.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: only the lifetime is changed. The pointer is used for chunks of this region only, and this function
        // does not return, nor unwind, before all of them are done.
        let work = unsafe { std::mem::transmute::<*const Work<'_>, *const Work<'static>>(work) };
        // SAFETY: this thread holds `region_lock` and the previous region is done, so no thread has an unfinished chunk
        // and none reads `work`.
        unsafe { *self.work.get() = Some(work) };
        self.done.0.store(0, Ordering::Relaxed);
        // Publishes the two writes above to the threads that claim a chunk.
        self.ticket.0.store((chunks as u64) << 32, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            let _sleep = self.sleep_lock.lock().unwrap_or_else(PoisonError::into_inner);
            self.wake.notify_all();
        }
        while self.run_next_chunk() {}
        let mut spins = 0u32;
        while self.done.0.load(Ordering::Acquire) < chunks {
            spins += 1;
            if spins.is_multiple_of(SPINS_PER_CHECK) {
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
        let panicked = self.panicked.swap(false, Ordering::Relaxed);
        drop(region);
        assert!(!panicked, "a chunk of a parallel region panicked");
    }

    /// Claims the next chunk and runs it. Returns false if all chunks are already claimed.
    fn run_next_chunk(&self) -> bool {
        let mut ticket = self.ticket.0.load(Ordering::Acquire);
        loop {
            let (chunks, next) = ((ticket >> 32) as usize, (ticket & u64::from(u32::MAX)) as usize);
            if next >= chunks {
                return false;
            }
            match self.ticket.0.compare_exchange_weak(ticket, ticket + 1, Ordering::AcqRel, Ordering::Acquire) {
                Err(now) => ticket = now,
                Ok(_) => {
                    // SAFETY: the exchange found `next` unclaimed, so the ticket's region has an unfinished chunk, this
                    // one: its `run` wrote `work` before (the exchange acquires that write) and waits for this chunk.
                    let work = unsafe { (*self.work.get()).map(|work| &*work) };
                    IN_REGION.set(true);
                    if let Some(work) = work
                        && let Err(payload) = catch_unwind(AssertUnwindSafe(|| work(next)))
                    {
                        // Dropping the payload may panic again. This thread must reach `done`, or the region never
                        // ends.
                        std::mem::forget(payload);
                        self.panicked.store(true, Ordering::Relaxed);
                    }
                    IN_REGION.set(false);
                    self.done.0.fetch_add(1, Ordering::Release);
                    return true;
                }
            }
        }
    }

    /// Whether the current region has no unclaimed chunk.
    fn is_idle(&self) -> bool {
        let ticket = self.ticket.0.load(Ordering::SeqCst);
        (ticket & u64::from(u32::MAX)) >= ticket >> 32
    }

    fn worker_loop(&self) {
        let mut idle_since: Option<Instant> = None;
        let mut spins = 0u32;
        loop {
            if self.run_next_chunk() {
                idle_since = None;
                continue;
            }
            spins = spins.wrapping_add(1);
            std::hint::spin_loop();
            if spins.is_multiple_of(SPINS_PER_CHECK)
                && idle_since.get_or_insert_with(Instant::now).elapsed() > SPIN_DURATION
            {
                // Counted as a sleeper before the last check for work: a region that is published after that check sees
                // the sleeper and wakes it.
                self.sleepers.fetch_add(1, Ordering::SeqCst);
                let mut guard = self.sleep_lock.lock().unwrap_or_else(PoisonError::into_inner);
                while self.is_idle() {
                    guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
                }
                drop(guard);
                self.sleepers.fetch_sub(1, Ordering::SeqCst);
                idle_since = None;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_chunk_runs_exactly_once() {
        std::thread::scope(|scope| {
            for caller in 0..3 {
                scope.spawn(move || {
                    for round in 0..if cfg!(miri) { 20 } else { 2000 } {
                        let chunks = (round * 7 + caller) % 40;
                        let counts: Vec<AtomicUsize> = (0..chunks).map(|_| AtomicUsize::new(0)).collect();
                        run(chunks, &|at| {
                            counts[at].fetch_add(at + 1, Ordering::Relaxed);
                        });
                        for (at, count) in counts.iter().enumerate() {
                            assert_eq!(count.load(Ordering::Relaxed), at + 1, "chunk {at} of {chunks}");
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn nested_region_runs_on_the_same_thread() {
        let count = AtomicUsize::new(0);
        run(5, &|_| {
            run(7, &|_| {
                count.fetch_add(1, Ordering::Relaxed);
            });
        });
        assert_eq!(count.into_inner(), 35);
    }

    #[test]
    fn chunks_do_not_overlap() {
        for length in [0usize, 1, 99, 100, 101] {
            let mut values = vec![0; length];
            for_each_chunk(&mut values, 10, |at, chunk| chunk.iter_mut().for_each(|v| *v += at + 1));
            assert!(values.iter().enumerate().all(|(i, v)| *v == i / 10 + 1), "{values:?}");
        }
    }

    struct PanicsOnDrop;

    impl Drop for PanicsOnDrop {
        fn drop(&mut self) {
            panic!("dropped");
        }
    }

    #[test]
    fn payload_that_panics_when_dropped_does_not_stop_the_pool() {
        let (done, finished) = std::sync::mpsc::sync_channel(1);
        std::thread::spawn(move || {
            let work = |at| {
                if at == 5 {
                    std::panic::panic_any(PanicsOnDrop)
                }
            };
            let panicked = catch_unwind(|| run(8, &work)).map_err(std::mem::forget).is_err();
            let sum = AtomicUsize::new(0);
            run(8, &|at| {
                sum.fetch_add(at, Ordering::Relaxed);
            });
            done.send((panicked, sum.into_inner()))
        });
        // With one thread there is no pool: the panic reaches the caller as it is.
        assert_eq!(finished.recv_timeout(Duration::from_secs(60)), Ok((true, 28)));
    }

    #[test]
    fn panic_propagates_and_the_pool_keeps_working() {
        let panicked = catch_unwind(|| run(8, &|at| assert_ne!(at, 5))).is_err();
        let sum = AtomicUsize::new(0);
        run(8, &|at| {
            sum.fetch_add(at, Ordering::Relaxed);
        });
        assert_eq!((panicked, sum.into_inner()), (true, 28));
    }
}
