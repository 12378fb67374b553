//! `cfq completions SHELL`

use clap::CommandFactory;

use crate::args::Cli;
use crate::exit::Code;
use crate::output;

pub fn run(shell: clap_complete::Shell) -> anyhow::Result<Code> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "cfq", &mut script);
    output::print_raw(&String::from_utf8(script)?);
    Ok(Code::Done)
}
