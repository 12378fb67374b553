//! The processor and the memory this process may use: the machine's, or its control group's if that is less.

use std::fs;
use std::path::{Path, PathBuf};

use cfq_proto::node::{Device, DeviceKind};

/// The processor as a device.
pub fn device() -> Device {
    let memory = Memory::read();
    Device {
        id: "cpu".to_owned(),
        kind: DeviceKind::Cpu,
        name: processor().unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
        memory_total: memory.total,
        memory_others: memory.total.saturating_sub(memory.available),
        compute_capability: None,
        temperature_c: None,
        power_mw: None,
        power_limit_mw: None,
        uuid: None,
        throttled: Vec::new(),
        processes: Vec::new(),
    }
}

/// Bytes that can be taken now without pushing anything out.
pub fn available_memory() -> u64 {
    Memory::read().available
}

/// Bytes that this process holds in memory and no file backs; `None` where the system does not tell.
pub fn held_memory() -> Option<u64> {
    of_this_process("RssAnon:")
}

/// Hands what is free in this process's heap back to the system: after a model went, its weights lie there in pieces that
/// the allocator would keep for the next one, while another process, or another model's reckoning, wants the memory.
pub fn give_back() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: glibc's own call for this, which any thread may make at any time.
    #[allow(unsafe_code)]
    unsafe {
        libc::malloc_trim(0);
    }
}

fn of_this_process(field: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/self/status").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix(field))?;
    line.split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
}

struct Memory {
    total: u64,
    available: u64,
}

impl Memory {
    fn read() -> Self {
        let machine = fs::read_to_string("/proc/meminfo").ok().and_then(|text| parse_meminfo(&text));
        // Without /proc (macOS) nothing is known: a modest machine is assumed, memory_limit says otherwise.
        let (total, available) = machine.unwrap_or((8 << 30, 4 << 30));
        let (mut total, mut available) = (total, available);
        // A limit set on the process (`ulimit -v`) counts what is mapped, not what is used.
        if let Some(limit) = rustix::process::getrlimit(rustix::process::Resource::As).current {
            total = total.min(limit);
            available = available.min(limit.saturating_sub(mapped().unwrap_or(0)));
        }
        for group in groups() {
            if let Some((limit, used)) = group_limit(&group) {
                total = total.min(limit);
                available = available.min(limit.saturating_sub(used));
            }
        }
        Self { total, available }
    }
}

/// Bytes of this process's address space.
fn mapped() -> Option<u64> {
    of_this_process("VmSize:")
}

fn parse_meminfo(text: &str) -> Option<(u64, u64)> {
    let field = |name: &str| -> Option<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim_start_matches(':').split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
    };
    Some((field("MemTotal")?, field("MemAvailable")?))
}

/// This process's control group and those above it (version 2 of the interface).
fn groups() -> Vec<PathBuf> {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let Some(path) = own.lines().find_map(|line| line.strip_prefix("0::/")) else { return Vec::new() };
    let root = Path::new("/sys/fs/cgroup");
    root.join(path).ancestors().take_while(|dir| dir.starts_with(root)).map(Path::to_path_buf).collect()
}

/// Limit and use of one group, with pages that could be dropped not counted as use.
fn group_limit(group: &Path) -> Option<(u64, u64)> {
    let number = |file: &str| fs::read_to_string(group.join(file)).ok()?.trim().parse::<u64>().ok();
    let limit = number("memory.max")?;
    let used = number("memory.current")?;
    let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let file = stat.lines().find_map(|l| l.strip_prefix("inactive_file "))?.parse::<u64>().ok()?;
    Some((limit, used.saturating_sub(file)))
}

fn processor() -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    let name = text.lines().find_map(|line| line.strip_prefix("model name"))?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    Some(format!("{} ({threads} threads)", name.trim_start_matches([' ', '\t', ':']).trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_read_in_bytes() {
        let text = "MemTotal:       24000000 kB\nMemFree: 1 kB\nMemAvailable:   22000000 kB\n";
        assert_eq!(parse_meminfo(text), Some((24_000_000 * 1024, 22_000_000 * 1024)));
        assert_eq!(parse_meminfo("MemTotal: x kB\n"), None);
    }

    #[test]
    fn some_memory_is_available_and_some_is_held() {
        assert!(available_memory() > 0);
        if cfg!(target_os = "linux") {
            assert!(held_memory().unwrap() > 0 && mapped().unwrap() > 0);
        }
    }
}
