//! Benchmarks whose result does not depend on the machine or its load.

use std::process::Command;

#[test]
fn memory_estimate_is_within_five_percent() {
    let output = Command::new(env!("CARGO_BIN_EXE_memory_estimate")).output().unwrap();
    let text = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    assert!(output.status.success() && text.contains("95th percentile"), "{text}");
}
