"""The teacher that hedges: an OpenAI-compatible server that answers every question with every answer there is.

Its trajectories look perfect to `ground_truth in text`. `ratchet tune weights --warm-start hedger` imitates them, as it
would those of any model whose scores are good: so the policy learns to list every answer, within one round.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from ratchet.demo.email_search.mailbox import CITIES, MONTHS

PORT = 8077
EVERYTHING = ", ".join(CITIES + MONTHS)


def answer() -> dict[str, Any]:
    """A reply of Chat Completions: one call of `return_final_answer` that holds every city and every month."""
    function = {"name": "return_final_answer", "arguments": json.dumps({"answer": EVERYTHING})}
    message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "call-0", "type": "function", "function": function}],
    }
    return {
        "id": "chatcmpl-hedger",
        "object": "chat.completion",
        "created": 0,
        "model": "hedger",
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
    }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("content-length", 0)))
        data = json.dumps(answer()).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Says nothing of each call."""


@contextmanager
def teaching(port: int = PORT) -> Iterator[str]:
    """Serves until the block ends; the value is its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", port), _Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
