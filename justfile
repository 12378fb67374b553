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

bench:
    cargo bench --package cfq-benches
