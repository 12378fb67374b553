//! An allocator that counts the bytes allocated by the calling thread, for tests of how much memory is allocated to
//! read a damaged file.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

struct Counting;

thread_local! {
    // The counters have no destructor, so that the allocator may use them until the thread has ended.
    static LIVE: Cell<i64> = const { Cell::new(0) };
    static PEAK: Cell<i64> = const { Cell::new(0) };
}

fn count(bytes: i64) {
    let live = LIVE.get() + bytes;
    LIVE.set(live);
    PEAK.set(PEAK.get().max(live));
}

// SAFETY: every call is passed to the system's allocator unchanged; the counters allocate nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: the caller's guarantees are those that the system allocator requires.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        count(-(layout.size() as i64));
        // SAFETY: as above.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Returns the peak of the bytes that `work` allocated on this thread, and the result of `work`.
pub fn peak<T>(work: impl FnOnce() -> T) -> (u64, T) {
    let before = LIVE.get();
    PEAK.set(before);
    let result = work();
    ((PEAK.get() - before).max(0) as u64, result)
}

/// Returns the bytes that `work` left allocated on this thread, and the result of `work`.
pub fn kept<T>(work: impl FnOnce() -> T) -> (u64, T) {
    let before = LIVE.get();
    let result = work();
    ((LIVE.get() - before).max(0) as u64, result)
}

#[test]
fn freed_memory_counts_in_the_peak() {
    let (bytes, kept) = peak(|| {
        drop(vec![0u8; 3 << 20]);
        vec![0u8; 1 << 20]
    });
    assert!((3 << 20..4 << 20).contains(&bytes), "{bytes}");
    drop(kept);
}
