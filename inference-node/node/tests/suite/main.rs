//! The engine on the real small model, and every part that faces something hostile or remote.

#[cfg(test)]
mod allocations;
#[cfg(test)]
mod families;
mod generation;
#[cfg(test)]
mod hostile;
#[cfg(test)]
mod memory;
#[cfg(test)]
mod node;
#[cfg(test)]
mod parked;
#[cfg(test)]
mod proxy;
#[cfg(test)]
mod resume;
#[cfg(test)]
mod schemas;
#[cfg(test)]
mod smollm;
#[cfg(test)]
mod tokens;
