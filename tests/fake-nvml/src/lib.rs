//! NVIDIA's management library with its true binary interface and make-believe cards, for machines without a card.
//!
//! Laid in the way as `libnvidia-ml.so.1` (by `LD_LIBRARY_PATH`), it answers what cfq asks; [`scenario`] says where the
//! answers come from. Signatures, structures and return codes are those of nvml.h. A handle is a card's number plus one.
#![allow(unsafe_code, reason = "it is a foreign interface from end to end")]

pub mod scenario;

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

use scenario::{Card, Scenario};

const SUCCESS: c_uint = 0;
const INVALID_ARGUMENT: c_uint = 2;
const NOT_SUPPORTED: c_uint = 3;
const INSUFFICIENT_SIZE: c_uint = 7;
const DRIVER_NOT_LOADED: c_uint = 9;

type Handle = *mut c_void;

/// nvmlMemory_v2_t
#[repr(C)]
pub struct Memory {
    version: c_uint,
    total: c_ulonglong,
    reserved: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

/// nvmlProcessInfo_v2_t, which is what the functions of version 3 fill.
#[repr(C)]
pub struct Process {
    pid: c_uint,
    used_gpu_memory: c_ulonglong,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// Runs `answer` with the card behind a handle; its error is the return code.
fn of(device: Handle, question: &str, answer: impl FnOnce(&Card) -> Result<(), c_uint>) -> c_uint {
    let Some(scenario) = Scenario::read() else { return DRIVER_NOT_LOADED };
    let Some(card) = (device as usize).checked_sub(1).and_then(|at| scenario.cards.get(at)) else {
        return INVALID_ARGUMENT;
    };
    match card.fails(question) {
        Some(code) => code,
        None => answer(card).err().unwrap_or(SUCCESS),
    }
}

/// # Safety
/// As nvml.h says: `to` has room for `length` bytes.
unsafe fn put_text(text: &str, to: *mut c_char, length: c_uint) -> Result<(), c_uint> {
    if text.len() >= length as usize {
        return Err(INSUFFICIENT_SIZE);
    }
    // SAFETY: it fits with its end.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), to, text.len());
        *to.add(text.len()) = 0;
    }
    Ok(())
}

/// # Safety
/// `to` points to a number.
unsafe fn put_number(card: &Card, key: &str, to: *mut c_uint) -> Result<(), c_uint> {
    let number = card.number(key).and_then(|n| c_uint::try_from(n).ok()).ok_or(NOT_SUPPORTED)?;
    // SAFETY: the caller's.
    unsafe { *to = number };
    Ok(())
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlInit_v2() -> c_uint {
    Scenario::read().map_or(DRIVER_NOT_LOADED, |scenario| scenario.init)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvmlShutdown() -> c_uint {
    SUCCESS
}

/// # Safety
/// As nvml.h says, like all that follow.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetDriverVersion(version: *mut c_char, length: c_uint) -> c_uint {
    let Some(scenario) = Scenario::read() else { return DRIVER_NOT_LOADED };
    // SAFETY: the caller's buffer.
    unsafe { put_text(&scenario.driver, version, length) }.err().unwrap_or(SUCCESS)
}

/// # Safety
/// `count` points to a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCount_v2(count: *mut c_uint) -> c_uint {
    let Some(scenario) = Scenario::read() else { return DRIVER_NOT_LOADED };
    // SAFETY: the caller's.
    unsafe { *count = scenario.cards.len() as c_uint };
    SUCCESS
}

/// # Safety
/// `device` points to a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: *mut Handle) -> c_uint {
    let handle = (index as usize + 1) as Handle;
    // SAFETY: the caller's.
    unsafe { *device = handle };
    of(handle, "handle", |_| Ok(()))
}

/// # Safety
/// `name` has room for `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetName(device: Handle, name: *mut c_char, length: c_uint) -> c_uint {
    // SAFETY: the caller's buffer.
    of(device, "name", |card| unsafe { put_text(card.text("name").ok_or(NOT_SUPPORTED)?, name, length) })
}

/// # Safety
/// `uuid` has room for `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetUUID(device: Handle, uuid: *mut c_char, length: c_uint) -> c_uint {
    // SAFETY: the caller's buffer.
    of(device, "uuid", |card| unsafe { put_text(card.text("uuid").ok_or(NOT_SUPPORTED)?, uuid, length) })
}

/// # Safety
/// `memory` points to the structure of version 2.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMemoryInfo_v2(device: Handle, memory: *mut Memory) -> c_uint {
    of(device, "memory", |card| {
        let total = card.number("total").ok_or(NOT_SUPPORTED)?;
        let (reserved, used) = (card.number("reserved").unwrap_or(0), card.number("used").unwrap_or(0));
        // SAFETY: the caller's structure, whose version it set.
        let memory = unsafe { &mut *memory };
        if memory.version != (size_of::<Memory>() | 2 << 24) as c_uint {
            return Err(INVALID_ARGUMENT);
        }
        let free = total.saturating_sub(reserved + used);
        (memory.total, memory.reserved, memory.free, memory.used) = (total, reserved, free, used);
        Ok(())
    })
}

/// # Safety
/// Both point to numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCudaComputeCapability(
    device: Handle,
    major: *mut c_int,
    minor: *mut c_int,
) -> c_uint {
    of(device, "capability", |card| {
        let (a, b) = card.text("capability").and_then(|text| text.split_once('.')).ok_or(NOT_SUPPORTED)?;
        // SAFETY: the caller's.
        unsafe {
            *major = a.parse().map_err(|_| NOT_SUPPORTED)?;
            *minor = b.parse().map_err(|_| NOT_SUPPORTED)?;
        }
        Ok(())
    })
}

/// # Safety
/// `celsius` points to a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetTemperature(device: Handle, _sensor: c_uint, celsius: *mut c_uint) -> c_uint {
    // SAFETY: the caller's.
    of(device, "temperature", |card| unsafe { put_number(card, "temperature", celsius) })
}

/// # Safety
/// `milliwatts` points to a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetPowerUsage(device: Handle, milliwatts: *mut c_uint) -> c_uint {
    // SAFETY: the caller's.
    of(device, "power", |card| unsafe { put_number(card, "power", milliwatts) })
}

/// # Safety
/// `milliwatts` points to a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetEnforcedPowerLimit(device: Handle, milliwatts: *mut c_uint) -> c_uint {
    // SAFETY: the caller's.
    of(device, "limit", |card| unsafe { put_number(card, "limit", milliwatts) })
}

/// # Safety
/// `reasons` points to a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCurrentClocksThrottleReasons(
    device: Handle,
    reasons: *mut c_ulonglong,
) -> c_uint {
    of(device, "throttle", |card| {
        // SAFETY: the caller's.
        unsafe { *reasons = card.number("throttle").unwrap_or(0) };
        Ok(())
    })
}

/// As nvml.h says: without room for all it tells how many there are.
unsafe fn put_processes(all: &[(u32, u64)], count: *mut c_uint, to: *mut Process) -> Result<(), c_uint> {
    // SAFETY: the caller's number, and its array of so many.
    let room = unsafe { std::mem::replace(&mut *count, all.len() as c_uint) } as usize;
    if all.is_empty() {
        return Ok(());
    }
    if to.is_null() || room < all.len() {
        return Err(INSUFFICIENT_SIZE);
    }
    for (at, (pid, bytes)) in all.iter().enumerate() {
        let none = c_uint::MAX;
        let process = Process { pid: *pid, used_gpu_memory: *bytes, gpu_instance: none, compute_instance: none };
        // SAFETY: within the array.
        unsafe { to.add(at).write(process) };
    }
    Ok(())
}

/// # Safety
/// `processes` is null or has room for `count`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(
    device: Handle,
    count: *mut c_uint,
    processes: *mut Process,
) -> c_uint {
    // SAFETY: the caller's.
    of(device, "compute", |card| unsafe { put_processes(&card.compute, count, processes) })
}

/// # Safety
/// `processes` is null or has room for `count`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetGraphicsRunningProcesses_v3(
    device: Handle,
    count: *mut c_uint,
    processes: *mut Process,
) -> c_uint {
    // SAFETY: the caller's.
    of(device, "graphics", |card| unsafe { put_processes(&card.graphics, count, processes) })
}
