//! Tests of the engine with a small real model and with tiny models of every family.

#[cfg(test)]
mod allocations;
#[cfg(test)]
mod control_tokens;
#[cfg(test)]
mod damaged_files;
#[cfg(test)]
mod families;
#[cfg(test)]
#[path = "../fixtures/models.rs"]
mod fixtures;
#[cfg(test)]
mod generation;
#[cfg(test)]
mod hostile_models;
#[cfg(test)]
mod kv_offload;
#[cfg(test)]
mod memory_estimate;
#[cfg(test)]
mod resume;
#[cfg(test)]
mod schemas;
#[cfg(test)]
mod smollm;
#[cfg(test)]
mod tokens;
