//! A fake of NVIDIA's management library (NVML) with the same binary interface, for machines without a GPU.
//!
//! It is installed as `libnvidia-ml.so.1` in a folder of `LD_LIBRARY_PATH`, so that it is found before the real
//! library. It implements the functions that cfq calls; [`scenario`] defines the values they return. Signatures,
//! structures and return codes are those of nvml.h. The handle of a GPU is its index plus one.
#![allow(unsafe_code, reason = "the whole crate is a foreign interface")]

pub mod scenario;

use std::ffi::{c_char, c_int, c_uint, c_ulonglong, c_void};

use scenario::{FakeGpu, Scenario};

const SUCCESS: c_uint = 0;
const INVALID_ARGUMENT: c_uint = 2;
const NOT_SUPPORTED: c_uint = 3;
const INSUFFICIENT_SIZE: c_uint = 7;
const DRIVER_NOT_LOADED: c_uint = 9;

type Handle = *mut c_void;

/// The structure `nvmlMemory_v2_t` of nvml.h: memory of a GPU, in bytes.
#[repr(C)]
pub struct NvmlMemory {
    version: c_uint,
    total: c_ulonglong,
    reserved: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

/// The structure `nvmlProcessInfo_v2_t` of nvml.h, which the functions with the suffix `_v3` fill.
#[repr(C)]
pub struct NvmlProcess {
    pid: c_uint,
    used_gpu_memory: c_ulonglong,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

/// Calls `answer` with the GPU of a handle. Returns the error code that the scenario sets for this query, else the
/// error code of `answer`, else `SUCCESS`.
fn query(device: Handle, query: &str, answer: impl FnOnce(&FakeGpu) -> Result<(), c_uint>) -> c_uint {
    let Some(scenario) = Scenario::read() else { return DRIVER_NOT_LOADED };
    let Some(gpu) = (device as usize).checked_sub(1).and_then(|at| scenario.gpus.get(at)) else {
        return INVALID_ARGUMENT;
    };
    match gpu.error_of(query) {
        Some(code) => code,
        None => answer(gpu).err().unwrap_or(SUCCESS),
    }
}

/// # Safety
/// As in nvml.h: `to` points to at least `length` bytes.
unsafe fn put_text(text: &str, to: *mut c_char, length: c_uint) -> Result<(), c_uint> {
    if text.len() >= length as usize {
        return Err(INSUFFICIENT_SIZE);
    }
    // SAFETY: the text and its terminating zero fit.
    unsafe {
        std::ptr::copy_nonoverlapping(text.as_ptr().cast(), to, text.len());
        *to.add(text.len()) = 0;
    }
    Ok(())
}

/// # Safety
/// `to` points to a number.
unsafe fn put_number(gpu: &FakeGpu, key: &str, to: *mut c_uint) -> Result<(), c_uint> {
    let number = gpu.number(key).and_then(|n| c_uint::try_from(n).ok()).ok_or(NOT_SUPPORTED)?;
    // SAFETY: guaranteed by the caller.
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
/// As in nvml.h, like all functions below.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlSystemGetDriverVersion(version: *mut c_char, length: c_uint) -> c_uint {
    let Some(scenario) = Scenario::read() else { return DRIVER_NOT_LOADED };
    // SAFETY: the caller guarantees the buffer and its length.
    unsafe { put_text(&scenario.driver, version, length) }.err().unwrap_or(SUCCESS)
}

/// # Safety
/// `count` points to a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCount_v2(count: *mut c_uint) -> c_uint {
    let Some(scenario) = Scenario::read() else { return DRIVER_NOT_LOADED };
    // SAFETY: guaranteed by the caller.
    unsafe { *count = scenario.gpus.len() as c_uint };
    SUCCESS
}

/// # Safety
/// `device` points to a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, device: *mut Handle) -> c_uint {
    let handle = (index as usize + 1) as Handle;
    // SAFETY: guaranteed by the caller.
    unsafe { *device = handle };
    query(handle, "handle", |_| Ok(()))
}

/// # Safety
/// `name` points to at least `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetName(device: Handle, name: *mut c_char, length: c_uint) -> c_uint {
    // SAFETY: the caller guarantees the buffer and its length.
    query(device, "name", |gpu| unsafe { put_text(gpu.text("name").ok_or(NOT_SUPPORTED)?, name, length) })
}

/// # Safety
/// `uuid` points to at least `length` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetUUID(device: Handle, uuid: *mut c_char, length: c_uint) -> c_uint {
    // SAFETY: the caller guarantees the buffer and its length.
    query(device, "uuid", |gpu| unsafe { put_text(gpu.text("uuid").ok_or(NOT_SUPPORTED)?, uuid, length) })
}

/// # Safety
/// `memory` points to the structure of version 2.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetMemoryInfo_v2(device: Handle, memory: *mut NvmlMemory) -> c_uint {
    query(device, "memory", |gpu| {
        let total = gpu.number("total").ok_or(NOT_SUPPORTED)?;
        let (reserved, used) = (gpu.number("reserved").unwrap_or(0), gpu.number("used").unwrap_or(0));
        // SAFETY: the caller guarantees a structure of this type, and has set its version.
        let memory = unsafe { &mut *memory };
        if memory.version != (size_of::<NvmlMemory>() | 2 << 24) as c_uint {
            return Err(INVALID_ARGUMENT);
        }
        let free = total.saturating_sub(reserved + used);
        (memory.total, memory.reserved, memory.free, memory.used) = (total, reserved, free, used);
        Ok(())
    })
}

/// # Safety
/// `major` and `minor` point to numbers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCudaComputeCapability(
    device: Handle,
    major: *mut c_int,
    minor: *mut c_int,
) -> c_uint {
    query(device, "capability", |gpu| {
        let (a, b) = gpu.text("capability").and_then(|text| text.split_once('.')).ok_or(NOT_SUPPORTED)?;
        // SAFETY: guaranteed by the caller.
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
    // SAFETY: guaranteed by the caller.
    query(device, "temperature", |gpu| unsafe { put_number(gpu, "temperature", celsius) })
}

/// # Safety
/// `milliwatts` points to a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetPowerUsage(device: Handle, milliwatts: *mut c_uint) -> c_uint {
    // SAFETY: guaranteed by the caller.
    query(device, "power", |gpu| unsafe { put_number(gpu, "power", milliwatts) })
}

/// # Safety
/// `milliwatts` points to a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetEnforcedPowerLimit(device: Handle, milliwatts: *mut c_uint) -> c_uint {
    // SAFETY: guaranteed by the caller.
    query(device, "limit", |gpu| unsafe { put_number(gpu, "limit", milliwatts) })
}

/// # Safety
/// `reasons` points to a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetCurrentClocksThrottleReasons(
    device: Handle,
    reasons: *mut c_ulonglong,
) -> c_uint {
    query(device, "throttle", |gpu| {
        // SAFETY: guaranteed by the caller.
        unsafe { *reasons = gpu.number("throttle").unwrap_or(0) };
        Ok(())
    })
}

/// As in nvml.h: if the array is too short, returns `INSUFFICIENT_SIZE` and sets `count` to the number of processes.
///
/// # Safety
/// `count` points to a number, and `to` is null or points to that many elements.
unsafe fn put_processes(all: &[(u32, u64)], count: *mut c_uint, to: *mut NvmlProcess) -> Result<(), c_uint> {
    // SAFETY: guaranteed by the caller.
    let capacity = unsafe { std::mem::replace(&mut *count, all.len() as c_uint) } as usize;
    if all.is_empty() {
        return Ok(());
    }
    if to.is_null() || capacity < all.len() {
        return Err(INSUFFICIENT_SIZE);
    }
    for (at, (pid, bytes)) in all.iter().enumerate() {
        let none = c_uint::MAX;
        let process = NvmlProcess { pid: *pid, used_gpu_memory: *bytes, gpu_instance: none, compute_instance: none };
        // SAFETY: within the array.
        unsafe { to.add(at).write(process) };
    }
    Ok(())
}

/// # Safety
/// `processes` is null or points to `count` elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(
    device: Handle,
    count: *mut c_uint,
    processes: *mut NvmlProcess,
) -> c_uint {
    // SAFETY: guaranteed by the caller.
    query(device, "compute", |gpu| unsafe { put_processes(&gpu.compute, count, processes) })
}

/// # Safety
/// `processes` is null or points to `count` elements.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn nvmlDeviceGetGraphicsRunningProcesses_v3(
    device: Handle,
    count: *mut c_uint,
    processes: *mut NvmlProcess,
) -> c_uint {
    // SAFETY: guaranteed by the caller.
    query(device, "graphics", |gpu| unsafe { put_processes(&gpu.graphics, count, processes) })
}
