"""A scripted judge model: an OpenAI-compatible chat endpoint with scripted answers."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Any]


class ScriptedJudgeModel:
    """Answers each request with the next of `answers`: (status, text or JSON); records them."""

    def __init__(self, path: str = "/v1/chat/completions") -> None:
        self.path = path
        self.answers: list[Answer | Callable[[dict[str, Any]], Answer]] = []
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.raw: list[bytes] = []
        self.url = ""

    @contextmanager
    def running(self) -> Iterator[ScriptedJudgeModel]:
        """Serve on a free port."""
        server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        self.url = f"http://127.0.0.1:{server.server_port}"
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        scripted = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                status, answer = scripted.answer(self.path, body, dict(self.headers))
                content = answer.encode() if isinstance(answer, str) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: Any) -> None:
                """Say nothing."""

        return Handler

    def answer(self, path: str, body: bytes, headers: dict[str, str]) -> Answer:
        """Return the next answer."""
        if path != self.path:
            return 404, {"error": {"message": f"no route {path}"}}
        request = json.loads(body)
        self.requests.append(request)
        self.raw.append(body)
        self.headers.append({name.lower(): value for name, value in headers.items()})
        answer = self.answers.pop(0)
        return answer(request) if callable(answer) else answer


def says(content: Any) -> Answer:
    """A chat completion with this content."""
    text = content if isinstance(content, str) else json.dumps(content)
    message = {"role": "assistant", "content": text}
    usage = {"prompt_tokens": 1000, "completion_tokens": 100}
    return 200, {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage}
