//! Build script. With the `cuda` feature, it compiles our kernels to PTX and links CUDA's static runtime; without, it
//! does nothing.
//!
//! PTX for compute capability 8.0 runs on all later GPUs, because the driver translates it. candle's kernels link to
//! the shared library libcudart.so. This script creates a linker script with that name, which makes the linker use the
//! static library instead, so that the program starts on machines without CUDA.

use std::path::PathBuf;
use std::process::Command;
use std::{env, fs};

const KERNEL: &str = "src/backend/cuda/paged.cu";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return Ok(());
    }
    println!("cargo:rerun-if-changed={KERNEL}");
    println!("cargo:rerun-if-env-changed=CUDA_HOME");
    println!("cargo:rerun-if-env-changed=NVCC");
    let home = env::var_os("CUDA_HOME")
        .ok_or("CUDA_HOME is not set to a CUDA toolkit: see docs/how-to/run-on-an-nvidia-gpu.md")?;
    let home = PathBuf::from(home);
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);

    let nvcc = env::var_os("NVCC").map_or_else(|| home.join("bin/nvcc"), PathBuf::from);
    let compiled = Command::new(&nvcc)
        .args(["-std=c++17", "-O3", "--ptx", "-gencode=arch=compute_80,code=compute_80", KERNEL, "-o"])
        .arg(out.join("paged.ptx"))
        .status()
        .map_err(|error| format!("cannot run {}: {error}", nvcc.display()))?;
    if !compiled.success() {
        return Err(format!("nvcc cannot compile {KERNEL}").into());
    }

    let archive = ["lib64", "lib"].map(|folder| home.join(folder).join("libcudart_static.a"));
    let archive = archive.iter().find(|path| path.exists()).ok_or("CUDA_HOME has no libcudart_static.a")?;
    let script = format!("INPUT({} AS_NEEDED(-lrt -ldl -lpthread))\n", archive.display());
    fs::write(out.join("libcudart.so"), script)?;
    println!("cargo:rustc-link-search=native={}", out.display());
    Ok(())
}
