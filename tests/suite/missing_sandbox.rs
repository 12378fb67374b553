//! Tests on a kernel without Landlock and seccomp: the user is told that model files are parsed with fewer limits.

use std::os::unix::process::CommandExt;
use std::process::Command;

use cfq_tests::binary;
use cfq_tests::cfq_up::{Home, Up};
use cfq_tests::postgres::copy_seed;
use serde_json::Value;

/// A cfq command for which the kernel has neither Landlock nor further seccomp filters: a filter refuses their system
/// calls like unknown ones.
fn cfq_without_sandbox() -> Command {
    let statement = |code: u32, k: u32| libc::sock_filter { code: u16::try_from(code).unwrap(), jt: 0, jf: 0, k };
    let is_call = |call: libc::c_long, skipped: u8| libc::sock_filter {
        code: u16::try_from(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K).unwrap(),
        jt: skipped,
        jf: 0,
        k: u32::try_from(call).unwrap(),
    };
    let mut filter = [
        // The number of the system call is at the start of the data.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
        is_call(libc::SYS_landlock_create_ruleset, 2),
        is_call(libc::SYS_seccomp, 1),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW),
        statement(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ERRNO | u32::try_from(libc::ENOSYS).unwrap()),
    ];
    let mut command = Command::new(tokio::task::block_in_place(binary::cfq));
    // SAFETY: the closure makes two system calls, of which the second one reads the filter.
    #[allow(unsafe_code)]
    unsafe {
        command.pre_exec(move || {
            let program = libc::sock_fprog { len: 5, filter: filter.as_mut_ptr() };
            let applied = libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
                && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program) == 0;
            if applied { Ok(()) } else { Err(std::io::Error::last_os_error()) }
        });
    }
    command
}

#[tokio::test(flavor = "multi_thread")]
async fn missing_landlock_and_seccomp_are_reported_by_doctor_and_up() {
    let home = Home::new().await;
    let data = home.path("data");
    let check = |through: Option<Command>| {
        let output = tokio::task::block_in_place(|| home.cfq(through, &data, &["doctor", "--json"]).output().unwrap());
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        report["checks"]
            .as_array()
            .unwrap()
            .clone()
            .into_iter()
            .find(|check| check["name"] == "sandbox")
            .expect("a check of the sandbox")
    };
    let missing = check(Some(cfq_without_sandbox()));
    let what = missing["what"].as_str().unwrap();
    assert_eq!(missing["status"], "warn");
    assert!(what.contains("Landlock") && what.contains("seccomp"), "{what}");
    let has_landlock =
        std::fs::read_to_string("/sys/kernel/security/lsm").is_ok_and(|names| names.contains("landlock"));
    if has_landlock {
        assert_eq!(check(None)["status"], "ok");
    }

    copy_seed(&data).await;
    let up = Up::start(&home, Some(cfq_without_sandbox()), &data, data.clone());
    up.client().await;
    assert!(up.diagnostics().contains("works without Landlock"), "{}", up.diagnostics());
    assert!(up.stop().await.success());
}
