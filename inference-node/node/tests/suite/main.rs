//! Tests of the node with a scripted scheduler, and of the proxy engine (models behind endpoints) with scripted model
//! servers.

#[cfg(test)]
mod node;
#[cfg(test)]
mod ollama;
#[cfg(test)]
mod proxy;
#[cfg(test)]
mod reports;
#[cfg(test)]
#[path = "../../../engine/tests/suite/smollm.rs"]
mod smollm;
