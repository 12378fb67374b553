//! Models behind a program that reads a prompt from its standard input and writes the reply to its standard output, such
//! as the command lines of coding agents (Claude Code, Codex, Gemini CLI).
//!
//! The program is used for text completion only: it runs in an empty folder, and the agents that cfq knows are started
//! without tools. A call is one run of the program, which ends with the call: its process group is ended if the call is
//! cancelled, and the process itself if the node is killed.

mod client;
mod coding_agent;
mod config;
mod environment;
mod folder;
mod input;
mod invocation;
mod output;
mod process;
mod run;

use std::sync::Arc;
use std::time::Instant;

use cfq_engine::Outbox;
use cfq_proto::job::{Completion, JobFailure, Prompt};
use cfq_proto::node::Residency;
use futures::FutureExt;
use futures::future::BoxFuture;

use super::backend::Backend;
use super::slots::RequestSlots;

pub use client::CommandClient;
pub use coding_agent::{StdoutFormat, coding_agents};
pub use config::{CommandConfig, CommandError};

/// One model of a program.
pub(super) struct CommandModel {
    pub(super) client: Arc<CommandClient>,
    /// The program's name for the model; `None` is its default.
    pub(super) name: Option<String>,
}

impl Backend for CommandModel {
    fn name(&self) -> &str {
        &self.client.name
    }

    fn slots(&self) -> &RequestSlots {
        &self.client.slots
    }

    fn context_tokens(&self) -> u32 {
        self.client.context_tokens
    }

    fn residency(&self) -> Residency {
        self.client.residency()
    }

    fn complete<'a>(
        &'a self,
        prompt: &'a Prompt,
        outbox: &'a Outbox,
        started: Instant,
    ) -> BoxFuture<'a, Result<Completion, JobFailure>> {
        run::complete(&self.client, self.name.as_deref(), prompt, outbox, started).boxed()
    }

    fn record_answer(&self) {}

    fn check(&self) -> BoxFuture<'_, ()> {
        self.client.check();
        std::future::ready(()).boxed()
    }
}
