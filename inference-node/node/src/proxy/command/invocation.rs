//! Arguments and environment of one run of a program.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};

use super::client::CommandClient;
use super::coding_agent::CodingAgent;
use super::config::{MODEL, SYSTEM_FILE};
use super::environment;
use super::folder::RunFolder;
use super::input::ProgramInput;

/// Policy that denies all tools of Gemini CLI (<https://geminicli.com/docs/reference/policy-engine>).
const GEMINI_POLICY: &str = "[[rule]]\ntoolName = \"*\"\ndecision = \"deny\"\npriority = 999\n";
/// Features of Codex that give the model tools or read files of the user. An unknown name is ignored.
const CODEX_FEATURES: [&str; 9] = [
    "unified_exec",
    "view_image",
    "goals",
    "apps",
    "multi_agent",
    "plugins",
    "hooks",
    "skill_search",
    "image_generation",
];
/// Variable with the address of OpenAI's API. Codex itself reads it only from its configuration.
const CODEX_BASE_URL: &str = "OPENAI_BASE_URL";
/// Number of times that Claude Code repeats a request: cfq repeats calls itself, also on other machines.
const CLAUDE_RETRIES: &str = "2";

/// A run of a program.
pub(super) struct Invocation {
    pub(super) program: PathBuf,
    pub(super) args: Vec<String>,
    pub(super) environment: Vec<(OsString, OsString)>,
    /// Text for the standard input.
    pub(super) input: String,
    /// Private folder of the run.
    pub(super) folder: RunFolder,
}

impl Invocation {
    /// Prepares a run of the program at `program` for this input. Writes files to the folder of the run.
    pub(super) fn prepare(
        client: &CommandClient,
        program: PathBuf,
        model: Option<&str>,
        input: ProgramInput,
    ) -> io::Result<Self> {
        let folder = client.folders.create()?;
        let system_file = folder.path.join("system.md");
        std::fs::write(&system_file, &input.system)?;
        let system_file = system_file.display().to_string();
        let names: Vec<String> = client.config.environment_names(&client.name).map(str::to_owned).collect();
        let mut environment = environment::of_program(std::env::vars_os(), &names, &folder.home());
        environment.push(("TMPDIR".into(), folder.temporary().into()));
        let mut set = |name: &str, value: &str| environment.push((name.into(), value.into()));
        let (args, input) = match client.config.agent(&client.name) {
            Some(CodingAgent::Claude) => {
                set("CLAUDE_CODE_MAX_RETRIES", CLAUDE_RETRIES);
                set("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1");
                // Otherwise it reads the files that the prompt names as @PATH, and sends them to the provider.
                set("CLAUDE_CODE_DISABLE_ATTACHMENTS", "1");
                // Otherwise it repeats an interrupted reply without events.
                set("CLAUDE_CODE_DISABLE_NONSTREAMING_FALLBACK", "1");
                // A prompt that begins with a slash would be a command.
                (claude_args(model, &system_file), format!("\n{}", input.prompt))
            }
            Some(CodingAgent::Codex) => {
                let base_url = std::env::var(CODEX_BASE_URL).ok().filter(|url| !url.is_empty());
                (codex_args(model, &system_file, base_url.as_deref()), input.prompt)
            }
            Some(CodingAgent::Gemini) => {
                let policy = folder.path.join("policy.toml");
                std::fs::write(&policy, GEMINI_POLICY)?;
                set("GEMINI_SYSTEM_MD", &system_file);
                // Otherwise it starts itself again as a process that a killed node leaves behind.
                set("GEMINI_CLI_NO_RELAUNCH", "true");
                (gemini_args(model, &policy), input.prompt)
            }
            None => {
                let args = client.config.args.clone().unwrap_or_default();
                let has_system = args.iter().any(|arg| arg.contains(SYSTEM_FILE));
                let input = if has_system { input.prompt } else { input.joined() };
                let replaced =
                    |arg: &String| arg.replace(MODEL, model.unwrap_or_default()).replace(SYSTEM_FILE, &system_file);
                (args.iter().map(replaced).collect(), input)
            }
        };
        Ok(Self { program, args, environment, input, folder })
    }
}

fn strings<const N: usize>(args: [&str; N]) -> Vec<String> {
    args.map(str::to_owned).to_vec()
}

/// Print mode without tools, MCP servers, settings, skills and stored sessions.
fn claude_args(model: Option<&str>, system_file: &str) -> Vec<String> {
    let mut args = strings(["-p", "--output-format", "stream-json", "--include-partial-messages", "--verbose"]);
    args.extend(strings(["--tools", "", "--strict-mcp-config", "--setting-sources", "", "--disable-slash-commands"]));
    args.extend(strings(["--no-session-persistence", "--system-prompt-file", system_file]));
    args.extend(model.into_iter().flat_map(|model| strings(["--model", model])));
    args
}

/// Without the shell and the other tools that can be disabled; the one that remains writes files, which the read-only
/// sandbox refuses. A version that cannot disable the shell refuses the arguments.
fn codex_args(model: Option<&str>, system_file: &str, base_url: Option<&str>) -> Vec<String> {
    let mut args = strings(["exec", "--json", "--ephemeral", "--skip-git-repo-check", "--sandbox", "read-only"]);
    args.extend(strings(["--ignore-user-config", "--ignore-rules", "--color", "never", "--disable", "shell_tool"]));
    args.extend(CODEX_FEATURES.iter().flat_map(|feature| ["-c".to_owned(), format!("features.{feature}=false")]));
    for setting in [
        "web_search=\"disabled\"",
        "project_doc_max_bytes=0",
        "skills.bundled.enabled=false",
        "skills.include_instructions=false",
        "include_environment_context=false",
        &format!("model_instructions_file={}", toml_string(system_file)),
    ] {
        args.extend(strings(["-c", setting]));
    }
    args.extend(
        base_url.into_iter().flat_map(|url| ["-c".to_owned(), format!("openai_base_url={}", toml_string(url))]),
    );
    args.extend(model.into_iter().flat_map(|model| strings(["-m", model])));
    args.push("-".to_owned());
    args
}

/// Headless mode without extensions, MCP servers and tools. Its reply is whole: in its stream of events, a reply that was
/// interrupted and repeated looks like one reply.
fn gemini_args(model: Option<&str>, policy: &Path) -> Vec<String> {
    let policy = policy.display().to_string();
    let mut args = strings(["--output-format", "json", "--skip-trust", "--extensions", "none"]);
    args.extend(strings(["--allowed-mcp-server-names", "none", "--admin-policy", &policy]));
    args.extend(model.into_iter().flat_map(|model| strings(["--model", model])));
    args
}

/// A basic string of TOML, whose escapes are those of JSON.
fn toml_string(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}
