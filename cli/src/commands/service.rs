//! `cfq service install` and `cfq service uninstall`: a systemd unit that starts `cfq up` or `cfq join` with the machine.
//! Format of the unit: systemd.unit(5), systemd.service(5), systemd.syntax(7).

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;
use cfq_deploy::{Paths, files};
use schemars::JsonSchema;
use serde::Serialize;

use crate::args::{ServiceCommand, ServiceInstallArgs};
use crate::config::Config;
use crate::exit::{self, Code};
use crate::local_server;
use crate::membership::Membership;
use crate::output::Output;

const UNIT: &str = "cfq.service";
/// Time for an orderly stop, in seconds: longer than `cfq down` waits.
const STOP_SECONDS: u32 = 90;
/// Variables that the unit gets from this shell. The checks of projects run programs that only the user's PATH names; libgit2
/// reads HOME and SUDO_UID.
const VARIABLES: [&str; 15] = [
    "PATH",
    "HOME",
    "SUDO_UID",
    "CFQ_SERVICES",
    "HF_HOME",
    "HF_ENDPOINT",
    "HTTP_PROXY",
    "HTTPS_PROXY",
    "NO_PROXY",
    "http_proxy",
    "https_proxy",
    "no_proxy",
    "LD_LIBRARY_PATH",
    "CUDA_VISIBLE_DEVICES",
    "CFQ_LOG",
];
/// Further ones, whose values are paths.
const PATH_VARIABLES: [&str; 6] =
    ["CFQ_CACHE", "CFQ_CONFIG", "CFQ_POSTGRES_BIN", "CFQ_NATS_BIN", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"];

#[derive(Serialize, JsonSchema)]
pub struct Installed {
    unit: PathBuf,
    /// The command that the unit runs.
    command: String,
}

pub fn run(
    out: Output,
    paths: &Paths,
    config: &Config,
    command: ServiceCommand,
    file: Option<&Path>,
) -> anyhow::Result<Code> {
    let manager = Manager::of_this_user(paths)?;
    match command {
        ServiceCommand::Install(args) => install(out, paths, &manager, config, &args, file),
        ServiceCommand::Uninstall => uninstall(out, &manager),
        ServiceCommand::Status => status(out, &manager),
    }
}

/// systemd of the machine, or of the user.
struct Manager {
    is_system: bool,
    /// Folder of units that an administrator or the user writes.
    folder: PathBuf,
}

impl Manager {
    fn of_this_user(paths: &Paths) -> anyhow::Result<Self> {
        if rustix::process::geteuid().is_root() {
            return Ok(Self { is_system: true, folder: PathBuf::from("/etc/systemd/system") });
        }
        let base = match std::env::var_os("XDG_CONFIG_HOME").filter(|folder| Path::new(folder).is_absolute()) {
            Some(folder) => PathBuf::from(folder),
            None => std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".config")).with_context(|| {
                format!("HOME is not set, so the units of this user are unknown (data in {})", paths.data.display())
            })?,
        };
        Ok(Self { is_system: false, folder: base.join("systemd/user") })
    }

    fn unit(&self) -> PathBuf {
        self.folder.join(UNIT)
    }

    /// The word that `systemctl` prints for the unit, such as `active`; `None` if systemd does not answer.
    fn ask(&self, question: &str) -> Option<String> {
        let mut command = Command::new("systemctl");
        if !self.is_system {
            command.arg("--user");
        }
        // The exit code says the same as the word.
        let output = command.args([question, UNIT]).output().ok()?;
        let word = String::from_utf8_lossy(&output.stdout).trim().to_owned();
        Some(word).filter(|word| !word.is_empty())
    }

    /// Runs `systemctl` with these arguments.
    fn control(&self, args: &[&str]) -> anyhow::Result<()> {
        let mut command = Command::new("systemctl");
        if !self.is_system {
            command.arg("--user");
        }
        let output = command.args(args).output().map_err(|error| {
            exit::failed(format!(
                "cannot run systemctl ({error}), so {} is not started: without systemd, let your service manager run the \
                 command that `cfq service install --print` prints",
                self.unit().display()
            ))
        })?;
        if output.status.success() {
            return Ok(());
        }
        let reason = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        Err(exit::failed(format!(
            "`systemctl {}` failed: {reason}; the unit is {}",
            args.join(" "),
            self.unit().display()
        )))
    }
}

/// The unit that `--print` prints.
#[derive(Serialize, JsonSchema)]
pub struct UnitText {
    unit: PathBuf,
    text: String,
}

#[derive(Serialize, JsonSchema)]
pub struct RemovedUnit {
    unit: PathBuf,
}

/// The state of the unit.
#[derive(Serialize, JsonSchema)]
pub struct UnitStatus {
    unit: PathBuf,
    installed: bool,
    /// Whether it starts with the machine, in the word of systemd.
    enabled: Option<String>,
    /// Whether it runs, in the word of systemd.
    active: Option<String>,
}

/// Exits with 0 if the unit runs, else with 4.
fn status(out: Output, manager: &Manager) -> anyhow::Result<Code> {
    let unit = manager.unit();
    let installed = unit.exists();
    let ask = |question| if installed { manager.ask(question) } else { None };
    let status = UnitStatus { installed, enabled: ask("is-enabled"), active: ask("is-active"), unit };
    let is_active = status.active.as_deref() == Some("active");
    out.print(&status, |status| {
        let unit = status.unit.display();
        if !status.installed {
            return format!("not installed ({unit} does not exist); `cfq service install` installs it");
        }
        match (&status.active, &status.enabled) {
            (Some(active), enabled) => format!(
                "{unit} is {active}, {}",
                match enabled.as_deref() {
                    Some("enabled") => "and starts with the machine".to_owned(),
                    Some(word) => format!("and does not start with the machine ({word}): `cfq service install`"),
                    None => "and systemd does not say whether it starts with the machine".to_owned(),
                }
            ),
            (None, _) => format!("{unit} exists, but systemd does not answer here: `cfq status` asks cfq itself"),
        }
    })?;
    Ok(if is_active { Code::Done } else { Code::Failed })
}

fn install(
    out: Output,
    paths: &Paths,
    manager: &Manager,
    config: &Config,
    args: &ServiceInstallArgs,
    file: Option<&Path>,
) -> anyhow::Result<Code> {
    let joined = Membership::load(&paths.data)?.filter(|_| !args.lan);
    let (what, words): (String, Vec<&str>) = match &joined {
        Some(joined) => (format!("cfq node of {}", joined.url), vec!["join"]),
        None if args.lan => ("cfq server".to_owned(), vec!["up", "--lan"]),
        None => ("cfq server".to_owned(), vec!["up"]),
    };
    let program = std::env::current_exe().context("cannot determine the path of the cfq binary")?;
    let mut command = vec![program.display().to_string(), "--data".to_owned(), paths.data.display().to_string()];
    if let Some(file) = file {
        command.extend(["--config".to_owned(), std::path::absolute(file)?.display().to_string()]);
    }
    command.extend(words.iter().map(|word| (*word).to_owned()));
    let value = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let mut variables: Vec<(String, String)> =
        VARIABLES.iter().filter_map(|name| Some(((*name).to_owned(), value(name)?))).collect();
    for name in PATH_VARIABLES {
        if let Some(path) = value(name) {
            variables.push((name.to_owned(), std::path::absolute(path)?.display().to_string()));
        }
    }
    let text = render(&what, &command, &variables, manager.is_system);
    let installed = Installed { unit: manager.unit(), command: command.join(" ") };
    if args.print {
        let printed = UnitText { unit: installed.unit, text };
        out.print(&printed, |printed| printed.text.trim_end().to_owned())?;
        return Ok(Code::Done);
    }
    for name in config.named_secrets() {
        out.status(&format!(
            "the unit does not contain the secret {name}, which the configuration names as env:{name}: use file:PATH there, or \
             add it with `systemctl edit`"
        ));
    }
    local_server::check_data_folder_is_free(paths)?;
    std::fs::create_dir_all(&manager.folder)
        .with_context(|| format!("cannot create the folder {}", manager.folder.display()))?;
    files::write_private(&manager.unit(), text.as_bytes(), None)?;
    manager.control(&["daemon-reload"])?;
    manager.control(&["enable", "--now", UNIT])?;
    out.print(&installed, |installed| {
        format!("{} runs `{}` now and at each start of the machine", installed.unit.display(), installed.command)
    })?;
    if !manager.is_system {
        out.status(
            "it starts when you log in; to start it with the machine: loginctl enable-linger\nits output: journalctl --user \
             -u cfq      undo: cfq service uninstall",
        );
    } else {
        out.status("its output: journalctl -u cfq      undo: cfq service uninstall");
    }
    Ok(Code::Done)
}

fn uninstall(out: Output, manager: &Manager) -> anyhow::Result<Code> {
    let unit = manager.unit();
    if !unit.exists() {
        return Err(exit::usage(format!("there is no {}: `cfq service install` creates it", unit.display())));
    }
    manager.control(&["disable", "--now", UNIT])?;
    std::fs::remove_file(&unit).with_context(|| format!("cannot remove {}", unit.display()))?;
    manager.control(&["daemon-reload"])?;
    out.print(&RemovedUnit { unit }, |removed| {
        format!("cfq is stopped, and {} is removed; data and models are kept", removed.unit.display())
    })?;
    Ok(Code::Done)
}

fn render(what: &str, command: &[String], variables: &[(String, String)], is_system: bool) -> String {
    // `$` begins a variable in a command, but not in `Environment`.
    let command: Vec<String> = command.iter().map(|word| quoted(word).replace('$', "$$")).collect();
    let environment: String =
        variables.iter().map(|(name, value)| format!("Environment={}\n", quoted(&format!("{name}={value}")))).collect();
    let target = if is_system { "multi-user.target" } else { "default.target" };
    // Wrong usage (2) does not become right by a restart, and a stop before cfq is ready (130) is no failure. The processes
    // that cfq starts are stopped by it, in order.
    format!(
        "[Unit]\nDescription={}\nWants=network-online.target\nAfter=network-online.target\n\n[Service]\nType=exec\n\
         ExecStart={}\n{environment}Restart=on-failure\nRestartSec=5\nRestartPreventExitStatus=2\nSuccessExitStatus=130\nKillMode=mixed\n\
         TimeoutStopSec={STOP_SECONDS}\n\n[Install]\nWantedBy={target}\n",
        what.replace('%', "%%"),
        command.join(" "),
    )
}

/// Quotes a word for systemd, which replaces `%` and reads C escapes.
fn quoted(word: &str) -> String {
    let mut text = String::from("\"");
    for character in word.chars() {
        match character {
            '"' | '\\' => text.extend(['\\', character]),
            '%' => text.push_str("%%"),
            '\n' => text.push_str("\\n"),
            other => text.push(other),
        }
    }
    text.push('"');
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unit_starts_the_command_with_its_environment() {
        let command = ["/opt/c f/cfq", "--data", "/d/100%$a", "up", "--lan"].map(str::to_owned);
        let variables = [("PATH".to_owned(), "/home/$me/.cargo/bin:/usr/bin".to_owned())];
        let text = render("cfq server", &command, &variables, false);
        for line in [
            "ExecStart=\"/opt/c f/cfq\" \"--data\" \"/d/100%%$$a\" \"up\" \"--lan\"",
            "Environment=\"PATH=/home/$me/.cargo/bin:/usr/bin\"",
            "RestartPreventExitStatus=2",
            "KillMode=mixed",
            "WantedBy=default.target",
        ] {
            assert!(text.lines().any(|other| other == line), "{line}\n{text}");
        }
        assert!(render("cfq server", &command, &[], true).contains("WantedBy=multi-user.target"));
    }
}
