//! WIP
pub mod engine;
pub mod gpu;
pub mod models;
