//! The commands (programs that answer prompts) of the configuration, and the environment variables that the node needs for
//! them and for its endpoints.

use std::collections::BTreeMap;

use cfq_inference_node::CommandConfig;
use cfq_inference_node::proxy::CommandError;
use cfq_proto::model::{ModelId, ModelSource};

use super::Config;

impl Config {
    /// Checks the tables of commands, and the models that name a command.
    pub(super) fn check_commands(&self) -> Result<(), String> {
        for (name, command) in &self.commands {
            command.check(name).map_err(|error| error.to_string())?;
        }
        for model in self.models() {
            if let ModelSource::Command { command: name, model } = model.source() {
                let command = self.command(&name).ok_or_else(|| CommandError::Unknown { name: name.clone() });
                command.and_then(|command| command.check_model(&name, model.as_deref())).map_err(|e| e.to_string())?;
            }
        }
        Ok(())
    }

    /// The command `name`: its table, or that of a known coding agent.
    fn command(&self, name: &str) -> Option<CommandConfig> {
        self.commands.get(name).cloned().or_else(|| CommandConfig::of_coding_agent(name))
    }

    /// The commands that have a table, and the coding agents that a model names.
    pub fn all_commands(&self) -> BTreeMap<String, CommandConfig> {
        let mut commands = self.commands.clone();
        for name in self.models().iter().filter_map(ModelId::command) {
            if let Some(command) = self.command(&name) {
                commands.insert(name, command);
            }
        }
        commands
    }

    /// Names of the environment variables that the configuration names as `env:NAME`.
    pub fn named_secrets(&self) -> Vec<&str> {
        let keys = self.endpoints.values().filter_map(|endpoint| endpoint.key.as_deref());
        keys.chain(self.hub.token.as_deref()).filter_map(|source| source.strip_prefix("env:")).collect()
    }

    /// Names of the environment variables with secrets that the node needs: those that the configuration names, and those
    /// that its commands get.
    pub fn secret_variables(&self) -> Vec<String> {
        let commands = self.all_commands();
        let of_commands = commands.iter().flat_map(|(name, command)| command.environment_names(name));
        self.named_secrets().into_iter().chain(of_commands).map(str::to_owned).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::parse;

    #[test]
    fn command_of_a_coding_agent_needs_no_table_and_others_do() {
        let agent = |model: &str, more: &str| parse(&format!("[agents.beta]\nmodel = \"{model}\"\n{more}"));
        let config = agent("command:claude/sonnet", "").unwrap();
        assert!(config.all_commands().contains_key("claude"));
        assert!(config.secret_variables().contains(&"ANTHROPIC_API_KEY".to_owned()));
        assert!(parse("").unwrap().secret_variables().is_empty());
        assert!(agent("command:llm", "[commands.llm]\npass_env = [\"LLM_KEY\"]").is_ok());
        for (model, table, words) in [
            ("command:cluade", "", "[commands.cluade]"),
            ("command:llm/m", "[commands.llm]", "do not contain {model}"),
            ("command:claude", "[commands.claude]\nprogram = \"./claude\"", "neither the name"),
            ("command:claude", "[commands.claude]\nargv = []", "argv"),
        ] {
            let error = format!("{:#}", agent(model, table).unwrap_err());
            assert!(error.contains(words) && error.contains("cfq.toml"), "{error}");
        }
    }
}
