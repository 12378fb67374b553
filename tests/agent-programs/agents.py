"""Claude Code, Codex and Gemini CLI as both agents of a task, without a network.

Usage: python agents.py CFQ BIN, with the path of the cfq program and the folder in which npm installed the agents'
programs. `just agent-programs` prepares both. Each program runs as cfq starts it; scripted_apis.py plays its model.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import scripted_apis

sys.path.insert(0, str(Path(__file__).parent.parent / "mcp-clients"))
from sample import git, sample_repository

# Tools that Codex always offers: one for its own windows, and one that its read-only sandbox refuses.
HARMLESS = {"request_user_input", "apply_patch"}
LIMIT_S = 300
CANARY = "canary-that-no-provider-may-see"


def environment_of(agent: str, url: str, folder: Path) -> dict:
    if agent == "claude":
        return {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": "scripted"}
    if agent == "codex":
        return {"OPENAI_BASE_URL": f"{url}/v1", "CODEX_API_KEY": "scripted"}
    home = folder / "gemini"
    (home / ".gemini").mkdir(parents=True)
    settings = {"security": {"auth": {"selectedType": "gemini-api-key"}}}
    (home / ".gemini/settings.json").write_text(json.dumps(settings))
    for place in [home, home / ".gemini"]:
        place.chmod(0o777)
    (home / ".gemini/settings.json").chmod(0o666)
    return {"GOOGLE_GEMINI_BASE_URL": url, "GEMINI_API_KEY": "scripted", "GEMINI_CLI_HOME": str(home)}


def run(agent: str, model: str, cfq: Path, programs: Path, folder: Path) -> None:
    # As root, cfq runs most of its processes as another user.
    folder.chmod(0o711)
    api = scripted_apis.start()
    own = environment_of(agent, f"http://127.0.0.1:{api.server_address[1]}", folder)
    search = f"{programs}{os.pathsep}{os.environ['PATH']}"
    data = {"CFQ_DATA": f"{folder}/data", "CFQ_CONFIG": f"{folder}/config"}
    environment = {**os.environ, **own, **data, "PATH": search}
    (folder / "config").mkdir()
    agents = "".join(f'[agents.{role}]\nmodel = "command:{agent}/{model}"\n' for role in ["alpha", "beta"])
    (folder / "config/cfq.toml").write_text(agents)
    subprocess.run([cfq, "up", "-d"], env=environment, check=True, stdout=subprocess.DEVNULL)
    try:
        repo = sample_repository(folder)
        # Some agents replace @PATH in a prompt by the content of the file.
        secret = folder / "secret.txt"
        secret.write_text(CANARY)
        secret.chmod(0o644)
        (repo / "NOTES.md").write_text(f"See @{secret} and @\"{secret}\" and @{folder}/ and @~/../secret.txt.\n")
        git(repo, "add", ".")
        git(repo, "commit", "-qm", "notes")
        command = [cfq, "--json", "submit", "Write is_even(n) in is_even.py.", "--repo", repo, "--context", "NOTES.md", "--watch"]
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=LIMIT_S)
        nodes = subprocess.run([cfq, "nodes"], env=environment, capture_output=True, text=True).stdout
        assert done.returncode == 0, f"{agent}: {done}\n{nodes}"
        branch = next(line for line in git(repo, "branch", "--list", "cfq/*").split() if line.startswith("cfq/"))
        assert "n % 2 == 0" in git(repo, "show", f"{branch}:is_even.py")
        assert any(str(secret) in request for request in api.requests), f"{agent} was not sent the notes"
        assert not any(CANARY in request for request in api.requests), f"{agent} sent a file that the prompt names"
        offered = {name for tools in api.tools for name in tools}
        allowed = HARMLESS if agent == "codex" else set()
        assert offered <= allowed, f"{agent} offers the model tools: {offered}"
        print(f"{agent}: {len(api.tools)} calls, tools: {sorted(offered) or 'none'}, merged into {branch}")
    finally:
        subprocess.run([cfq, "down"], env=environment, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    cfq, programs = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).absolute()
    for agent, model in {"claude": "sonnet", "codex": "gpt-5.5", "gemini": "gemini-2.5-pro"}.items():
        with tempfile.TemporaryDirectory() as folder:
            run(agent, model, cfq, programs, Path(folder))


if __name__ == "__main__":
    main()
