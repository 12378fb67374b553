//! What a user can change so that a level works on this machine.

use std::fs;
use std::path::{Path, PathBuf};

use crate::SandboxLevel;

/// Files that container runtimes create: Docker and Podman.
const CONTAINER_MARKERS: [&str; 2] = ["/.dockerenv", "/run/.containerenv"];
/// First version of Linux with all parts that the level with namespaces uses: limits of tasks for each user namespace.
const FIRST_WITH_NAMESPACES: (u32, u32) = (5, 14);
/// First version of Linux in which Landlock limits signals and abstract sockets.
const FIRST_WITH_LANDLOCK: (u32, u32) = (6, 12);

/// Settings of a machine that decide which levels work.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MachineFacts {
    /// Version of the kernel: major and minor.
    pub kernel: Option<(u32, u32)>,
    /// Ubuntu: AppArmor permits user namespaces only to programs with a profile.
    pub restricted_by_apparmor: bool,
    /// Debian, Arch: the system permits user namespaces to root only.
    pub denied_by_userns_clone: bool,
    /// Red Hat and others: the number of user namespaces is zero.
    pub denied_by_max_namespaces: bool,
    /// The process runs in a container of Docker or Podman.
    pub in_container: bool,
    /// The program that starts sandboxes.
    pub program: PathBuf,
}

impl MachineFacts {
    /// Reads the settings of this machine. Settings that cannot be read count as not restricting.
    pub fn read(program: &Path) -> Self {
        let setting = |name: &str| fs::read_to_string(Path::new("/proc/sys").join(name)).ok();
        let is = |name: &str, value: &str| setting(name).is_some_and(|text| text.trim() == value);
        Self {
            kernel: setting("kernel/osrelease").and_then(|text| version(&text)),
            restricted_by_apparmor: is("kernel/apparmor_restrict_unprivileged_userns", "1"),
            denied_by_userns_clone: is("kernel/unprivileged_userns_clone", "0"),
            denied_by_max_namespaces: is("user/max_user_namespaces", "0"),
            in_container: CONTAINER_MARKERS.iter().any(|marker| Path::new(marker).exists()),
            program: fs::canonicalize(program).unwrap_or_else(|_| program.to_owned()),
        }
    }

    /// What to change so that `level`, which does not work, works.
    pub(crate) fn remedy(&self, level: SandboxLevel) -> String {
        match level {
            SandboxLevel::Namespaces => self.remedy_for_namespaces(),
            SandboxLevel::Landlock => self.remedy_for_landlock(),
        }
    }

    fn remedy_for_namespaces(&self) -> String {
        if let Some(upgrade) = self.upgrade(FIRST_WITH_NAMESPACES) {
            return upgrade;
        }
        if self.in_container {
            return "start the container with `--security-opt seccomp=unconfined --security-opt systempaths=unconfined` \
                    (Podman: `--security-opt unmask=ALL`), or run cfq outside of a container"
                .to_owned();
        }
        if self.denied_by_max_namespaces {
            return set("user.max_user_namespaces", "15000");
        }
        if self.denied_by_userns_clone {
            return set("kernel.unprivileged_userns_clone", "1");
        }
        if self.restricted_by_apparmor {
            let program = self.program.display();
            return format!(
                "permit it to this program: `printf 'abi <abi/4.0>,\\nprofile cfq {program} flags=(unconfined) {{ userns, \
                 }}\\n' | sudo tee /etc/apparmor.d/cfq && sudo apparmor_parser -r /etc/apparmor.d/cfq`"
            );
        }
        "no known setting of this machine forbids it: please report this with the output of `cfq doctor`".to_owned()
    }

    fn remedy_for_landlock(&self) -> String {
        self.upgrade(FIRST_WITH_LANDLOCK).unwrap_or_else(|| {
            "add `landlock` to the list after `lsm=` in the kernel's command line, and restart the machine".to_owned()
        })
    }

    fn upgrade(&self, needed: (u32, u32)) -> Option<String> {
        let (major, minor) = self.kernel.filter(|kernel| *kernel < needed)?;
        Some(format!("upgrade Linux {major}.{minor} to {}.{} or newer", needed.0, needed.1))
    }
}

fn set(name: &str, value: &str) -> String {
    format!("permit it: `echo {name}={value} | sudo tee /etc/sysctl.d/90-cfq.conf && sudo sysctl --system`")
}

/// Major and minor version of a kernel's release, for example `6.1.0-18-amd64`.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut parts = release.trim().split(|c: char| !c.is_ascii_digit());
    Some((parts.next()?.parse().ok()?, parts.next()?.parse().ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remedy_names_the_setting_that_forbids_a_level() {
        let facts = MachineFacts { kernel: Some((6, 8)), program: "/usr/bin/cfq".into(), ..MachineFacts::default() };
        let namespaces = |facts: MachineFacts| facts.remedy(SandboxLevel::Namespaces);
        for (facts, expected) in [
            (MachineFacts { kernel: Some((5, 10)), ..facts.clone() }, "upgrade Linux 5.10 to 5.14"),
            (MachineFacts { restricted_by_apparmor: true, ..facts.clone() }, "profile cfq /usr/bin/cfq"),
            (MachineFacts { denied_by_userns_clone: true, ..facts.clone() }, "kernel.unprivileged_userns_clone=1"),
            (MachineFacts { denied_by_max_namespaces: true, ..facts.clone() }, "user.max_user_namespaces=15000"),
            (MachineFacts { in_container: true, ..facts.clone() }, "--security-opt seccomp=unconfined"),
            (facts.clone(), "please report"),
        ] {
            let remedy = namespaces(facts.clone());
            assert!(remedy.contains(expected), "{facts:?}: {remedy}");
        }
        assert!(facts.remedy(SandboxLevel::Landlock).contains("upgrade Linux 6.8 to 6.12"));
        let newer = MachineFacts { kernel: Some((6, 12)), ..facts };
        assert!(newer.remedy(SandboxLevel::Landlock).contains("lsm="));
    }

    #[test]
    fn version_of_a_kernel_release() {
        assert_eq!(version("6.1.0-18-amd64\n"), Some((6, 1)));
        assert_eq!(version("5.14"), Some((5, 14)));
        assert_eq!(version("unknown"), None);
    }
}
