"""A model server on loopback that plays Alpha and Beta behind the agents' programs.

It speaks, as far as the programs use them, the Messages API of Anthropic, the Responses API of OpenAI, and
generateContent of Google, all streamed. It records each request, and the tools that it offers.
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ARTIFACT = "Here it is.\n\nis_even.py\n```python\ndef is_even(n):\n    return n % 2 == 0\n```\n"
REVIEW = json.dumps({"quality_score": 95, "defects": [], "suggestions": [], "required_changes": []})


def pieces(request: dict) -> list[str]:
    """The reply, in several pieces: a review if the prompt asks for JSON, else a file."""
    reply = REVIEW if "JSON schema" in json.dumps(request) else ARTIFACT
    return [reply[at : at + 20] for at in range(0, len(reply), 20)]


def messages_api(request: dict) -> list[tuple[str, dict]]:
    message = {"id": "m", "type": "message", "role": "assistant", "model": request["model"], "content": []}
    usage = {"input_tokens": 100, "output_tokens": 1}
    events = [{"type": "message_start", "message": {**message, "stop_reason": None, "usage": usage}}]
    events.append({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}})
    for piece in pieces(request):
        delta = {"type": "text_delta", "text": piece}
        events.append({"type": "content_block_delta", "index": 0, "delta": delta})
    events.append({"type": "content_block_stop", "index": 0})
    events.append({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 12}})
    events.append({"type": "message_stop"})
    return [(event["type"], event) for event in events]


def responses_api(request: dict) -> list[tuple[str, dict]]:
    text = "".join(pieces(request))
    content = [{"type": "output_text", "text": text, "annotations": []}]
    item = {"type": "message", "id": "m", "role": "assistant", "status": "completed", "content": content}
    usage = {"input_tokens": 100, "output_tokens": 12, "total_tokens": 112}
    events = [
        {"type": "response.created", "response": {"id": "r"}},
        {"type": "response.output_item.done", "output_index": 0, "item": item},
        {"type": "response.completed", "response": {"id": "r", "usage": usage}},
    ]
    return [(event["type"], event) for event in events]


def generate_content(request: dict) -> list[tuple[str, dict]]:
    texts = pieces(request)
    events = []
    for n, piece in enumerate(texts):
        candidate = {"content": {"role": "model", "parts": [{"text": piece}]}, "index": 0}
        if n + 1 == len(texts):
            candidate["finishReason"] = "STOP"
        usage = {"promptTokenCount": 100, "candidatesTokenCount": n + 1, "totalTokenCount": 101 + n}
        events.append(("", {"candidates": [candidate], "usageMetadata": usage}))
    return events


def tool_names(request: dict) -> list[str]:
    """Names of the tools that the request offers to the model."""
    tools = request.get("tools") or []
    declared = [inner for tool in tools for inner in tool.get("functionDeclarations", [])]
    named = [tool for tool in tools if "functionDeclarations" not in tool]
    return [tool.get("name") or tool.get("type") for tool in named + declared]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.send_response(404)
        self.send_header("content-length", "0")
        self.end_headers()

    def body(self) -> bytes:
        if self.headers.get("transfer-encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("content-length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def do_POST(self):
        body, path = self.body(), self.path.split("?")[0]
        answers = {"/v1/messages": messages_api, "/v1/responses": responses_api}
        answer = answers.get(path, generate_content if "streamGenerateContent" in path else None)
        if answer is None:
            return self.do_GET()
        request = json.loads(body)
        self.server.tools.append(tool_names(request))
        self.server.requests.append(body.decode())
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        self.close_connection = True
        for name, event in answer(request):
            head = f"event: {name}\n" if name else ""
            self.wfile.write(f"{head}data: {json.dumps(event)}\n\n".encode())
            self.wfile.flush()


def start() -> ThreadingHTTPServer:
    """Starts the server on a free port. `requests` lists the requests, and `tools` the tools of each."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.tools, server.requests = [], []
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
