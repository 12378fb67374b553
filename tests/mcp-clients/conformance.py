"""The official conformance suite against `/mcp`, in both eras.

Usage: python conformance.py CFQ CFQ_WITH_FIXTURES NODE_MODULES, with the path of the cfq program, of a cfq program with
the feature `mcp-fixtures`, and of a folder in which npm installed `@modelcontextprotocol/conformance`. `just
mcp-conformance` prepares it. All scenarios that a revision requires run against the program with the fixtures; those that need no fixtures also
run against cfq itself. The suite sends no token, so a proxy adds it.
"""

import http.client
import http.server
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from python_client import http_access, private_cluster

COMMON = ["tools-list", "resources-list", "prompts-list", "dns-rebinding-protection"]
SCENARIOS = {
    "2025-11-25": ["server-initialize", "ping", *COMMON],
    "2026-07-28": ["caching", "http-header-validation", "sep-2164-resource-not-found", "server-sse-multiple-streams", *COMMON],
}
# Of this scenario, the checks that need tools of the suite cannot pass.
STATELESS = "server-stateless"
STATELESS_PASSED = "Passed: 21/25"


def serve_proxy(target: str, headers: dict) -> http.server.ThreadingHTTPServer:
    class Proxy(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            connection = http.client.HTTPConnection(target, timeout=60)
            connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
            for name, value in [*self.headers.items(), *headers.items()]:
                if name.lower() not in ("connection", "transfer-encoding"):
                    connection.putheader(name, value)
            connection.endheaders(body)
            response = connection.getresponse()
            self.send_response(response.status)
            for name, value in response.getheaders():
                if name.lower() not in ("connection", "transfer-encoding", "date"):
                    self.send_header(name, value)
            if response.length is not None:
                self.end_headers()
                self.wfile.write(response.read())
                return
            # A stream of events: the client answers some of them before the response ends.
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            while content := response.read1(65536):
                self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))
                self.wfile.flush()
            self.wfile.write(b"0\r\n\r\n")

        do_GET = do_POST = do_DELETE = forward

        def log_message(self, *_args) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        def handle_error(self, *_args) -> None:
            """The suite closes its connections without a goodbye; a failed request is its own finding."""

    server = Server(("127.0.0.1", 0), Proxy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def run(modules: Path, url: str, *options: str) -> subprocess.CompletedProcess:
    command = [str(modules / ".bin/conformance"), "server", "--url", url, *options]
    return subprocess.run(command, cwd=modules.parent, capture_output=True, text=True, timeout=600)


def run_scenario(modules: Path, url: str, revision: str, scenario: str) -> subprocess.CompletedProcess:
    return run(modules, url, "--scenario", scenario, "--spec-version", revision)


def required_scenarios(report: str, revision: str) -> dict:
    """The number of passed checks of each scenario that the revision requires."""
    _, _, report = report.partition("=== SUMMARY ===")
    every, _, others = report.partition(f"Not scored for {revision}")
    optional = {line.split()[1] for line in others.splitlines() if line.startswith("  ")}
    counts = re.findall(r"^\S (\S+): (\d+) passed, \d+ failed$", every, re.MULTILINE)
    return {name: int(passed) for name, passed in counts if name not in optional}


def summary(done: subprocess.CompletedProcess) -> str:
    lines = [line for line in done.stdout.splitlines() if line.startswith("Passed: ")]
    assert lines, f"{done.args}: {done.stdout}{done.stderr}"
    return lines[-1]


@contextmanager
def running_server(cfq: Path) -> Iterator[str]:
    """The URL of `/mcp` of a private server, which needs no token."""
    with tempfile.TemporaryDirectory() as folder, private_cluster(cfq, Path(folder)):
        target, headers = http_access(Path(folder))
        proxy = serve_proxy(urlsplit(target).netloc, headers)
        yield f"http://127.0.0.1:{proxy.server_address[1]}/mcp"


def main() -> None:
    cfq, with_fixtures, modules = (Path(argument).resolve() for argument in sys.argv[1:4])
    with running_server(with_fixtures) as url:
        for revision in SCENARIOS:
            done = run(modules, url, "--requirements", revision)
            assert done.returncode == 0, f"{revision}: {done.stdout}{done.stderr}"
            required = required_scenarios(done.stdout, revision)
            # The suite's exit code is 0 even for a scenario in which no check ran.
            assert required and all(passed for passed in required.values()), f"{revision}: {required}{done.stdout}"
            print(f"{revision}, with fixtures: {sum(required.values())} checks of {len(required)} required scenarios passed")
    with running_server(cfq) as url:
        for revision, scenarios in SCENARIOS.items():
            for scenario in scenarios:
                done = run_scenario(modules, url, revision, scenario)
                assert done.returncode == 0, f"{revision} {scenario}: {done.stdout}{done.stderr}"
                print(f"{revision} {scenario}: {summary(done)}")
        stateless = summary(run_scenario(modules, url, "2026-07-28", STATELESS))
        assert stateless.startswith(STATELESS_PASSED), stateless
        print(f"2026-07-28 {STATELESS}: {stateless}, which need tools of the suite")


if __name__ == "__main__":
    main()
