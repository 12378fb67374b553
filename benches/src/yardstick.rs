//! What the engine is measured beside.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, bail};

/// llama.cpp in a Python process of its own.
pub struct Yardstick {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    pub load: f64,
    /// What it was built with.
    pub system: String,
}

impl Yardstick {
    pub fn start(python: &str, file: &Path, threads: &str) -> anyhow::Result<Self> {
        let mut child = Command::new(python)
            .args(["-c", include_str!("llama_cpp.py")])
            .arg(file)
            .arg(threads)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {python}"))?;
        let stdin = child.stdin.take().context("no pipe")?;
        let stdout = BufReader::new(child.stdout.take().context("no pipe")?);
        let mut this = Self { child, stdin, stdout, load: 0.0, system: String::new() };
        let hello = this.line()?;
        let (load, system) = hello.split_once(' ').context("no figures from llama.cpp")?;
        (this.load, this.system) = (load.parse()?, system.to_owned());
        Ok(this)
    }

    fn line(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        self.stdout.read_line(&mut line)?;
        if line.is_empty() {
            bail!("llama.cpp ended; is llama-cpp-python installed there?");
        }
        Ok(line.trim().to_owned())
    }

    pub fn process(&self) -> u32 {
        self.child.id()
    }

    /// One figure; llama_cpp.py lists what can be asked.
    pub fn ask(&mut self, what: &str) -> anyhow::Result<f64> {
        writeln!(self.stdin, "{what}")?;
        Ok(self.line()?.parse()?)
    }
}

impl Drop for Yardstick {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
