//! Each limit ends a program that exceeds it, with all its processes.

use std::time::{Duration, Instant};

use cfq_sandbox::{CommandEnd, CommandOutcome, ExceededLimit, SandboxLevel};

use crate::fixture::{Fixture, levels, processes_with, wait_until_gone};

fn exceeded(limit: ExceededLimit) -> CommandEnd {
    CommandEnd::LimitExceeded(limit)
}

fn text(outcome: &CommandOutcome) -> String {
    String::from_utf8_lossy(&outcome.stdout.bytes).into_owned()
}

#[test]
fn time_ends_all_processes() {
    for level in levels("limits::time_ends_all_processes") {
        let fixture = Fixture::new(level);
        let marker = format!("86{}", std::process::id());
        let mut command = fixture.shell(&format!("setsid sleep {marker} & sleep {marker}"));
        command.limits.wall = Duration::from_secs(1);
        let outcome = fixture.run(&command);
        assert_eq!(outcome.end, exceeded(ExceededLimit::Wall), "{level}");
        assert!(outcome.usage.wall >= Duration::from_secs(1));
        assert!(processes_with(&marker).is_empty(), "{level}");
        let mut command = fixture.shell("while :; do :; done");
        command.limits.cpu = Duration::from_secs(1);
        let outcome = fixture.run(&command);
        assert_eq!(outcome.end, exceeded(ExceededLimit::Cpu), "{level}");
        // Beside other programs less than the limit: the kernel counts the limit in whole timer ticks, the usage exactly.
        assert!(outcome.usage.cpu >= Duration::from_millis(500), "{level}: {:?}", outcome.usage);
    }
}

#[test]
fn program_that_hides_from_measurements_ends() {
    for level in levels("limits::program_that_hides_from_measurements_ends") {
        let fixture = Fixture::new(level);
        let marker = format!("hidden{}{level}", std::process::id());
        let mut command = fixture.attempt("hide");
        command.args.extend(["--skip".into(), marker.clone().into()]);
        command.limits.wall = Duration::from_secs(1);
        assert_eq!(fixture.run(&command).end, exceeded(ExceededLimit::Wall), "{level}");
        assert!(processes_with(&marker).is_empty(), "{level}");
    }
}

#[test]
fn fork_bomb_ends() {
    for level in levels("limits::fork_bomb_ends") {
        let fixture = Fixture::new(level);
        let marker = format!("bomb{}{level}", std::process::id());
        let mut command = fixture.shell(&format!("f() {{ f | f & }}; f; sleep 600 # {marker}"));
        command.limits.tasks = 64;
        command.limits.wall = Duration::from_secs(3);
        let start = Instant::now();
        let outcome = fixture.run(&command);
        let is_ended = matches!(outcome.end, CommandEnd::LimitExceeded(ExceededLimit::Wall | ExceededLimit::Tasks))
            || matches!(outcome.end, CommandEnd::Exited(_));
        assert!(is_ended, "{level}: {:?}", outcome.end);
        assert!(start.elapsed() < Duration::from_secs(60));
        wait_until_gone(&marker);
    }
}

#[test]
fn threads_are_limited() {
    for level in levels("limits::threads_are_limited") {
        let fixture = Fixture::new(level);
        let mut command = fixture.attempt("threads");
        command.limits.tasks = 32;
        let outcome = fixture.run(&command);
        let is_refused = text(&outcome).contains(&format!("refused {}", libc::EAGAIN));
        assert!(is_refused || outcome.end == exceeded(ExceededLimit::Tasks), "{level}: {outcome:?}");
    }
}

#[test]
fn memory_is_limited_in_one_process_in_many_and_if_shared() {
    for level in levels("limits::memory_is_limited_in_one_process_in_many_and_if_shared") {
        let fixture = Fixture::new(level);
        let run = |attempt: &str| {
            let mut command = fixture.attempt(attempt);
            command.limits.memory_bytes = 256 << 20;
            fixture.run(&command)
        };
        let outcome = run("allocate");
        let is_refused = text(&outcome).contains(&format!("refused {}", libc::ENOMEM));
        assert!(is_refused || outcome.end == exceeded(ExceededLimit::Memory), "{level}: {outcome:?}");
        for attempt in ["allocate-shared", "allocate-in-many", "allocate-unseen"] {
            let outcome = run(attempt);
            assert_eq!(outcome.end, exceeded(ExceededLimit::Memory), "{level}: {attempt}");
            assert!(outcome.usage.peak_memory_bytes > 256 << 20, "{level}: {:?}", outcome.usage);
        }
        if level == SandboxLevel::Namespaces {
            let outcome = run("fill /dev/shm");
            assert!(text(&outcome).contains(&format!("refused {}", libc::ENOSPC)), "{outcome:?}");
        }
    }
}

#[test]
fn disk_space_and_number_of_files_are_limited() {
    for level in levels("limits::disk_space_and_number_of_files_are_limited") {
        let fixture = Fixture::new(level);
        let mut command = fixture.attempt("create-files");
        command.limits.files = 2000;
        assert_eq!(fixture.run(&command).end, exceeded(ExceededLimit::Files), "{level}");
        let fixture = Fixture::new(level);
        assert_eq!(fixture.run(&fixture.attempt("nest-folders")).end, exceeded(ExceededLimit::Files), "{level}");
        for folder in ["work", "scratch/tmp"] {
            let fixture = Fixture::new(level);
            let folder = fixture.work().with_file_name(folder);
            let mut command = fixture.attempt(&format!("fill {}", folder.display()));
            command.limits.disk_bytes = 32 << 20;
            assert_eq!(fixture.run(&command).end, exceeded(ExceededLimit::Disk), "{level}: {}", folder.display());
        }
        let fixture = Fixture::new(level);
        let mut command = fixture.attempt("fill-unlinked");
        command.limits.disk_bytes = 32 << 20;
        assert_eq!(fixture.run(&command).end, exceeded(ExceededLimit::Disk), "{level}: files without a name");
        let mut command = fixture.shell("exec head -c 100000000 /dev/zero > large");
        command.limits.file_bytes = 1 << 20;
        assert_eq!(fixture.run(&command).end, exceeded(ExceededLimit::FileSize), "{level}");
    }
}

#[test]
fn output_is_limited() {
    for level in levels("limits::output_is_limited") {
        let fixture = Fixture::new(level);
        let mut command = fixture.shell("yes; echo after");
        command.limits.output_bytes = 1 << 20;
        let outcome = fixture.run(&command);
        assert_eq!(outcome.end, exceeded(ExceededLimit::Output), "{level}");
        assert_eq!((outcome.stdout.bytes.len(), outcome.stdout.truncated), (1 << 20, true), "{level}");
    }
}
