//! llama.cpp, the baseline of the engine's benchmarks.

use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use anyhow::{Context, bail};

/// llama.cpp in a Python process (llama-cpp-python), killed on drop.
pub struct LlamaCpp {
    child: Child,
    stdin: ChildStdin,
    stdout: BufReader<ChildStdout>,
    /// Load time, in seconds.
    pub load_seconds: f64,
    /// llama.cpp's system information, which lists the instruction sets that the build uses.
    pub system: String,
}

impl LlamaCpp {
    /// Starts the process and loads the model file.
    pub fn start(python: &str, file: &Path, threads: &str) -> anyhow::Result<Self> {
        let mut child = Command::new(python)
            .args(["-c", include_str!("llama_cpp.py")])
            .arg(file)
            .arg(threads)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {python}"))?;
        let stdin = child.stdin.take().context("no pipe to llama.cpp")?;
        let stdout = BufReader::new(child.stdout.take().context("no pipe from llama.cpp")?);
        let mut this = Self { child, stdin, stdout, load_seconds: 0.0, system: String::new() };
        let first = this.line()?;
        let (load, system) = first.split_once(' ').context("llama.cpp sent no load time")?;
        (this.load_seconds, this.system) = (load.parse()?, system.to_owned());
        Ok(this)
    }

    fn line(&mut self) -> anyhow::Result<String> {
        let mut line = String::new();
        self.stdout.read_line(&mut line)?;
        if line.is_empty() {
            bail!("the llama.cpp process ended; is llama-cpp-python installed for the Python given by --llama-cpp?");
        }
        Ok(line.trim().to_owned())
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Runs one measurement of llama_cpp.py and returns its result.
    pub fn measure(&mut self, request: &str) -> anyhow::Result<f64> {
        writeln!(self.stdin, "{request}")?;
        Ok(self.line()?.parse()?)
    }
}

impl Drop for LlamaCpp {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
