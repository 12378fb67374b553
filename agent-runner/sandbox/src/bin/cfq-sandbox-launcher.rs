//! The launcher of `cfq-sandbox` as a program of its own, for programs other than cfq and for the crate's tests.

use std::process::ExitCode;

fn main() -> ExitCode {
    #[cfg(target_os = "linux")]
    return match cfq_sandbox::serve() {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    };
    #[cfg(not(target_os = "linux"))]
    ExitCode::FAILURE
}
