//! Only with the `cuda` feature: our own kernel to PTX, and CUDA's runtime into the program.
//!
//! PTX for compute capability 8.0 runs on every card since, the driver translates it. candle's kernels ask for the shared
//! libcudart; a linker script of that name answers with the static one, so that the finished program starts on machines
//! that have nothing of CUDA.

use std::path::PathBuf;
use std::process::Command;
use std::{env, fs};

const KERNEL: &str = "src/engine/candle/card/paged.cu";

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return Ok(());
    }
    println!("cargo:rerun-if-changed={KERNEL}");
    println!("cargo:rerun-if-env-changed=CUDA_HOME");
    println!("cargo:rerun-if-env-changed=NVCC");
    let home = PathBuf::from(env::var_os("CUDA_HOME").ok_or("CUDA_HOME names no CUDA toolkit: see docs/gpu.md")?);
    let out = PathBuf::from(env::var_os("OUT_DIR").ok_or("no OUT_DIR")?);

    let nvcc = env::var_os("NVCC").map_or_else(|| home.join("bin/nvcc"), PathBuf::from);
    let compiled = Command::new(&nvcc)
        .args(["-std=c++17", "-O3", "--ptx", "-gencode=arch=compute_80,code=compute_80", KERNEL, "-o"])
        .arg(out.join("paged.ptx"))
        .status()
        .map_err(|error| format!("{} does not start: {error}", nvcc.display()))?;
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
