# What CI runs is exactly this.

# Everything: tests, format, lints, licences, demo with both sources of Postgres and NATS
ci:
    .ci/run

test:
    cargo test --workspace

fmt:
    cargo fmt --all --check

clippy:
    cargo clippy --workspace --all-targets -- -D warnings

deny:
    cargo deny check bans licenses sources

demo:
    cargo run -- demo

# For NVIDIA GPUs, in a copy, on any x86-64 Linux: docs/gpu.md
cuda-build:
    inference-node/cuda/build

# The same, and what can be known without a card
cuda-check:
    inference-node/cuda/check

# After a change to a checked query or a migration
prepare-sqlx:
    scheduler/prepare-sqlx.sh

# Against a running server: CFQ_URL and CFQ_TOKEN name it; REPO is any git repository
bench REPO:
    cargo build --package cfq --package cfq-benches
    cargo run --package cfq-benches --bin submit_latency -- target/debug/cfq {{REPO}}
    cargo run --package cfq-benches --bin seeds -- {{REPO}} 20
    cargo run --package cfq-benches --bin start_up -- target/debug/cfq

# The engine; benches/engine says what ARGS there are (`--llama-cpp PYTHON` for rates beside llama.cpp's)
bench-engine *ARGS:
    benches/engine {{ARGS}}

# GGUF headers for some seconds, from the small models' own; wants `cargo install cargo-fuzz`
fuzz SECONDS="300":
    mkdir -p inference-node/fuzz/corpus/gguf
    for f in inference-node/engine/tests/fixtures/models/*/model.gguf; do head -c 60000 $f > inference-node/fuzz/corpus/gguf/$(basename $(dirname $f)); done
    cargo fuzz run --fuzz-dir inference-node/fuzz --sanitizer none gguf inference-node/fuzz/corpus/gguf -- -max_total_time={{SECONDS}} -rss_limit_mb=2048 -malloc_limit_mb=512
