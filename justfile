# The commands that CI runs

# Everything: tests, format, lints, licences, demo with both sources of Postgres and NATS
ci:
    .ci/run

test:
    cargo test --workspace

# Machines that join, are lost and move, in network namespaces; needs root
cluster-test:
    cargo test --package cfq-tests --test suite joining

fmt:
    cargo fmt --all --check

clippy:
    cargo clippy --workspace --all-targets -- -D warnings
    cargo clippy --package cfq --features mcp-fixtures -- -D warnings

deny:
    cargo deny check bans licenses sources

demo:
    cargo run -- demo

# Build with CUDA in a copy of the repository, on any x86-64 Linux, with or without a GPU
cuda-build:
    inference-node/cuda/build

# Check the CUDA build without a GPU: kernels in an emulator, build, size, start
cuda-check:
    inference-node/cuda/check

# Regenerate the data of compile-time checked queries, after a change of a query or a migration
prepare-sqlx:
    scheduler/prepare-sqlx.sh

# Benchmark a running server, given by CFQ_URL and CFQ_TOKEN; REPO is any git repository
bench REPO:
    cargo build --package cfq --package cfq-benches
    cargo run --package cfq-benches --bin submit_latency -- target/debug/cfq {{REPO}}
    cargo run --package cfq-benches --bin seeds -- {{REPO}} 20
    cargo run --package cfq-benches --bin start_up -- target/debug/cfq

# Benchmark `cfq map` on 10,000 generated files
bench-repo-map:
    cargo build --package cfq --package cfq-benches
    cargo run --package cfq-benches --bin repo_map -- target/debug/cfq

# Simulate the queue with random faults, for example `just simulate-faults --seeds 100 --hours 1`
simulate-faults *ARGS:
    cargo run --release --package cfq-simulator --bin fault_simulation -- {{ARGS}}

# Benchmark the engine; benches/engine lists ARGS, for example `--llama-cpp PYTHON` to compare with llama.cpp
bench-engine *ARGS:
    benches/engine {{ARGS}}

# Inject random faults into a cluster for SECONDS while tasks run; docs/how-to/find-faults.md explains the result
chaos SECONDS="240" SEED="1":
    cargo run --package cfq-tests --bin chaos -- {{SECONDS}} {{SEED}}

# Run the review loop on problems with tests (HumanEval's format) and check what it accepts; with `--model`, on the small
# model: docs/benchmarks.md
checked-loop PROBLEMS SEED="1" *ARGS:
    cargo run --package cfq-tests --bin checked_loop -- {{PROBLEMS}} {{SEED}} {{ARGS}}

# Fuzz a parser for SECONDS; tests/fuzz lists the TARGETs; needs `cargo install cargo-fuzz`
fuzz TARGET="gguf" SECONDS="300":
    tests/fuzz {{TARGET}} {{SECONDS}}

# Run the thread pool's tests in Miri; needs `rustup component add miri --toolchain nightly`
miri:
    MIRIFLAGS="-Zmiri-ignore-leaks -Zmiri-tree-borrows" RAYON_NUM_THREADS=3 cargo +nightly miri test --manifest-path inference-node/miri/Cargo.toml

# Run the thread pool's tests under ThreadSanitizer; needs `rustup component add rust-src --toolchain nightly`
tsan:
    RUSTFLAGS=-Zsanitizer=thread cargo +nightly test --lib -Zbuild-std --target x86_64-unknown-linux-gnu --manifest-path inference-node/miri/Cargo.toml

# Run real MCP clients (Python client, inspector, Claude Code, Codex) against `cfq mcp`; installs them from PyPI and npm
mcp-clients:
    tests/mcp-clients/run.sh

# Run Claude Code, Codex and Gemini CLI as models of cfq, with scripted providers; installs them from npm
agent-programs:
    tests/agent-programs/run.sh

# Run the official MCP conformance suite against `/mcp`, in all scenarios that it requires; installs it from npm
mcp-conformance:
    tests/mcp-clients/conformance.sh

# Run the official OpenAI clients (Python, Node) and the compliance tests of llm-comply against `/v1`; installs them
openai-clients:
    tests/openai-clients/run.sh
