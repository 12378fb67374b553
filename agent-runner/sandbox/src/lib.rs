//! Runs a program that is not trusted: tests of a repository, compilers, anything that a model wrote.
//!
//! The program reads only the folders that its command names and the system's programs and libraries, and writes only
//! below the folders that its command names. It has no network, no GPU, no other process in sight, an empty
//! environment, and limits of time, memory, processes, disk space and output. When it ends, or exceeds a limit, all
//! processes that it started end too.
//!
//! A *launcher* process stands between the caller and the program. It is a program that calls [`serve`] before it
//! starts a thread or opens a file; the binary `cfq-sandbox-launcher` does only this. The launcher reads the command
//! from its stdin, restricts itself, starts the program, enforces the limits and replies with the result. Two levels
//! exist ([`SandboxLevel`]); [`SandboxLauncher::probe`] finds the strongest that works on this machine, and says what
//! to change where none does. A program never runs without a sandbox. Systems other than Linux have no level.
//!
//! | | namespaces | Landlock |
//! |---|---|---|
//! | needs | Linux 5.14, unprivileged user namespaces | Linux 6.12 |
//! | files | a file system of its own: paths that are not named do not exist | other paths cannot be opened, but their names and metadata are visible |
//! | processes | sees only its own | names of all are visible; it can signal, trace and change the priority of only its own |
//! | sockets | a loopback interface of its own; Unix sockets of its own | none, except pairs of streams |
//! | modes, times and attributes of files | may be changed in the writable folders | cannot be changed: Landlock does not limit this to the writable folders |
//! | the launcher itself is killed | all processes end | processes that the program started may remain |
//!
//! Limits of memory, disk space and number of files are measured at intervals. Memory that the kernel uses for a
//! process, and shared memory that is not mapped, are not counted. A folder in [`SandboxedCommand::readable`] must not
//! contain sockets of services: a program can connect to them.
//!
//! Sources: namespaces(7), user_namespaces(7), pivot_root(2), landlock(7), seccomp(2), setrlimit(2).

mod command;
mod launch_error;
#[cfg(target_os = "linux")]
mod launcher;
mod level;
mod outcome;
mod protocol;
mod remedy;
mod remove_folder;
mod run;

pub use command::{CommandLimits, Mount, MountChanges, SandboxedCommand};
pub use launch_error::LaunchError;
#[cfg(target_os = "linux")]
pub use launcher::serve;
pub use level::{MissingLevel, SandboxLevel, SandboxSupport};
pub use outcome::{CapturedOutput, CommandEnd, CommandOutcome, CommandUsage, ExceededLimit};
pub use remedy::MachineFacts;
pub use remove_folder::remove_folder;
pub use run::{SandboxAccount, SandboxLauncher};
