//! The engine's thread pool with its tests, for Miri and ThreadSanitizer. The rest of the engine calls the processor's
//! vector instructions and candle, which they cannot run in reasonable time.

#[path = "../../engine/src/backend/cpu/thread_pool.rs"]
pub mod thread_pool;
