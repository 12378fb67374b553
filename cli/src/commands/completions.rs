//! `cfq completions SHELL`: a script that asks this program for the completions, so that they know the tasks, nodes and
//! models of the server.

mod candidates;

use clap::{Command, CommandFactory};
use clap_complete::env::Shells;
use clap_complete::{ArgValueCandidates, CompleteEnv, Shell};

use crate::args::Cli;
use crate::exit::{self, Code};
use crate::output;

/// Variable with which the script asks for completions: the name of the shell.
const VARIABLE: &str = "CFQ_COMPLETE";

pub fn run(shell: Shell) -> anyhow::Result<Code> {
    let name = shell.to_string();
    let shells = Shells::builtins();
    let completer =
        shells.completer(&name).ok_or_else(|| exit::failed(format!("there are no completions for {name}")))?;
    let program = std::env::current_exe()?;
    let mut script = Vec::new();
    completer.write_registration(VARIABLE, "cfq", "cfq", &program.to_string_lossy(), &mut script)?;
    let mut script = String::from_utf8(script)?;
    if shell == Shell::Bash {
        // Else bash would complete only the part of a model id after its `:`.
        script.push_str("COMP_WORDBREAKS=${COMP_WORDBREAKS//:}\n");
    }
    output::print_raw(&script);
    Ok(Code::Done)
}

/// Prints completions if the script of a shell asks for them, and ends the process. Must be called before any thread is
/// started.
pub fn answer_shell() {
    CompleteEnv::with_factory(|| with_candidates(Cli::command())).var(VARIABLE).complete();
}

/// The command with candidates for the values of its arguments.
fn with_candidates(command: Command) -> Command {
    let name = command.get_name().to_owned();
    let names: Vec<String> = command.get_subcommands().map(|command| command.get_name().to_owned()).collect();
    let command = names.into_iter().fold(command, |command, name| command.mut_subcommand(name, with_candidates));
    let ids: Vec<String> = command.get_arguments().map(|arg| arg.get_id().to_string()).collect();
    ids.into_iter().fold(command, |command, id| {
        command.mut_arg(id, |arg| {
            let value = arg.get_value_names().and_then(<[_]>::first).map(|value| value.to_string());
            let id = arg.get_id().to_string();
            // Values that clap knows are proposed by clap.
            if !arg.get_possible_values().is_empty() {
                return arg;
            }
            match candidates::of(&name, &id, value.as_deref().unwrap_or_default()) {
                Some(candidates) => arg.add(ArgValueCandidates::new(candidates)),
                None => arg,
            }
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_have_candidates() {
        let command = with_candidates(Cli::command());
        let has = |path: &[&str], id: &str| {
            let command = path.iter().fold(&command, |command, name| command.find_subcommand(name).unwrap());
            let arg = command.get_arguments().find(|arg| arg.get_id() == id).unwrap();
            arg.get::<ArgValueCandidates>().is_some()
        };
        for (path, id) in [
            (&["show"][..], "tasks"),
            (&["diff"], "task"),
            (&["cancel"], "tasks"),
            (&["ls"], "state"),
            (&["jobs"], "state"),
            (&["jobs"], "node"),
            (&["pr", "ls"], "state"),
            (&["submit"], "alpha"),
            (&["submit"], "after"),
            (&["agents", "set"], "model"),
            (&["models", "load"], "node"),
            (&["machines", "drain"], "name"),
            (&["logs"], "process"),
            (&["ls"], "label"),
            (&["wait"], "label"),
            (&["schedule", "run"], "name"),
            (&["schema"], "name"),
            (&["nodes"], "nodes"),
        ] {
            assert!(has(path, id), "{path:?} {id}");
        }
        // Their values are those of clap.
        for (path, id) in
            [(&["nodes"][..], "state"), (&["nodes"], "sort"), (&["models", "ls"], "state"), (&["submit"], "text")]
        {
            assert!(!has(path, id), "{path:?} {id}");
        }
    }
}
