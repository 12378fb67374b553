"""A model server on loopback that plays the AI of an editor: it delegates a task to cfq and follows it to its end.

It speaks the Messages API of Anthropic and the Responses API of OpenAI, both streamed, as far as Claude Code and Codex
use them. What it does next depends only on the results of the tools in the request.
"""

import json
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TASK = "Write a Python function is_even(n) in is_even.py that returns True if n is even."


def next_call(results: list[tuple[str, dict]]) -> tuple[str, dict] | None:
    """The next tool and its arguments, given the earlier calls and their results; None at the end."""
    if not results:
        return "execute_task_spec", {"spec": {"description": TASK, "language": "python"}, "max_iterations": 2}
    session = results[0][1]["session_id"]
    tool, result = results[-1]
    if tool == "get_artifact":
        return "final_handoff_archive", {"session_id": session}
    if tool == "final_handoff_archive":
        return None
    if tool == "get_progress_summary" and result["ended"]:
        return "get_artifact", {"session_id": session}
    if tool == "get_progress_summary" and result["needs_decision"]:
        question = result["question"]
        answer = {"session_id": session, "question_id": question["question_id"], "action": {"type": "accept_best_effort"}}
        return "resolve_escalation", answer
    wait = {"session_id": session, "wait_s": 45}
    return "get_progress_summary", wait | ({"after_event": result["last_event"]} if "last_event" in result else {})


def result_of(content) -> dict:
    """The JSON of a tool's result, which clients embed in different ways."""
    text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
    assert "{" in text, f"the tool failed: {text}"
    return json.JSONDecoder().raw_decode(text[text.index("{") :])[0]


def full_name(tools: list[dict], tool: str) -> tuple[str, str | None] | None:
    """The name by which the client knows a tool, and its namespace."""
    for entry in tools:
        if entry.get("type") == "namespace":
            if any(inner["name"].endswith(tool) for inner in entry["tools"]):
                return next(inner["name"] for inner in entry["tools"] if inner["name"].endswith(tool)), entry["name"]
        elif entry.get("name", "").endswith(tool):
            return entry["name"], None
    return None


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.reply("application/json", json.dumps({"data": [], "models": []}))

    do_HEAD = do_GET

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}")
        path = self.path.partition("?")[0]
        if path.endswith("/messages"):
            self.reply("text/event-stream", self.messages_reply(body))
        elif path.endswith("/responses"):
            self.reply("text/event-stream", self.responses_reply(body))
        else:
            self.reply("application/json", json.dumps({"input_tokens": 1}))

    def reply(self, kind: str, text: str):
        data = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def decide(self, tools: list[dict], results: list[tuple[str, dict]]):
        call = next_call(results)
        name = call and full_name(tools, call[0])
        if call and name:
            self.server.calls.append(call[0])
            return name[0], name[1], json.dumps(call[1])
        if results:
            self.server.last_result = results[-1][1]
        return None

    def messages_reply(self, body: dict) -> str:
        names, results = {}, []
        for message in body["messages"]:
            for part in message["content"] if isinstance(message["content"], list) else []:
                if part["type"] == "tool_use":
                    names[part["id"]] = part["name"].rpartition("__")[2]
                if part["type"] == "tool_result" and part["tool_use_id"] in names:
                    results.append((names[part["tool_use_id"]], result_of(part["content"])))
        call = self.decide(body.get("tools", []), results)
        start = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": body["model"]}
        usage = {"input_tokens": 1, "output_tokens": 1}
        events = [{"type": "message_start", "message": start | {"content": [], "stop_reason": None, "usage": usage}}]
        if call:
            block = {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex}", "name": call[0], "input": {}}
            delta = {"type": "input_json_delta", "partial_json": call[2]}
        else:
            block = {"type": "text", "text": ""}
            delta = {"type": "text_delta", "text": "The task is done."}
        events.append({"type": "content_block_start", "index": 0, "content_block": block})
        events.append({"type": "content_block_delta", "index": 0, "delta": delta})
        events.append({"type": "content_block_stop", "index": 0})
        reason = {"stop_reason": "tool_use" if call else "end_turn", "stop_sequence": None}
        events.append({"type": "message_delta", "delta": reason, "usage": usage})
        events.append({"type": "message_stop"})
        return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)

    def responses_reply(self, body: dict) -> str:
        names, results = {}, []
        for item in body["input"] if isinstance(body["input"], list) else []:
            if item.get("type") == "function_call":
                names[item["call_id"]] = item["name"].rpartition("__")[2]
            if item.get("type") == "function_call_output" and item["call_id"] in names:
                results.append((names[item["call_id"]], result_of(item["output"])))
        call = self.decide(body.get("tools", []), results)
        response = {"id": f"resp_{uuid.uuid4().hex}", "object": "response", "status": "in_progress", "output": []}
        if call:
            item = {"type": "function_call", "id": f"fc_{uuid.uuid4().hex}", "call_id": f"call_{uuid.uuid4().hex}"}
            item |= {"name": call[0], "arguments": call[2], "status": "completed"}
            item |= {"namespace": call[1]} if call[1] else {}
        else:
            text = {"type": "output_text", "text": "The task is done.", "annotations": []}
            item = {"type": "message", "id": f"msg_{uuid.uuid4().hex}", "role": "assistant", "content": [text]}
            item |= {"status": "completed"}
        usage = {"input_tokens": 1, "output_tokens": 1, "total_tokens": 2}
        done = response | {"status": "completed", "output": [item], "usage": usage}
        events = [
            {"type": "response.created", "response": response},
            {"type": "response.output_item.added", "output_index": 0, "item": item},
            {"type": "response.output_item.done", "output_index": 0, "item": item},
            {"type": "response.completed", "response": done},
        ]
        return "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)


def start() -> ThreadingHTTPServer:
    """Starts a server on a free port; `calls` lists the tools that it called, `last_result` is the last result."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.calls, server.last_result = [], None
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
