//! Fuzz target for task files and loop declarations: any YAML must result in a value or an error.

#![no_main]

use cfq_proto::task::TaskSpec;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &str| {
    let _ = cfq_transformer::parse("fuzz.yaml", text);
    if let Ok(value) = serde_saphyr::from_str::<serde_json::Value>(text) {
        let _ = serde_json::from_value::<TaskSpec>(value);
    }
});
