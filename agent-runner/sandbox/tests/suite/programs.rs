//! Programs that do nothing forbidden work, and errors say what failed.

use std::sync::atomic::AtomicBool;

use cfq_sandbox::{CommandEnd, LaunchError, SandboxLauncher, SandboxLevel};

use crate::fixture::{Fixture, account, launcher, levels};

#[test]
fn output_exit_code_and_files_of_a_program() {
    for level in levels("programs::output_exit_code_and_files_of_a_program") {
        let fixture = Fixture::new(level);
        let outcome = fixture.run(&fixture.shell("echo out; echo error >&2; echo x > file; mkdir d; exit 7"));
        assert_eq!(outcome.end, CommandEnd::Exited(7));
        assert_eq!(
            (outcome.stdout.bytes.as_slice(), outcome.stderr.bytes.as_slice()),
            (&b"out\n"[..], &b"error\n"[..])
        );
        assert_eq!(std::fs::read_to_string(fixture.work().join("file")).unwrap(), "x\n");
        assert_eq!(fixture.run(&fixture.shell("kill -11 $$")).end, CommandEnd::Signalled(libc::SIGSEGV));
        assert_eq!(fixture.output("cat"), "", "stdin is empty");
        assert_eq!(fixture.output("pwd").trim(), fixture.work().to_str().unwrap());
        assert_eq!(fixture.output("echo x > $TMPDIR/a; echo x > $HOME/b; cat $TMPDIR/a $HOME/b"), "x\nx\n");
    }
}

#[test]
fn environment_contains_only_what_the_command_names() {
    for level in levels("programs::environment_contains_only_what_the_command_names") {
        let fixture = Fixture::new(level);
        let mut command = fixture.command("env", Vec::<String>::new());
        command.env = vec![("A".into(), "1".into()), ("LANG".into(), "C".into())];
        let outcome = fixture.run(&command);
        let text = String::from_utf8(outcome.stdout.bytes).unwrap();
        let mut names: Vec<&str> = text.lines().filter_map(|line| Some(line.split_once('=')?.0)).collect();
        names.sort_unstable();
        assert_eq!(names, ["A", "HOME", "LANG", "PATH", "TMPDIR"]);
        assert!(text.contains("LANG=C\n"), "{text}");
    }
}

#[test]
fn readable_folder_cannot_be_changed_and_writable_one_inside_of_it_can() {
    for level in levels("programs::readable_folder_cannot_be_changed_and_writable_one_inside_of_it_can") {
        let fixture = Fixture::new(level);
        let inner = fixture.outside().join("inner");
        std::fs::create_dir(&inner).unwrap();
        if let Some(account) = account() {
            std::os::unix::fs::chown(&inner, Some(account.uid), Some(account.gid)).unwrap();
        }
        fixture.file(&fixture.outside().join("file"), "text");
        let outside = fixture.outside();
        let mut command = fixture.shell(&format!(
            "cd {} && cat file && if echo x > file; then exit 1; fi; if rm file; then exit 1; fi; echo x > inner/new",
            outside.display()
        ));
        command.readable.push(outside.clone());
        command.writable.push(inner.clone());
        let outcome = fixture.run(&command);
        assert_eq!(outcome.end, CommandEnd::Exited(0), "{level}: {}", String::from_utf8_lossy(&outcome.stderr.bytes));
        assert_eq!(std::fs::read_to_string(outside.join("file")).unwrap(), "text");
        assert!(inner.join("new").exists());
    }
}

#[test]
fn folders_may_be_named_through_links() {
    for level in levels("programs::folders_may_be_named_through_links") {
        let fixture = Fixture::new(level);
        let link = fixture.work().with_file_name("link");
        std::os::unix::fs::symlink(fixture.work().parent().unwrap(), &link).unwrap();
        let mut command = fixture.shell("echo x > file; cd $HOME; echo x > file; pwd");
        (command.work_dir, command.writable) = (link.join("work"), vec![link.join("work")]);
        command.scratch_dir = link.join("scratch");
        let outcome = fixture.run(&command);
        assert_eq!(outcome.end, CommandEnd::Exited(0), "{level}: {}", String::from_utf8_lossy(&outcome.stderr.bytes));
        assert!(fixture.work().join("file").exists(), "{level}");
    }
}

#[test]
fn program_has_a_network_of_its_own_with_namespaces() {
    for level in levels("programs::program_has_a_network_of_its_own_with_namespaces") {
        let fixture = Fixture::new(level);
        let outcome = fixture.run(&fixture.attempt("listen"));
        let text = String::from_utf8(outcome.stdout.bytes).unwrap();
        assert_eq!(text.contains("succeeded"), level == SandboxLevel::Namespaces, "{level}: {text}");
    }
}

#[test]
fn errors_name_what_failed() {
    let start = |level, change: &dyn Fn(&mut cfq_sandbox::SandboxedCommand)| {
        let fixture = Fixture::new(level);
        let mut command = fixture.shell("true");
        change(&mut command);
        fixture.try_run(&command).unwrap_err()
    };
    for level in levels("programs::errors_name_what_failed") {
        let error = start(level, &|command| command.program = "no-such-program".into());
        assert!(
            matches!(&error, LaunchError::Program { program, source }
            if program.to_str() == Some("no-such-program") && source.kind() == std::io::ErrorKind::NotFound),
            "{error:?}"
        );
        let error = start(level, &|command| command.work_dir = "relative".into());
        assert!(matches!(error, LaunchError::RelativePath { .. }), "{error:?}");
        let error = start(level, &|command| command.readable.push("/no/such/folder".into()));
        assert!(error.to_string().contains("/no/such/folder"), "{error}");
        let fixture = Fixture::new(level);
        let as_root = SandboxLauncher { account: None, ..launcher() };
        if account().is_some() {
            let result = as_root.run(level, &fixture.shell("true"), &AtomicBool::new(false));
            assert!(matches!(result, Err(LaunchError::Root)), "{result:?}");
        }
        let missing = SandboxLauncher { program: "/no/such/launcher".into(), ..launcher() };
        let error = missing.run(level, &fixture.shell("true"), &AtomicBool::new(false)).unwrap_err();
        assert!(error.to_string().contains("/no/such/launcher"), "{error}");
    }
}

#[test]
fn probe_finds_the_level_that_programs_run_at() {
    let support = launcher().probe().unwrap();
    let works = levels("programs::probe_finds_the_level_that_programs_run_at");
    assert_eq!(support.level, works.first().copied());
    for missing in &support.missing {
        assert!(
            !works.contains(&missing.level) && !missing.reason.is_empty() && !missing.remedy.is_empty(),
            "{missing:?}"
        );
    }
}
