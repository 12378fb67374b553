# What CI runs is exactly this.

# Everything: tests, format, lints, licences, demo with both kinds of engines
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

# After a change to a checked query or a migration
prepare-sqlx:
    scheduler/prepare-sqlx.sh

# Against a running server: CFQ_URL and CFQ_TOKEN name it; REPO is any git repository
bench REPO:
    cargo build --package cfq --package cfq-benches
    cargo run --package cfq-benches --bin submit_latency -- target/debug/cfq {{REPO}}
    cargo run --package cfq-benches --bin seeds -- {{REPO}} 20
    cargo run --package cfq-benches --bin start_up -- target/debug/cfq
