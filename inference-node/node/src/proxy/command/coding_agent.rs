//! The coding agents whose command lines are known.

use serde::{Deserialize, Serialize};

/// A coding agent whose command line is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum CodingAgent {
    /// Claude Code of Anthropic (<https://code.claude.com/docs/en/cli-reference>).
    Claude,
    /// Codex of OpenAI (<https://developers.openai.com/codex/noninteractive>).
    Codex,
    /// Gemini CLI of Google (<https://geminicli.com/docs/cli/headless>).
    Gemini,
}

impl CodingAgent {
    const ALL: [Self; 3] = [Self::Claude, Self::Codex, Self::Gemini];

    /// Name of the program and of the command.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Claude => "claude",
            Self::Codex => "codex",
            Self::Gemini => "gemini",
        }
    }

    pub(super) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|agent| agent.name() == name)
    }

    pub(super) fn output(self) -> StdoutFormat {
        match self {
            Self::Claude => StdoutFormat::Claude,
            Self::Codex => StdoutFormat::Codex,
            Self::Gemini => StdoutFormat::Gemini,
        }
    }

    /// Context length of its models, in tokens. Agents do not report it. Some models have a longer context.
    pub(super) fn context_tokens(self) -> u32 {
        match self {
            Self::Claude | Self::Codex => 200_000,
            Self::Gemini => 1_000_000,
        }
    }

    /// What installs it.
    pub(super) fn installation(self) -> &'static str {
        match self {
            Self::Claude => "npm install -g @anthropic-ai/claude-code",
            Self::Codex => "npm install -g @openai/codex",
            Self::Gemini => "npm install -g @google/gemini-cli",
        }
    }

    /// Environment variables that it reads: keys, addresses and folders.
    pub(super) fn variables(self) -> &'static [&'static str] {
        match self {
            Self::Claude => &[
                "ANTHROPIC_API_KEY",
                "ANTHROPIC_AUTH_TOKEN",
                "ANTHROPIC_BASE_URL",
                "CLAUDE_CODE_OAUTH_TOKEN",
                "CLAUDE_CONFIG_DIR",
            ],
            Self::Codex => &["CODEX_API_KEY", "CODEX_HOME", "OPENAI_API_KEY", "OPENAI_BASE_URL"],
            Self::Gemini => &[
                "GEMINI_API_KEY",
                "GEMINI_CLI_HOME",
                "GOOGLE_API_KEY",
                "GOOGLE_APPLICATION_CREDENTIALS",
                "GOOGLE_CLOUD_LOCATION",
                "GOOGLE_CLOUD_PROJECT",
                "GOOGLE_GEMINI_BASE_URL",
                "GOOGLE_GENAI_USE_GCA",
                "GOOGLE_GENAI_USE_VERTEXAI",
            ],
        }
    }
}

/// Names of the coding agents whose command lines are known.
pub fn coding_agents() -> impl Iterator<Item = String> {
    CodingAgent::ALL.into_iter().map(|agent| agent.name().to_owned())
}

/// What a program writes to its standard output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StdoutFormat {
    /// The text of the reply.
    Text,
    /// Events of Claude Code (`--output-format stream-json`).
    Claude,
    /// Events of Codex (`codex exec --json`).
    Codex,
    /// One JSON object of Gemini CLI (`--output-format json`).
    Gemini,
}
