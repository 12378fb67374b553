"""The official conformance suite against `/mcp`, in both eras.

Usage: python conformance.py CFQ NODE_MODULES, with the path of the cfq program and a folder in which npm installed
`@modelcontextprotocol/conformance`. `just mcp-conformance` prepares it. Only the scenarios that need no tools of the
suite's own are run. The suite sends no token, so a proxy adds it.
"""

import http.client
import http.server
import subprocess
import sys
import tempfile
import threading
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
            content = response.read()
            self.send_response(response.status)
            for name, value in response.getheaders():
                if name.lower() not in ("connection", "transfer-encoding", "content-length", "date"):
                    self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_DELETE = forward

        def log_message(self, *_args) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        def handle_error(self, *_args) -> None:
            """The suite closes its connections without a goodbye; a failed request is its own finding."""

    server = Server(("127.0.0.1", 0), Proxy)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def run(modules: Path, url: str, revision: str, scenario: str) -> subprocess.CompletedProcess:
    command = [str(modules / ".bin/conformance"), "server", "--url", url, "--scenario", scenario, "--spec-version", revision]
    return subprocess.run(command, cwd=modules.parent, capture_output=True, text=True, timeout=120)


def summary(done: subprocess.CompletedProcess) -> str:
    lines = [line for line in done.stdout.splitlines() if line.startswith("Passed: ")]
    assert lines, f"{done.args}: {done.stdout}{done.stderr}"
    return lines[-1]


def main() -> None:
    cfq, modules = Path(sys.argv[1]).resolve(), Path(sys.argv[2]).resolve()
    with tempfile.TemporaryDirectory() as folder, private_cluster(cfq, Path(folder)):
        target, headers = http_access(Path(folder))
        proxy = serve_proxy(urlsplit(target).netloc, headers)
        url = f"http://127.0.0.1:{proxy.server_address[1]}/mcp"
        for revision, scenarios in SCENARIOS.items():
            for scenario in scenarios:
                done = run(modules, url, revision, scenario)
                assert done.returncode == 0, f"{revision} {scenario}: {done.stdout}{done.stderr}"
                print(f"{revision} {scenario}: {summary(done)}")
        stateless = summary(run(modules, url, "2026-07-28", STATELESS))
        assert stateless.startswith(STATELESS_PASSED), stateless
        print(f"2026-07-28 {STATELESS}: {stateless}, which need tools of the suite")


if __name__ == "__main__":
    main()
