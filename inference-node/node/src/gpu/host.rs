//! The CPU, and the host memory that this process may use: the machine's memory, or the limit of the process's control
//! group if that is lower.

use std::fs;
use std::path::{Path, PathBuf};

use cfq_proto::node::{Device, DeviceKind};

/// The CPU as a device.
pub fn device() -> Device {
    let memory = Memory::read();
    Device {
        id: "cpu".to_owned(),
        kind: DeviceKind::Cpu,
        name: cpu_name().unwrap_or_else(|| std::env::consts::ARCH.to_owned()),
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

/// Memory that can be allocated now without swapping, in bytes.
pub fn available_memory() -> u64 {
    Memory::read().available
}

/// Resident anonymous memory of this process, in bytes; `None` on systems without `/proc`.
pub fn anonymous_memory() -> Option<u64> {
    process_status("RssAnon:")
}

/// Size of a block whose release makes glibc check the end of the heap; it does so from 64 KiB.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const FREED_BLOCK_BYTES: usize = 96 << 10;
/// The trim threshold that glibc itself reaches in a program that frees large blocks.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const MAX_TRIM_THRESHOLD_BYTES: libc::c_int = 64 << 20;

/// Returns free heap memory of this process to the system. Called after a model is unloaded: otherwise the allocator
/// would keep the memory of the weights, and other processes and loads of other models could not use it.
pub fn trim_heap() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: the block is freed once and not used. The other functions of glibc may be called at any time.
    #[allow(unsafe_code)]
    unsafe {
        // malloc_trim keeps the free memory at the end of the heap of a thread other than the main one. A call of free
        // returns it if it exceeds the threshold.
        libc::mallopt(libc::M_TRIM_THRESHOLD, 0);
        libc::free(std::hint::black_box(libc::malloc(FREED_BLOCK_BYTES)));
        libc::mallopt(libc::M_TRIM_THRESHOLD, MAX_TRIM_THRESHOLD_BYTES);
        libc::malloc_trim(0);
    }
}

/// A size from `/proc/self/status`, in bytes.
fn process_status(field: &str) -> Option<u64> {
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
        // Without /proc (macOS), 8 GiB of memory are assumed, of which 4 GiB are available; memory_limit overrides
        // this.
        let (total, available) = machine.unwrap_or((8 << 30, 4 << 30));
        let (mut total, mut available) = (total, available);
        // The limit of the address space (`ulimit -v`) applies to mapped memory, not to used memory.
        if let Some(limit) = rustix::process::getrlimit(rustix::process::Resource::As).current {
            total = total.min(limit);
            available = available.min(limit.saturating_sub(mapped_memory().unwrap_or(0)));
        }
        for group in control_groups() {
            if let Some((limit, used)) = group_limit(&group) {
                total = total.min(limit);
                available = available.min(limit.saturating_sub(used));
            }
        }
        Self { total, available }
    }
}

/// Size of this process's address space, in bytes.
fn mapped_memory() -> Option<u64> {
    process_status("VmSize:")
}

/// Total and available memory from `/proc/meminfo`, in bytes.
fn parse_meminfo(text: &str) -> Option<(u64, u64)> {
    let field = |name: &str| -> Option<u64> {
        let line = text.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim_start_matches(':').split_whitespace().next()?.parse::<u64>().ok()?.checked_mul(1024)
    };
    Some((field("MemTotal")?, field("MemAvailable")?))
}

/// This process's control group and its ancestors (cgroup v2).
fn control_groups() -> Vec<PathBuf> {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let Some(path) = own.lines().find_map(|line| line.strip_prefix("0::/")) else { return Vec::new() };
    let root = Path::new("/sys/fs/cgroup");
    root.join(path).ancestors().take_while(|dir| dir.starts_with(root)).map(Path::to_path_buf).collect()
}

/// Memory limit and usage of one control group, in bytes. Page cache that the kernel can drop does not count as usage.
fn group_limit(group: &Path) -> Option<(u64, u64)> {
    let number = |file: &str| fs::read_to_string(group.join(file)).ok()?.trim().parse::<u64>().ok();
    let limit = number("memory.max")?;
    let used = number("memory.current")?;
    let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
    let file = stat.lines().find_map(|l| l.strip_prefix("inactive_file "))?.parse::<u64>().ok()?;
    Some((limit, used.saturating_sub(file)))
}

/// Model and number of threads of the CPU.
fn cpu_name() -> Option<String> {
    let text = fs::read_to_string("/proc/cpuinfo").ok()?;
    let name = text.lines().find_map(|line| line.strip_prefix("model name"))?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    Some(format!("{} ({threads} threads)", name.trim_start_matches([' ', '\t', ':']).trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_is_parsed_in_bytes() {
        let text = "MemTotal:       24000000 kB\nMemFree: 1 kB\nMemAvailable:   22000000 kB\n";
        assert_eq!(parse_meminfo(text), Some((24_000_000 * 1024, 22_000_000 * 1024)));
        assert_eq!(parse_meminfo("MemTotal: x kB\n"), None);
    }

    #[test]
    fn memory_of_this_machine_and_process_is_known() {
        assert!(available_memory() > 0);
        match cfg!(target_os = "linux") {
            true => assert!(anonymous_memory().unwrap() > 0 && mapped_memory().unwrap() > 0),
            false => {
                cfq_test_skip::skip("some_memory_is_available_and_some_is_held/held", "only Linux reports held memory");
            }
        }
    }
}
