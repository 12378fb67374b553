//! Configuration of the programs that answer prompts.

use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::coding_agent::{CodingAgent, StdoutFormat};
use super::environment;
use crate::proxy::endpoint::MIN_CONFIGURED_CONTEXT_TOKENS;

/// Stands for the program's name of the model in its arguments.
pub(super) const MODEL: &str = "{model}";
/// Stands for the path of a file with the system message in the arguments.
pub(super) const SYSTEM_FILE: &str = "{system_file}";
/// What users may take for the place of the prompt.
const PROMPT: &str = "{prompt}";
/// Default of `timeout_seconds`.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(600);
/// Maximum of `timeout_seconds`.
const MAX_TIMEOUT: Duration = Duration::from_secs(24 * 3600);
/// Assumed context length of a program that is not known, in tokens.
const ASSUMED_CONTEXT_TOKENS: u32 = 131_072;

/// Configuration of one program.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CommandConfig {
    /// Name or absolute path of the program. If unset, it is the name of the command.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub program: Option<PathBuf>,
    /// Arguments of the program, in which `{model}` and `{system_file}` are replaced. If unset, the arguments with which
    /// cfq starts `claude`, `codex` and `gemini`, and none for other programs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub args: Option<Vec<String>>,
    /// What the program writes. If unset, the events of `claude`, `codex` and `gemini` with the arguments of cfq, else
    /// text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub output: Option<StdoutFormat>,
    /// Names of environment variables that the program gets, besides those that every program gets.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub pass_env: Vec<String>,
    /// Maximum number of concurrent runs; 1 if unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_sequences: Option<u32>,
    /// Context length of its models, in tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context_tokens: Option<u32>,
    /// Maximum time of one run, in seconds; 600 if unset.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timeout_seconds: Option<u64>,
}

/// Why a command cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CommandError {
    /// There is no configuration of this name, and no known coding agent.
    #[error("command {name} is not configured: add [commands.{name}], or use claude, codex or gemini, which need none")]
    Unknown { name: String },
    /// The program is neither a name nor an absolute path.
    #[error(
        "[commands.{name}] program = {:?} is neither the name of a program nor an absolute path",
        program.display().to_string()
    )]
    Program { name: String, program: PathBuf },
    /// The arguments contain a place for the prompt.
    #[error(
        "[commands.{name}] args contain {PROMPT}, but a program reads the prompt from its standard input: remove it"
    )]
    PromptArgument { name: String },
    /// The program would not be told the model.
    #[error(
        "command:{name}/{model}: the args of [commands.{name}] do not contain {MODEL}, so the program would not know the \
         model: add it, or use command:{name}"
    )]
    ModelUnused { name: String, model: String },
    /// The arguments need a model.
    #[error(
        "command:{name} names no model, but the args of [commands.{name}] contain {MODEL}: use command:{name}/MODEL"
    )]
    ModelMissing { name: String },
    /// The name of an environment variable is invalid.
    #[error("[commands.{name}] pass_env: {variable:?} is not the name of an environment variable")]
    Variable { name: String, variable: String },
    /// No prompt fits a context of this length.
    #[error("[commands.{name}] context_tokens = {tokens} is too small: use at least {MIN_CONFIGURED_CONTEXT_TOKENS}")]
    Context { name: String, tokens: u32 },
    /// The maximum time is 0 or too long.
    #[error("[commands.{name}] timeout_seconds = {seconds} is not from 1 to {}", MAX_TIMEOUT.as_secs())]
    Timeout { name: String, seconds: u64 },
}

impl CommandConfig {
    /// The configuration of a known coding agent that has no table; `None` for other names.
    pub fn of_coding_agent(name: &str) -> Option<Self> {
        CodingAgent::named(name).map(|_| Self::default())
    }

    /// Whether cfq chooses the arguments of the command `name`, because it knows the agent.
    pub fn is_coding_agent(&self, name: &str) -> bool {
        self.agent(name).is_some()
    }

    /// The agent whose arguments cfq chooses.
    pub(super) fn agent(&self, name: &str) -> Option<CodingAgent> {
        CodingAgent::named(name).filter(|_| self.args.is_none())
    }

    pub(super) fn program(&self, name: &str) -> PathBuf {
        self.program.clone().unwrap_or_else(|| PathBuf::from(name))
    }

    pub(super) fn output(&self, name: &str) -> StdoutFormat {
        self.output.or_else(|| self.agent(name).map(CodingAgent::output)).unwrap_or(StdoutFormat::Text)
    }

    pub(super) fn sequences(&self) -> u32 {
        self.max_sequences.unwrap_or(1).max(1)
    }

    pub(super) fn context_tokens(&self, name: &str) -> u32 {
        let of_agent = || CodingAgent::named(name).map(CodingAgent::context_tokens);
        self.context_tokens.or_else(of_agent).unwrap_or(ASSUMED_CONTEXT_TOKENS)
    }

    pub(super) fn timeout(&self) -> Duration {
        self.timeout_seconds.map_or(DEFAULT_TIMEOUT, Duration::from_secs)
    }

    /// Names of the environment variables that the program of the command `name` gets and that may hold secrets.
    pub fn environment_names(&self, name: &str) -> impl Iterator<Item = &str> {
        let of_agent = CodingAgent::named(name).map_or(&[][..], CodingAgent::variables);
        of_agent.iter().copied().chain(self.pass_env.iter().map(String::as_str))
    }

    /// The next step for a user whose machine lacks the program of the command `name`.
    pub fn installation(&self, name: &str) -> String {
        match CodingAgent::named(name) {
            Some(agent) => {
                format!("install it ({}), or set program under [commands.{name}] to its path", agent.installation())
            }
            None => format!("install it, or set program under [commands.{name}] to its path"),
        }
    }

    /// Checks the configuration of the command `name`.
    ///
    /// # Errors
    /// [`CommandError`], without [`CommandError::Unknown`].
    pub fn check(&self, name: &str) -> Result<(), CommandError> {
        let name = || name.to_owned();
        if let Some(program) = self.program.as_ref().filter(|program| !is_program(program)) {
            return Err(CommandError::Program { name: name(), program: program.clone() });
        }
        if self.args.iter().flatten().any(|arg| arg.contains(PROMPT)) {
            return Err(CommandError::PromptArgument { name: name() });
        }
        if let Some(variable) = self.pass_env.iter().find(|variable| !environment::is_name(variable)) {
            return Err(CommandError::Variable { name: name(), variable: variable.clone() });
        }
        if let Some(tokens) = self.context_tokens.filter(|tokens| *tokens < MIN_CONFIGURED_CONTEXT_TOKENS) {
            return Err(CommandError::Context { name: name(), tokens });
        }
        match self.timeout_seconds.filter(|seconds| !(1..=MAX_TIMEOUT.as_secs()).contains(seconds)) {
            Some(seconds) => Err(CommandError::Timeout { name: name(), seconds }),
            None => Ok(()),
        }
    }

    /// Checks that the command `name` can run this model.
    ///
    /// # Errors
    /// [`CommandError::ModelUnused`] and [`CommandError::ModelMissing`].
    pub fn check_model(&self, name: &str, model: Option<&str>) -> Result<(), CommandError> {
        if self.agent(name).is_some() {
            return Ok(());
        }
        let names_model = self.args.iter().flatten().any(|arg| arg.contains(MODEL));
        match (model, names_model) {
            (Some(model), false) => Err(CommandError::ModelUnused { name: name.to_owned(), model: model.to_owned() }),
            (None, true) => Err(CommandError::ModelMissing { name: name.to_owned() }),
            (Some(_), true) | (None, false) => Ok(()),
        }
    }
}

/// Whether this is the name of a program in `PATH`, or an absolute path.
fn is_program(program: &Path) -> bool {
    let mut components = program.components();
    program.is_absolute() || matches!((components.next(), components.next()), (Some(Component::Normal(_)), None))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(toml: serde_json::Value) -> CommandConfig {
        serde_json::from_value(toml).unwrap()
    }

    #[test]
    fn mistakes_are_named() {
        for (wrong, words) in [
            (serde_json::json!({ "program": "./llm" }), "neither the name of a program"),
            (serde_json::json!({ "program": "" }), "neither the name of a program"),
            (serde_json::json!({ "args": ["-p", "{prompt}"] }), "standard input"),
            (serde_json::json!({ "pass_env": ["A=b"] }), "\"A=b\" is not the name"),
            (serde_json::json!({ "context_tokens": 10 }), "at least 1024"),
            (serde_json::json!({ "timeout_seconds": 0 }), "from 1 to 86400"),
        ] {
            let text = config(wrong).check("llm").unwrap_err().to_string();
            assert!(text.contains(words) && text.contains("[commands.llm]"), "{text}");
        }
        for good in [serde_json::json!({}), serde_json::json!({ "program": "/opt/llm", "args": ["-m", "{model}"] })] {
            config(good).check("llm").unwrap();
        }
    }

    #[test]
    fn model_reaches_the_program_or_is_an_error() {
        let with_model = config(serde_json::json!({ "args": ["--model={model}"] }));
        assert!(with_model.check_model("llm", Some("m")).is_ok());
        assert!(matches!(with_model.check_model("llm", None), Err(CommandError::ModelMissing { .. })));
        let without = CommandConfig::default();
        assert!(matches!(without.check_model("llm", Some("m")), Err(CommandError::ModelUnused { .. })));
        for model in [None, Some("sonnet")] {
            assert!(without.check_model("claude", model).is_ok());
        }
    }

    #[test]
    fn arguments_of_the_user_replace_those_of_a_coding_agent() {
        assert_eq!(CommandConfig::default().output("claude"), StdoutFormat::Claude);
        let own = config(serde_json::json!({ "args": ["-p"] }));
        assert_eq!((own.output("claude"), own.agent("claude")), (StdoutFormat::Text, None));
        let events = config(serde_json::json!({ "args": ["-p"], "output": "claude" }));
        assert_eq!(events.output("work"), StdoutFormat::Claude);
    }
}
