//! Tests of the node with a scripted scheduler, and of the proxy engine (models behind servers and programs) with
//! scripted model servers and a script as the program.

#[cfg(test)]
mod commands;
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
