"""Claude Code and Codex, as their users run them, against `cfq mcp`, without a network.

Usage: python editors.py CFQ NODE_MODULES, with the path of the cfq program and a folder in which npm installed
`@anthropic-ai/claude-code` and `@openai/codex`. `just mcp-clients` prepares both. `cfq mcp install` configures the
clients. A scripted model plays their AI (scripted_ai.py); cfq works with its small default model.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import scripted_ai
from python_client import private_cluster, sample_repository

PROMPT = "Delegate the task to cfq, follow it to its end, and read its artifact."
LIMIT_S = 400


def claude_code(modules: Path, url: str) -> tuple[list[str], dict]:
    command = [str(modules / ".bin/claude"), "-p", PROMPT, "--allowedTools", "mcp__cfq"]
    quiet = {"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "DISABLE_AUTOUPDATER": "1"}
    return command, {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "scripted", **quiet}


def codex(modules: Path, url: str) -> tuple[list[str], dict]:
    provider = f'{{ name = "scripted", base_url = "{url}/v1", wire_api = "responses", env_key = "SCRIPTED_KEY" }}'
    settings = ["model_provider=scripted", f"model_providers.scripted={provider}"]
    flags = [flag for setting in settings for flag in ("-c", setting)]
    # Nothing but the tools of cfq is called.
    flags += ["--dangerously-bypass-approvals-and-sandbox", "--model", "scripted"]
    return [str(modules / ".bin/codex"), "exec", *flags, PROMPT], {"SCRIPTED_KEY": "scripted"}


def run(name: str, client, cfq: Path, modules: Path, work: Path, environment: dict) -> None:
    repo = sample_repository(work)
    ai = scripted_ai.start()
    command, own = client(modules, f"http://127.0.0.1:{ai.server_address[1]}")
    environment = {**environment, **own, "HOME": str(work)}
    environment.pop("CODEX_HOME", None)
    subprocess.run([cfq, "mcp", "install", "--client", name], env=environment, check=True)
    done = subprocess.run(
        command, cwd=repo, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S
    )
    assert done.returncode == 0, f"{name}: {done}"
    assert ai.calls[0] == "execute_task_spec" and ai.calls[-2:] == ["get_artifact", "final_handoff_archive"], f"{name}: {ai.calls}: {done}"
    assert Path(ai.last_result["file"]).stat().st_size == ai.last_result["bytes"], f"{name}: {ai.last_result}"
    listed = subprocess.run([cfq, "--json", "ls"], env=environment, check=True, capture_output=True, text=True).stdout
    state = json.loads(listed)["tasks"][0]["state"]
    assert state in ("merged", "accepted"), f"{name}: {listed}"
    print(f"{name}: {len(ai.calls)} calls ({', '.join(dict.fromkeys(ai.calls))}), the task is {state}")


def main() -> None:
    cfq, modules = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    with tempfile.TemporaryDirectory() as folder, private_cluster(cfq, Path(folder)) as environment:
        for name, client in {"claude-code": claude_code, "codex": codex}.items():
            work = Path(folder) / name
            work.mkdir()
            run(name, client, cfq, modules, work, environment)


if __name__ == "__main__":
    main()
