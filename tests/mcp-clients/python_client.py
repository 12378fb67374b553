"""The official Python client against `cfq mcp` and `/mcp`: lists and calls every tool, with and without a handshake.

Usage: python python_client.py CFQ, with the path of the cfq program, in an environment with the package `mcp` 2.3 or
newer. It starts a private cluster in a temporary folder with cfq's small default model, and stops it. The package checks
every result against the tool's output schema. `just mcp-clients` prepares the environment and runs it.
"""

import asyncio
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx2
from mcp import Client, StdioServerParameters
from mcp.client.streamable_http import streamable_http_client

from sample import sample_repository

ERAS = {"initialize": "legacy", "2026-07-28": "2026-07-28"}


class Caller:
    """Calls tools, and remembers which ones were called."""

    def __init__(self, client: Client):
        self.client = client
        self.called: set[str] = set()

    async def __call__(self, tool: str, **arguments) -> dict:
        self.called.add(tool)
        result = await self.client.call_tool(tool, arguments)
        assert not result.is_error, f"{tool}: {result.content}"
        return result.structured_content


async def follow(call: Caller, session: str) -> dict:
    """Waits until the task ended or needs a decision."""
    after = None
    while True:
        known = {} if after is None else {"after_event": after}
        progress = await call("get_progress_summary", session_id=session, wait_s=45, **known)
        if progress["ended"] or progress["needs_decision"]:
            return progress
        after = progress["last_event"]


def archive_bytes(archive: dict, headers: dict) -> bytes:
    if "file" in archive:
        return Path(archive["file"]).read_bytes()
    return httpx2.get(archive["url"], headers=headers).raise_for_status().content


async def run_era(server, era: str, mode: str, repo: Path, headers: dict) -> None:
    async with Client(server, mode=mode) as client:
        tools = {tool.name for tool in (await client.list_tools()).tools}
        call = Caller(client)
        began = time.monotonic()
        accepted = await call(
            "execute_task_spec",
            spec={
                "description": "Write a Python function is_even(n) in is_even.py that returns True if n is even.",
                "language": "python",
                "repo": str(repo),
            },
            max_iterations=2,
        )
        accepted_ms = (time.monotonic() - began) * 1000
        session = accepted["session_id"]
        progress = await follow(call, session)
        if progress["needs_decision"]:
            question = (await call("list_questions"))["questions"][0]
            assert question["session_id"] == session, question
            answer = {"type": "accept_best_effort"}
            if "accept_best_effort" not in question["available_actions"]:
                answer = {"type": "abort"}
            named = {"session_id": session, "question_id": question["question_id"], "action": answer}
            await call("resolve_escalation", **named)
            await call("answer_question", **named)
            progress = await follow(call, session)
        assert progress["ended"], progress
        artifact = await call("get_artifact", session_id=session)
        # A small model may write nothing that can be used; then there is no commit.
        if "commit" in artifact:
            assert artifact["untrusted_content"]["diff"].startswith("diff --git"), artifact
        archive = await call("final_handoff_archive", session_id=session)
        assert hashlib.sha256(archive_bytes(archive, headers)).hexdigest() == archive["sha256"], archive
        if "result" in progress:
            subprocess.run(progress["result"]["merge_command"], shell=True, check=True, capture_output=True)
        second = await call("submit_task", task={"description": "Write a haiku about queues in haiku.txt.", "repo": str(repo)})
        await call("list_tasks", limit=5)
        await call("cancel_task", session_id=second["session_id"])
        if "get_repo_map" in tools:
            mapped = await call("get_repo_map", path=str(repo))
            assert mapped["untrusted_content"]["map"], mapped
            policies = await call("read_org_policies", policy_type="security", path=str(repo))
            assert policies["default_policy"], policies
        if "commit" in artifact:
            review = await call("run_critic_review", artifact_id=artifact["artifact_id"], review_depth="quick")
            reviewed = await follow(call, review["session_id"])
            assert reviewed["state"] in ("reviewed", "failed"), reviewed
        call.called.add("run_critic_review")
        status = await call("get_project_status")
        assert status["nodes"][0]["models"], status
        used = next(agent["model"] for agent in status["agents"] if agent["agent"] == "beta")
        changed = await call("configure_endpoint", agent="beta", provider={"model": used})
        assert changed["model"] == used, changed
        rules = await call("set_system_prompts", agent="beta", prompts={"instructions": "Look at the names."})
        assert rules["instructions"] == "Look at the names.", rules
        feedback = {"required_changes": ["Add a docstring."]}
        pattern = {"code": "pass"}
        for tool, arguments in (
            ("revise_code", {"artifact_id": session, "feedback": feedback}),
            ("inject_alternative_pattern", {"session_id": session, "pattern": pattern, "context": "It fails."}),
        ):
            call.called.add(tool)
            ended = await client.call_tool(tool, arguments)
            assert ended.is_error and "has ended" in ended.content[0].text, ended
        # What these tools accept depends on how the task ended.
        delivered = "result" in progress
        for tool, arguments, is_accepted in (
            ("generate_test_suite", {"artifact_id": session, "framework": "pytest"}, delivered),
            (
                "report_defect",
                {"session_id": session, "severity": "minor", "description": "no docstring"},
                progress["state"] in ("merged", "accepted"),
            ),
            ("acknowledge_failure", {"session_id": session}, progress["state"] == "failed"),
        ):
            call.called.add(tool)
            reply = await client.call_tool(tool, arguments)
            assert reply.is_error != is_accepted, f"{tool}: {reply}"
            if tool == "generate_test_suite" and is_accepted:
                await call("cancel_task", session_id=reply.structured_content["session_id"])
        wrong = await client.call_tool("list_tasks", {"limit": 1000})
        assert wrong.is_error and "it must be 1 to 100" in wrong.content[0].text, wrong
        assert call.called == tools, f"not called: {tools - call.called}"
        print(f"{era}: {len(tools)} tools, task accepted in {accepted_ms:.0f} ms, it ended as {progress['state']}")


@contextlib.contextmanager
def private_cluster(cfq: Path, folder: Path):
    """Runs a cluster with its data in `folder`; the value is the environment of its commands."""
    # As root, cfq runs most of its processes as another user.
    folder.chmod(0o711)
    environment = {**os.environ, "CFQ_DATA": f"{folder}/data", "CFQ_CONFIG": f"{folder}/config"}
    subprocess.run([cfq, "up", "-d"], env=environment, check=True)
    try:
        yield environment
    finally:
        subprocess.run([cfq, "down"], env=environment, check=True)


def http_access(folder: Path) -> tuple[str, dict]:
    """URL of `/mcp` of the cluster with its data below `folder`, and the headers of its requests."""
    url = json.loads((folder / "data/run/server.json").read_text())["url"]
    token = (folder / "data/keys/api.token").read_text().strip()
    return f"{url}/mcp", {"Authorization": f"Bearer {token}"}


async def run_all(cfq: Path, folder: Path, environment: dict) -> None:
    for era, mode in ERAS.items():
        work = folder / era
        work.mkdir()
        repo = sample_repository(work)
        server = StdioServerParameters(command=str(cfq), args=["mcp"], env=environment, cwd=str(repo))
        await run_era(server, era, mode, repo, {})
        url, headers = http_access(folder)
        async with httpx2.AsyncClient(headers=headers, timeout=60) as http:
            await run_era(streamable_http_client(url, http_client=http), f"{era} over HTTP", mode, repo, headers)


def main() -> None:
    cfq = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder, private_cluster(cfq, Path(folder)) as environment:
        asyncio.run(run_all(cfq, Path(folder), environment))


if __name__ == "__main__":
    main()
