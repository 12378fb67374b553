//! No attempt to leave the sandbox succeeds. Where it is harmless, the same attempt succeeds outside of the sandbox, so
//! that a refusal means something.

use std::fs;
use std::net::{TcpListener, UdpSocket};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::path::Path;
use std::process::{Child, Stdio};

use cfq_sandbox::{CommandEnd, SandboxLevel};

use crate::fixture::{ATTEMPT, Fixture, attempt_args, levels, outside, test_program};

/// The word with which an attempt ends, and the number of the error.
fn result_of(stdout: &[u8]) -> String {
    let text = String::from_utf8_lossy(stdout).into_owned();
    // The harness prints the name of the test on the same line.
    let result =
        ["succeeded", "refused"].iter().find_map(|word| Some(text[text.find(word)?..].lines().next()?.to_owned()));
    result.unwrap_or_else(|| panic!("no result: {text}"))
}

fn inside_result(fixture: &Fixture, attempt: &str) -> String {
    let outcome = fixture.run(&fixture.attempt(attempt));
    assert_eq!(outcome.end, CommandEnd::Exited(0), "{attempt}: {}", String::from_utf8_lossy(&outcome.stderr.bytes));
    result_of(&outcome.stdout.bytes)
}

fn outside_result(fixture: &Fixture, attempt: &str) -> String {
    // What the attempt created inside.
    drop(fs::remove_file(fixture.work().join("link")));
    let mut command = outside(&test_program());
    let output = command.args(attempt_args()).env(ATTEMPT, attempt).current_dir(fixture.work()).output().unwrap();
    result_of(&output.stdout)
}

/// The attempt succeeds outside of the sandbox and is refused inside.
fn assert_refused(fixture: &Fixture, attempt: &str) {
    let inside = inside_result(fixture, attempt);
    assert!(inside.starts_with("refused"), "{}: {attempt}: {inside}", fixture.level);
    assert_eq!(outside_result(fixture, attempt), "succeeded", "{attempt} outside of the sandbox");
}

/// The attempt is refused with this error.
fn assert_error(fixture: &Fixture, attempt: &str, error: i32) {
    assert_eq!(inside_result(fixture, attempt), format!("refused {error}"), "{}: {attempt}", fixture.level);
}

/// A process of the account of the programs.
struct Neighbour(Child);

impl Neighbour {
    fn start() -> Self {
        Self(outside(Path::new("/bin/sleep")).arg("600").stdout(Stdio::null()).spawn().unwrap())
    }

    fn is_alive(&mut self) -> bool {
        self.0.try_wait().unwrap().is_none()
    }
}

impl Drop for Neighbour {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

#[test]
fn files_outside_are_neither_read_nor_changed() {
    for level in levels("escapes::files_outside_are_neither_read_nor_changed") {
        let fixture = Fixture::new(level);
        let secret = fixture.file(&fixture.outside().join("secret"), "secret");
        let path = secret.to_str().unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode();
        let before = mode(&secret);
        for attempt in ["read", "append", "link"] {
            assert_refused(&fixture, &format!("{attempt} {path}"));
        }
        for attempt in ["write", "remove", "chmod", "hard-link"] {
            let result = inside_result(&fixture, &format!("{attempt} {path}"));
            assert!(result.starts_with("refused"), "{level}: {attempt}: {result}");
        }
        assert_eq!((fs::read_to_string(&secret).unwrap().as_str(), mode(&secret)), ("secret", before));
        let mut command = fixture.attempt(&format!("mode-of-open-file {path}"));
        command.readable.push(secret.clone());
        let result = result_of(&fixture.run(&command).stdout.bytes);
        assert!(result.starts_with("refused"), "{level}: {result}");
        assert_eq!(mode(&secret), before);
        let new = fixture.outside().join("new");
        assert!(inside_result(&fixture, &format!("write {}", new.display())).starts_with("refused"));
        assert!(!new.exists());
        assert_refused(&fixture, &format!("list {}", fixture.outside().display()));
        for path in ["/root", "/etc/shadow", "/dev/mem", "/dev/kmsg", "/proc/1/environ", "/proc/1/root/etc/shadow"] {
            assert!(inside_result(&fixture, &format!("read {path}")).starts_with("refused"), "{level}: {path}");
        }
    }
}

#[test]
fn other_processes_are_out_of_reach() {
    for level in levels("escapes::other_processes_are_out_of_reach") {
        let fixture = Fixture::new(level);
        let mut neighbour = Neighbour::start();
        let id = neighbour.0.id();
        for attempt in ["attach", "priority", "limits", "processors", "signal"] {
            let result = inside_result(&fixture, &format!("{attempt} {id}"));
            // With namespaces the id may be that of the attempt itself, but hardly is.
            assert!(result.starts_with("refused"), "{level}: {attempt}: {result}");
        }
        for file in ["environ", "cmdline", "mem", "root/etc/passwd"] {
            let result = inside_result(&fixture, &format!("read /proc/{id}/{file}"));
            assert!(result.starts_with("refused"), "{level}: {file}: {result}");
        }
        assert!(neighbour.is_alive());
        assert_eq!(outside_result(&fixture, &format!("priority {id}")), "succeeded");
        assert_eq!(outside_result(&fixture, &format!("signal {id}")), "succeeded");
    }
}

#[test]
fn sockets_do_not_leave_the_sandbox() {
    for level in levels("escapes::sockets_do_not_leave_the_sandbox") {
        let fixture = Fixture::new(level);
        let name = format!("cfq-sandbox-test-{}-{level}", std::process::id());
        let _abstract = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        let path = fixture.outside().join("socket");
        let _unix = UnixListener::bind(&path).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o777)).unwrap();
        let tcp = TcpListener::bind("127.0.0.1:0").unwrap();
        let udp = UdpSocket::bind("127.0.0.1:0").unwrap();
        assert_refused(&fixture, &format!("abstract {name}"));
        assert_refused(&fixture, &format!("unix {}", path.display()));
        assert_refused(&fixture, &format!("tcp {}", tcp.local_addr().unwrap()));
        let datagrams = fixture.outside().join("datagrams");
        let _datagrams = std::os::unix::net::UnixDatagram::bind(&datagrams).unwrap();
        fs::set_permissions(&datagrams, fs::Permissions::from_mode(0o777)).unwrap();
        assert_refused(&fixture, &format!("datagram {}", datagrams.display()));
        // A packet without a receiver is no error, so nothing may arrive.
        inside_result(&fixture, &format!("udp {}", udp.local_addr().unwrap()));
        udp.set_nonblocking(true).unwrap();
        assert!(udp.recv(&mut [0]).is_err(), "{level}");
        assert_eq!(outside_result(&fixture, &format!("udp {}", udp.local_addr().unwrap())), "succeeded");
        assert!(udp.recv(&mut [0]).is_ok());
        for attempt in ["raw-socket", "packet-socket", "vsock", "netfilter", "multipath-tcp", "other-pair"] {
            assert_error(&fixture, attempt, libc::EPERM);
        }
    }
}

#[test]
fn dangerous_system_calls_are_refused() {
    for level in levels("escapes::dangerous_system_calls_are_refused") {
        let fixture = Fixture::new(level);
        for attempt in [
            "trace",
            "keyring",
            "clock",
            "device",
            "privileges",
            "user-namespace",
            "clone-namespace",
            "mount",
            "type-into-terminal",
            "io-uring",
            "memory-file",
            "shared-memory",
            "page-faults",
            "bpf",
            "btrfs",
            "exchange-of-content",
            "exchange-of-content-on-xfs",
            "attributes",
        ] {
            assert_error(&fixture, attempt, libc::EPERM);
        }
        if level == SandboxLevel::Landlock {
            for attempt in ["priority-of-user", "semaphore", "shared-memory-by-id"] {
                assert_error(&fixture, attempt, libc::EPERM);
            }
        }
        // The C library must use the older call; and calls that the list does not know do not exist.
        for attempt in ["clone3", "new-call"] {
            assert_error(&fixture, attempt, libc::ENOSYS);
        }
        #[cfg(target_arch = "x86_64")]
        assert_error(&fixture, "x32", libc::ENOSYS);
        for attempt in ["memory-file", "shared-memory"] {
            assert_eq!(outside_result(&fixture, attempt), "succeeded", "{attempt} outside of the sandbox");
        }
    }
}

#[test]
fn file_system_of_its_own_has_nothing_else() {
    for level in levels("escapes::file_system_of_its_own_has_nothing_else") {
        if level != SandboxLevel::Namespaces {
            continue;
        }
        let fixture = Fixture::new(level);
        let root = fixture.output("ls /");
        let allowed = [
            "bin", "dev", "etc", "lib", "lib32", "lib64", "libx32", "nix", "gnu", "proc", "run", "sbin", "tmp", "usr",
            "var",
        ];
        assert!(root.lines().all(|name| allowed.contains(&name)), "{root}");
        assert_eq!(
            fixture.output("ls /var; ls /var/tmp").lines().collect::<Vec<_>>().len(),
            2,
            "only the mount points"
        );
        assert_eq!(
            fixture.output("hostname; id -u; cat /proc/sys/kernel/hostname; echo $$"),
            "sandbox\n1000\nsandbox\n2\n"
        );
        let processes = fixture.output("ls /proc >$TMPDIR/names; grep -c '^[0-9]' $TMPDIR/names");
        assert_eq!(processes.trim(), "3", "the launcher, the shell and ls");
        for path in ["/new", "/dev/new", "/etc/new", "/usr/new", "/proc/sys/kernel/core_pattern"] {
            let script = format!("if echo x > {path}; then exit 1; fi");
            fixture.output(&script);
        }
        assert_eq!(fixture.output("cat /proc/self/oom_score_adj").trim(), "1000");
        fixture.output("kill -9 1; kill -STOP 1; test -e /proc/1");
        fixture.output("test ! -r /proc/1/mem && test ! -r /proc/1/environ && test ! -r /proc/1/fd");
    }
}
