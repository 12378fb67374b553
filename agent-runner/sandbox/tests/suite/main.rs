//! Tests of sandboxes with real programs, at each level that this machine offers.
#![cfg(target_os = "linux")]

#[cfg(test)]
mod attempts;
#[cfg(test)]
mod ends;
#[cfg(test)]
mod escapes;
#[cfg(test)]
mod fixture;
#[cfg(test)]
mod limits;
#[cfg(test)]
mod mounts;
#[cfg(test)]
mod programs;
