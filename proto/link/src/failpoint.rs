//! Failpoints: named places, before and after each durable step, at which a fault test aborts the process, makes a
//! thread panic or delays an async task.
//!
//! `CFQ_FAILPOINT=name` arms the failpoint for the first time that it is reached, and `CFQ_FAILPOINT=name:n` for the
//! n-th time. `CFQ_FAILPOINT_ONCE=file` limits the failpoint to one abort or panic across restarts: the file is created
//! before the abort or panic, and an existing file disarms the failpoint. `CFQ_FAILPOINT_DELAY=name:ms` delays each pass
//! of that failpoint by this number of milliseconds.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

struct Armed {
    name: String,
    /// Number of the hit that aborts or panics, from 1.
    at: u64,
    once: Option<PathBuf>,
    hits: AtomicU64,
}

fn armed() -> Option<&'static Armed> {
    static ARMED: OnceLock<Option<Armed>> = OnceLock::new();
    ARMED
        .get_or_init(|| {
            let text = std::env::var("CFQ_FAILPOINT").ok()?;
            let (name, at) = match text.rsplit_once(':') {
                Some((name, n)) => (name.to_owned(), n.parse().unwrap_or(1)),
                None => (text, 1),
            };
            let once = std::env::var_os("CFQ_FAILPOINT_ONCE").map(PathBuf::from);
            Some(Armed { name, at, once, hits: AtomicU64::new(0) })
        })
        .as_ref()
}

/// Aborts the process if this failpoint is armed; costs nothing otherwise.
pub fn hit(name: &str) {
    if reached(name) {
        tracing::error!(failpoint = name, "aborting at an armed failpoint");
        std::process::abort();
    }
}

/// Panics if this failpoint is armed.
pub fn panics(name: &str) {
    assert!(!reached(name), "a panic at the armed failpoint {name}");
}

/// Waits here if a delay is set for this failpoint.
pub async fn delays(name: &str) {
    static DELAY: OnceLock<Option<(String, Duration)>> = OnceLock::new();
    let delay = DELAY.get_or_init(|| {
        let text = std::env::var("CFQ_FAILPOINT_DELAY").ok()?;
        let (name, ms) = text.rsplit_once(':')?;
        Some((name.to_owned(), Duration::from_millis(ms.parse().ok()?)))
    });
    if let Some((_, delay)) = delay.as_ref().filter(|(delayed, _)| delayed == name) {
        tokio::time::sleep(*delay).await;
    }
}

fn reached(name: &str) -> bool {
    let Some(armed) = armed() else { return false };
    if armed.name != name || armed.hits.fetch_add(1, Ordering::SeqCst) + 1 != armed.at {
        return false;
    }
    let marker = |marker| std::fs::OpenOptions::new().write(true).create_new(true).open(marker);
    armed.once.as_ref().is_none_or(|once| marker(once).is_ok())
}
