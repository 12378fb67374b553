#!/bin/sh
# Runs the official OpenAI clients for Python and Node, and the compliance tests of `llm-comply`, against `/v1` of a
# private cluster with cfq's small default model. It installs them from PyPI and npm below the user's cache folder, and
# needs python3, node 20 or newer, and npm.
set -eu
cd "$(dirname "$0")/../.."
cache="${XDG_CACHE_HOME:-$HOME/.cache}/cfq-openai-clients"
mkdir -p "$cache/npm"
[ -x "$cache/python/bin/python" ] || python3 -m venv "$cache/python"
"$cache/python/bin/pip" install --quiet 'openai>=3.57,<4' 'llm-comply==0.5.0'
npm install --prefix "$cache/npm" --no-audit --no-fund --silent 'openai@7'

cargo build --package cfq
target="$(cargo metadata --format-version 1 --no-deps | python3 -c 'import json, sys; print(json.load(sys.stdin)["target_directory"])')"
cfq="$target/debug/cfq"

work="$(mktemp -d)"
chmod 755 "$work"
export CFQ_DATA="$work/data" CFQ_CONFIG="$work/config"
stop() {
    "$cfq" down >"$work/down.log" 2>&1 || cat "$work/down.log" >&2
    rm -rf "$work"
}
trap stop EXIT
trap 'exit 130' INT TERM
"$cfq" up -d --bind 127.0.0.1:7719
url=http://127.0.0.1:7719/v1
key="$(cat "$CFQ_DATA/keys/api.token")"

"$cache/python/bin/python" tests/openai-clients/python_client.py "$url" "$key"
node tests/openai-clients/node_client.mjs "$url" "$key" "$cache/npm"
# All tests but two: cfq takes no images, and the small model does not reason.
tests=chat-basic-response,chat-system-prompt,chat-multi-turn,chat-tool-calling,chat-streaming-response
tests="$tests,chat-streaming-usage,chat-error-handling"
"$cache/python/bin/llm-comply" --format openai-chat -u "$url" -k "$key" -m alpha -f "$tests"
