//! `cfq mcp install`: adds cfq to the configuration of an MCP client.

use std::path::{Path, PathBuf};

use anyhow::Context;
use cfq_deploy::files::write_private;
use clap::ValueEnum;
use jsonc_parser::ParseOptions;
use jsonc_parser::cst::{CstInputValue, CstRootNode};
use schemars::JsonSchema;
use serde::Serialize;

use crate::exit;

/// A program that uses MCP servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum McpClient {
    ClaudeCode,
    Codex,
    /// GitHub Copilot in VS Code
    Copilot,
    Gemini,
    /// Google Antigravity
    Antigravity,
    Opencode,
    Cursor,
}

/// The result of an installation.
#[derive(Debug, Serialize, JsonSchema)]
pub struct Installed {
    /// File of the client's configuration.
    pub file: PathBuf,
    /// The text that configures cfq: what was added, or what is to be added.
    pub entry: String,
    /// True if the file was written.
    pub written: bool,
}

/// Command line that starts the MCP server.
struct Launch {
    program: String,
    args: Vec<String>,
}

/// Adds cfq to the client's configuration of this user. With `print`, changes nothing and returns the entry.
///
/// The entry names the data folder, because some clients start their servers without the user's environment.
pub fn install(client: McpClient, data: &Path, print: bool) -> anyhow::Result<Installed> {
    let program = std::env::current_exe().context("cannot find the program of this process")?;
    let args = vec!["--data".to_owned(), data.to_string_lossy().into_owned(), "mcp".to_owned()];
    let launch = Launch { program: program.to_string_lossy().into_owned(), args };
    let file = client.file()?;
    let entry = client.entry(&launch)?;
    if print {
        return Ok(Installed { file, entry, written: false });
    }
    // The configuration may be a link into a folder of settings that the user keeps under version control.
    let target = match file.canonicalize() {
        Ok(target) => target,
        Err(error) if file.is_symlink() => {
            return Err(exit::usage(format!(
                "{} is a link to a file that cannot be used ({error}): create that file, or remove the link",
                file.display()
            )));
        }
        Err(_) => file.clone(),
    };
    let old = match std::fs::read_to_string(&target) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(error) => return Err(exit::usage(format!("cannot read {}: {error}", target.display()))),
    };
    let new = client.with_entry(&old, &launch).map_err(|problem| {
        exit::usage(format!(
            "{} {problem}, so it was not changed: correct it, or add this yourself:\n{entry}",
            target.display()
        ))
    })?;
    let written = new != old;
    if written {
        write(&target, &new)?;
    }
    Ok(Installed { file, entry, written })
}

impl McpClient {
    /// The name that users read.
    pub fn title(self) -> &'static str {
        match self {
            Self::ClaudeCode => "Claude Code",
            Self::Codex => "Codex",
            Self::Copilot => "VS Code",
            Self::Gemini => "Gemini CLI",
            Self::Antigravity => "Antigravity",
            Self::Opencode => "opencode",
            Self::Cursor => "Cursor",
        }
    }

    /// The configuration file of this user.
    fn file(self) -> anyhow::Result<PathBuf> {
        let folder = |variable: &str| std::env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from);
        let Some(home) = folder("HOME") else {
            return Err(exit::usage("HOME is not set: set it to your home folder"));
        };
        let config = folder("XDG_CONFIG_HOME").unwrap_or_else(|| home.join(".config"));
        Ok(match self {
            Self::ClaudeCode => home.join(".claude.json"),
            Self::Codex => folder("CODEX_HOME").unwrap_or_else(|| home.join(".codex")).join("config.toml"),
            Self::Copilot if cfg!(target_os = "macos") => home.join("Library/Application Support/Code/User/mcp.json"),
            Self::Copilot => config.join("Code/User/mcp.json"),
            Self::Gemini => home.join(".gemini/settings.json"),
            Self::Antigravity => home.join(".gemini/antigravity/mcp_config.json"),
            Self::Opencode => config.join("opencode/opencode.json"),
            Self::Cursor => home.join(".cursor/mcp.json"),
        })
    }

    /// The key of the JSON file whose object holds the servers.
    fn servers_key(self) -> &'static str {
        match self {
            Self::ClaudeCode | Self::Gemini | Self::Antigravity | Self::Cursor => "mcpServers",
            Self::Copilot => "servers",
            Self::Opencode => "mcp",
            Self::Codex => "mcp_servers",
        }
    }

    /// The value that starts the server, in JSON.
    fn server(self, launch: &Launch) -> serde_json::Value {
        let (program, args) = (&launch.program, &launch.args);
        match self {
            Self::Opencode => {
                let command: Vec<&String> = std::iter::once(program).chain(args).collect();
                serde_json::json!({ "type": "local", "command": command, "enabled": true })
            }
            Self::ClaudeCode | Self::Copilot => {
                serde_json::json!({ "type": "stdio", "command": program, "args": args })
            }
            Self::Gemini | Self::Antigravity | Self::Cursor | Self::Codex => {
                serde_json::json!({ "command": program, "args": args })
            }
        }
    }

    /// The whole text that configures cfq, for a file that holds nothing else.
    fn entry(self, launch: &Launch) -> anyhow::Result<String> {
        if self == Self::Codex {
            return Ok(toml_table(launch)?);
        }
        let servers = serde_json::json!({ "cfq": self.server(launch) });
        Ok(serde_json::to_string_pretty(&serde_json::json!({ self.servers_key(): servers }))?)
    }

    /// The text of the configuration file with cfq in it. All other settings and comments stay as they are.
    fn with_entry(self, old: &str, launch: &Launch) -> Result<String, String> {
        match self {
            Self::Codex => with_toml_table(old, launch),
            _ => with_json_entry(old, self.servers_key(), &self.server(launch)),
        }
    }
}

fn with_json_entry(old: &str, key: &str, server: &serde_json::Value) -> Result<String, String> {
    let text = if old.trim().is_empty() { "{}\n" } else { old };
    let root =
        CstRootNode::parse(text, &ParseOptions::default()).map_err(|error| format!("is not valid JSON ({error})"))?;
    let not_object = |what: &str| format!("has a value that is not an object {what}");
    let settings = root.object_value_or_create().ok_or_else(|| not_object("at its top"))?;
    let servers = settings.object_value_or_create(key).ok_or_else(|| not_object(&format!("under {key:?}")))?;
    match servers.get("cfq") {
        Some(entry) if entry.value().and_then(|value| value.to_serde_value()).as_ref() == Some(server) => {
            return Ok(old.to_owned());
        }
        Some(entry) => entry.set_value(input(server)),
        None => drop(servers.append("cfq", input(server))),
    }
    Ok(root.to_string())
}

fn input(value: &serde_json::Value) -> CstInputValue {
    match value {
        serde_json::Value::Null => CstInputValue::Null,
        serde_json::Value::Bool(value) => CstInputValue::Bool(*value),
        serde_json::Value::Number(number) => CstInputValue::Number(number.to_string()),
        serde_json::Value::String(text) => CstInputValue::String(text.clone()),
        serde_json::Value::Array(items) => CstInputValue::Array(items.iter().map(input).collect()),
        serde_json::Value::Object(fields) => {
            CstInputValue::Object(fields.iter().map(|(key, value)| (key.clone(), input(value))).collect())
        }
    }
}

fn toml_table(launch: &Launch) -> Result<String, toml::ser::Error> {
    let mut server = toml::Table::new();
    server.insert("command".to_owned(), launch.program.clone().into());
    server.insert("args".to_owned(), launch.args.clone().into());
    let servers = toml::Table::from_iter([("cfq".to_owned(), server.into())]);
    toml::to_string(&toml::Table::from_iter([("mcp_servers".to_owned(), servers.into())]))
}

/// A table at the end of a TOML file changes nothing before it.
fn with_toml_table(old: &str, launch: &Launch) -> Result<String, String> {
    let settings: toml::Table = old.parse().map_err(|error| format!("is not valid TOML ({error})"))?;
    let table = toml_table(launch).map_err(|error| format!("cannot hold the path of cfq ({error})"))?;
    let wanted: toml::Table = table.parse().map_err(|error| format!("cannot hold the path of cfq ({error})"))?;
    let entry = |table: &toml::Table| Some(table.get("mcp_servers")?.get("cfq")?.clone());
    match entry(&settings) {
        Some(server) if Some(&server) == entry(&wanted).as_ref() => Ok(old.to_owned()),
        Some(_) => Err("has another [mcp_servers.cfq]".to_owned()),
        None if old.trim().is_empty() => Ok(table),
        None => {
            let new = format!("{}\n\n{table}", old.trim_end());
            // A `mcp_servers = {...}` in one line cannot be continued by a table.
            let parsed: Result<toml::Table, _> = new.parse();
            parsed.map(|_| new).map_err(|_| "has its mcp_servers in one line".to_owned())
        }
    }
}

/// Writes the file whole or not at all, with the permissions of the old one. Only its owner can read a new file,
/// because some clients store keys in it.
fn write(file: &Path, text: &str) -> anyhow::Result<()> {
    let folder = file.parent().context("the file has no folder")?;
    std::fs::create_dir_all(folder).with_context(|| format!("cannot create {}", folder.display()))?;
    let old = std::fs::metadata(file).ok();
    write_private(file, text.as_bytes(), None)?;
    match old {
        Some(old) => std::fs::set_permissions(file, old.permissions())
            .with_context(|| format!("cannot set the permissions of {}", file.display())),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn launch() -> Launch {
        Launch { program: "/opt/cfq \"x\"/cfq".to_owned(), args: vec!["mcp".to_owned()] }
    }

    const JSON_CLIENTS: [McpClient; 5] =
        [McpClient::ClaudeCode, McpClient::Copilot, McpClient::Gemini, McpClient::Opencode, McpClient::Cursor];

    #[test]
    fn entry_is_added_once_and_other_settings_and_comments_stay() {
        for client in JSON_CLIENTS {
            let key = client.servers_key();
            let old = format!(
                "{{\n  // mine\n  \"theme\": \"dark\",\n  \"{key}\": {{\n    \"other\": {{ \"a\": [1] }}, // kept\n  }},\n}}\n"
            );
            let new = client.with_entry(&old, &launch()).unwrap();
            for part in ["// mine", "\"theme\": \"dark\"", "\"other\": { \"a\": [1] }", "// kept"] {
                assert!(new.contains(part), "{new}");
            }
            assert!(new.contains(r#"/opt/cfq \"x\"/cfq"#), "{new}");
            assert_eq!(client.with_entry(&new, &launch()).unwrap(), new);
            let moved = Launch { program: "/new/cfq".to_owned(), ..launch() };
            let moved = client.with_entry(&new, &moved).unwrap();
            assert!(moved.contains("/new/cfq") && !moved.contains("/opt/cfq") && moved.contains("// kept"), "{moved}");
        }
    }

    #[test]
    fn new_file_holds_the_printed_entry() {
        for client in JSON_CLIENTS {
            let parse = |text: &str| serde_json::from_str::<serde_json::Value>(text).unwrap();
            let new = client.with_entry("", &launch()).unwrap();
            assert_eq!(parse(&new), parse(&client.entry(&launch()).unwrap()), "{new}");
        }
        let table = McpClient::Codex.entry(&launch()).unwrap();
        assert!(table.starts_with("[mcp_servers.cfq]\n"), "{table}");
        assert_eq!(McpClient::Codex.with_entry("", &launch()).unwrap(), table);
    }

    #[test]
    fn codex_file_keeps_its_comments_and_another_entry_is_refused() {
        let old = "# mine\nmodel = \"x\"\n\n[mcp_servers.other]\ncommand = \"y\"\n";
        let new = McpClient::Codex.with_entry(old, &launch()).unwrap();
        assert!(new.starts_with(old.trim_end()) && new.contains("[mcp_servers.cfq]"), "{new}");
        assert_eq!(McpClient::Codex.with_entry(&new, &launch()).unwrap(), new);
        let moved = Launch { program: "/new/cfq".to_owned(), ..launch() };
        assert_eq!(McpClient::Codex.with_entry(&new, &moved), Err("has another [mcp_servers.cfq]".to_owned()));
        let inline = McpClient::Codex.with_entry("mcp_servers = { other = { command = \"y\" } }\n", &launch());
        assert_eq!(inline, Err("has its mcp_servers in one line".to_owned()));
    }

    #[test]
    fn written_file_keeps_the_permissions_of_the_old_one() {
        use std::os::unix::fs::PermissionsExt;
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("settings.json");
        let mode = || std::fs::metadata(&file).unwrap().permissions().mode() & 0o777;
        write(&file, "new").unwrap();
        assert_eq!(mode(), 0o600);
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o664)).unwrap();
        write(&file, "again").unwrap();
        assert_eq!((mode(), std::fs::read_to_string(&file).unwrap()), (0o664, "again".to_owned()));
    }

    #[test]
    fn file_that_is_not_the_client_s_form_is_not_changed() {
        for (old, words) in [
            ("{ \"a\": ", "is not valid JSON"),
            ("[1]", "not an object at its top"),
            ("{ \"mcpServers\": 3 }", "not an object under \"mcpServers\""),
        ] {
            let error = McpClient::Cursor.with_entry(old, &launch()).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
        assert!(McpClient::Codex.with_entry("a = ", &launch()).unwrap_err().contains("is not valid TOML"));
    }
}
