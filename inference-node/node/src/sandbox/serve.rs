//! The child's side: reads one model's file, then prepares prompts until the node closes the connection.

use std::io;
use std::path::Path;
use std::time::Duration;

use cfq_engine::{PROMPT_STACK_BYTES, PromptModel, TimeLimit};

use super::limits;
use super::messages::{self, FileFault, Order, Reply};
use crate::error_text::with_causes;

/// Stack for everything but the template, in bytes.
const OTHER_STACK_BYTES: usize = 8 << 20;

/// Runs the child: stdin and stdout are its connection to the node. Must be called before any thread is started and any
/// file is opened.
///
/// # Errors
/// If the connection breaks or the thread is not started.
pub fn serve() -> io::Result<()> {
    let Some(Order::Start { path, memory_bytes, prompt_ms }) = messages::read(&mut io::stdin().lock())? else {
        return Ok(());
    };
    let mut protection = limits::restrict(&path, memory_bytes)?;
    let thread = std::thread::Builder::new().stack_size(PROMPT_STACK_BYTES + OTHER_STACK_BYTES);
    let thread = thread.spawn(move || {
        protection.extend(limits::forbid_system_calls()?);
        serve_model(&path, Duration::from_millis(prompt_ms), protection)
    })?;
    thread.join().unwrap_or_else(|_| Err(io::Error::other("a panic")))
}

fn serve_model(path: &Path, prompt: Duration, protection: Vec<String>) -> io::Result<()> {
    let (mut input, mut output) = (io::stdin().lock(), io::stdout().lock());
    let model = match PromptModel::inspect(path) {
        Ok((model, facts)) => {
            messages::write(&mut output, &Reply::Started { facts, protection })?;
            model
        }
        Err(error) => {
            let reply = Reply::File { fault: FileFault::from(&error), detail: with_causes(&error) };
            return messages::write(&mut output, &reply);
        }
    };
    while let Some(order) = messages::read(&mut input)? {
        let Order::Tokenize(request) = order else { return Err(io::Error::other("a second start")) };
        let reply = match model.tokenize(&request, &TimeLimit::new(prompt)) {
            Ok(tokens) => Reply::Tokens(tokens),
            Err(failure) => Reply::Failed(failure),
        };
        messages::write(&mut output, &reply)?;
    }
    Ok(())
}
