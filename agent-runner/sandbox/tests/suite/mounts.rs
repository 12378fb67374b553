//! Folders at other paths, and connections to the caller.

use std::io::{Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use cfq_sandbox::{CommandEnd, LaunchError, Mount, MountChanges, SandboxLevel, remove_folder};

use crate::fixture::{Fixture, launcher, levels};

/// A fixture, if this machine has namespaces.
fn fixture(test: &str) -> Option<Fixture> {
    levels(test).contains(&SandboxLevel::Namespaces).then(|| Fixture::new(SandboxLevel::Namespaces))
}

fn mount(source: PathBuf, target: &str, changes: MountChanges) -> Mount {
    Mount { source, target: PathBuf::from(target), changes }
}

#[test]
fn folder_is_seen_at_another_path() {
    let Some(fixture) = fixture("mounts::folder_is_seen_at_another_path") else { return };
    let mut command = fixture.shell("pwd && echo x > file && ! ls $WORK");
    command.env.push(("WORK".into(), fixture.work().into()));
    command.writable.clear();
    command.work_dir = PathBuf::from("/checkout");
    command.mounts.push(mount(fixture.work(), "/checkout", MountChanges::Kept));
    let outcome = fixture.run(&command);
    assert_eq!((outcome.end, outcome.stdout.bytes.as_slice()), (CommandEnd::Exited(0), &b"/checkout\n"[..]));
    assert_eq!(std::fs::read_to_string(fixture.work().join("file")).unwrap(), "x\n");
}

#[test]
fn changes_of_a_mount_are_discarded() {
    let Some(fixture) = fixture("mounts::changes_of_a_mount_are_discarded") else { return };
    // Characters that separate options of a mount.
    let packages = fixture.outside().join("a,b:c\\d");
    fixture.file(&fixture.outside().join("other"), "");
    std::fs::create_dir(&packages).unwrap();
    for (name, text) in [("kept", "1"), ("removed", "2"), ("changed", "3")] {
        fixture.file(&packages.join(name), text);
        std::fs::set_permissions(packages.join(name), std::fs::Permissions::from_mode(0o666)).unwrap();
    }
    std::fs::set_permissions(&packages, std::fs::Permissions::from_mode(0o777)).unwrap();
    let script = "cd packages && cat kept removed changed && rm removed && echo new >changed && mkdir added && \
                  echo x >added/file && cat changed added/file && ! ls removed 2>/dev/null && ls /checkout";
    let mut command = fixture.shell(script);
    command.writable.clear();
    command.work_dir = PathBuf::from("/checkout");
    command.mounts = vec![
        mount(packages.clone(), "/checkout/packages", MountChanges::Discarded),
        mount(fixture.work(), "/checkout", MountChanges::Kept),
    ];
    let outcome = fixture.run(&command);
    let shown = String::from_utf8_lossy(&outcome.stdout.bytes).into_owned();
    assert_eq!(outcome.end, CommandEnd::Exited(0), "{shown}{}", String::from_utf8_lossy(&outcome.stderr.bytes));
    assert_eq!(shown, "123new\nx\npackages\n");
    let mut names: Vec<_> =
        packages.read_dir().unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["changed", "kept", "removed"]);
    assert_eq!(std::fs::read_to_string(packages.join("changed")).unwrap(), "3");
    // Folders of overlayfs have no rights at all.
    remove_folder(&fixture.scratch()).unwrap();
}

#[test]
fn link_is_no_mount_point() {
    let Some(fixture) = fixture("mounts::link_is_no_mount_point") else { return };
    let (outside, packages) = (fixture.outside().join("new"), fixture.outside());
    let link = format!("/old{}", fixture.outside().display());
    std::os::unix::fs::symlink(link, fixture.work().join("link")).unwrap();
    let mut command = fixture.shell("true");
    command.mounts = vec![
        mount(fixture.work(), "/checkout", MountChanges::Kept),
        mount(packages, "/checkout/link/new", MountChanges::Discarded),
    ];
    let error = fixture.try_run(&command).unwrap_err();
    assert!(matches!(&error, LaunchError::NoSandbox { step, .. } if step.contains("/checkout/link/new")), "{error}");
    assert!(!outside.exists());
}

#[test]
fn mount_writes_count_once_toward_the_disk_limit() {
    let Some(fixture) = fixture("mounts::mount_writes_count_once_toward_the_disk_limit") else { return };
    let home = fixture.scratch().join("own-home");
    std::fs::create_dir(&home).unwrap();
    std::fs::set_permissions(&home, std::fs::Permissions::from_mode(0o777)).unwrap();
    let packages = fixture.outside();
    let limited = |script: &str| {
        let mut command = fixture.shell(script);
        command.limits.disk_bytes = 48 << 20;
        command.mounts = vec![
            mount(home.clone(), "/home/user", MountChanges::Kept),
            mount(packages.clone(), "/packages", MountChanges::Discarded),
            mount(fixture.work(), "/checkout", MountChanges::Kept),
            mount(packages.clone(), "/checkout/packages", MountChanges::Discarded),
        ];
        command.writable.clear();
        command.work_dir = PathBuf::from("/checkout");
        // An earlier program may have left them.
        for name in ["changes-1", "changes-3"] {
            remove_folder(&fixture.scratch().join(name)).unwrap();
        }
        fixture.run(&command).end
    };
    let write =
        |path: &str, megabytes: u32| format!("head -c {megabytes}M /dev/urandom >{path} && sleep 2 && rm {path}");
    let paths = ["/home/user/file", "/packages/file", "/checkout/file", "/checkout/packages/file"];
    for path in paths {
        assert_eq!(limited(&write(path, 32)), CommandEnd::Exited(0), "{path}");
        let end = limited(&write(path, 80));
        assert!(matches!(end, CommandEnd::LimitExceeded(_)), "{path}: {end}");
    }
}

#[test]
fn program_connects_to_its_caller_and_to_nothing_else() {
    let Some(fixture) = fixture("mounts::program_connects_to_its_caller_and_to_nothing_else") else { return };
    let elsewhere = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = elsewhere.local_addr().unwrap().port();
    let mut command = fixture.shell(&format!(
        "python3 -c 'import socket\n\
         s = socket.create_connection((\"127.0.0.1\", 3128)); s.sendall(b\"ping\"); print(s.recv(4).decode())\n\
         try: socket.create_connection((\"127.0.0.1\", {port})); print(\"reached\")\n\
         except OSError: print(\"refused\")'"
    ));
    command.listener_port = Some(3128);
    let mut accepted = None;
    let accept = |listener: TcpListener| {
        accepted = Some(std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut received = [0; 4];
            stream.read_exact(&mut received).unwrap();
            stream.write_all(b"pong").unwrap();
            received
        }));
    };
    let outcome =
        launcher().run_with_listener(SandboxLevel::Namespaces, &command, &AtomicBool::new(false), accept).unwrap();
    let shown = String::from_utf8_lossy(&outcome.stdout.bytes).into_owned();
    assert_eq!(shown, "pong\nrefused\n", "{}", String::from_utf8_lossy(&outcome.stderr.bytes));
    assert_eq!(&accepted.unwrap().join().unwrap(), b"ping");
}

#[test]
fn other_levels_refuse_mounts_and_listeners() {
    let fixture = Fixture::new(SandboxLevel::Landlock);
    let mut mounted = fixture.shell("true");
    mounted.mounts.push(mount(fixture.work(), "/checkout", MountChanges::Kept));
    let mut listening = fixture.shell("true");
    listening.listener_port = Some(3128);
    for command in [mounted, listening] {
        let error = fixture.try_run(&command).unwrap_err();
        assert!(matches!(error, LaunchError::NeedsNamespaces), "{error}");
    }
}
