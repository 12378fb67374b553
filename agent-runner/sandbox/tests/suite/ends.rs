//! A program ends with its launcher and its caller, and when it is cancelled.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cfq_sandbox::{CommandEnd, LaunchError, SandboxLevel};

use crate::fixture::{Fixture, launcher, levels, processes_with, wait_until_gone};

fn wait_until_running(marker: &str) -> Vec<u32> {
    let start = Instant::now();
    loop {
        let running = processes_with(marker);
        if running.len() >= 2 {
            return running;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "not started: {running:?}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn cancelled_program_ends() {
    for level in levels("ends::cancelled_program_ends") {
        let fixture = Fixture::new(level);
        let marker = format!("85{}", std::process::id());
        let command = fixture.shell(&format!("echo started; setsid sleep {marker} & sleep {marker}"));
        let cancelled = AtomicBool::new(false);
        let outcome = std::thread::scope(|scope| {
            scope.spawn(|| {
                wait_until_running(&marker);
                cancelled.store(true, Ordering::Relaxed);
            });
            launcher().run(level, &command, &cancelled).unwrap()
        });
        assert_eq!((outcome.end, outcome.stdout.bytes.as_slice()), (CommandEnd::Cancelled, b"started\n".as_slice()));
        assert!(processes_with(&marker).is_empty(), "{level}");
    }
}

#[test]
fn program_ends_with_its_launcher() {
    for level in levels("ends::program_ends_with_its_launcher") {
        // Without namespaces, processes of the program may remain; the crate's documentation says so.
        if level != SandboxLevel::Namespaces {
            continue;
        }
        let fixture = Fixture::new(level);
        let marker = format!("84{}", std::process::id());
        let command = fixture.shell(&format!("setsid sleep {marker} & sleep {marker}"));
        let result = std::thread::scope(|scope| {
            scope.spawn(|| {
                wait_until_running(&marker);
                for launcher in launchers_of(&marker) {
                    #[allow(unsafe_code)]
                    // SAFETY: the call only sends a signal, to a child that has not been waited for.
                    unsafe {
                        libc::kill(launcher, libc::SIGKILL)
                    };
                }
            });
            fixture.try_run(&command)
        });
        assert!(matches!(result, Err(LaunchError::NoResult { .. })), "{result:?}");
        wait_until_gone(&marker);
    }
}

/// Ids of the launchers, children of this process, whose programs have `marker` in their command line.
fn launchers_of(marker: &str) -> Vec<i32> {
    let parent = |process: u32| {
        let text = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
        text.lines().find_map(|line| line.strip_prefix("PPid:"))?.trim().parse::<u32>().ok()
    };
    let mut launchers = Vec::new();
    for process in processes_with(marker) {
        // sleep, shell, first process of the namespace, launcher: the last one is a child of this process.
        let mut next = Some(process);
        while let Some(current) = next {
            let above = parent(current);
            if above == Some(std::process::id()) {
                launchers.push(i32::try_from(current).unwrap());
            }
            next = above.filter(|above| *above > 1);
        }
    }
    launchers.sort_unstable();
    launchers.dedup();
    launchers
}
