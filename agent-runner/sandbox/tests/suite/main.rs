//! Tests of sandboxes with real programs, at each level that this machine offers.
#![cfg(target_os = "linux")]

mod attempts;
mod ends;
mod escapes;
mod fixture;
mod limits;
mod programs;
