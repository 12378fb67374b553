//! What the benchmarks must show on any machine, however busy.

use std::process::Command;

#[test]
fn the_ledger_is_right_to_five_percent() {
    let output = Command::new(env!("CARGO_BIN_EXE_ledger")).output().unwrap();
    let said = [output.stdout, output.stderr].map(|text| String::from_utf8_lossy(&text).into_owned()).concat();
    assert!(output.status.success() && said.contains("95th percentile"), "{said}");
}
