"""A small HTTP server in a thread, for scripted models and engines: a function answers every request."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class IncomingRequest(NamedTuple):
    """A request. Header names are in lower case; the body of a GET is empty."""

    path: str
    headers: dict[str, str]
    body: bytes


Respond = Callable[[IncomingRequest], tuple[int, Any]]  # the status and a text, or a value that is sent as JSON


class JsonServer(ThreadingHTTPServer):
    """Serves on a free port until `close`."""

    request_queue_size = 512  # of connections that a busy machine has not accepted yet

    def __init__(self, respond: Respond) -> None:
        super().__init__(("127.0.0.1", 0), _RequestHandler)
        self.respond = respond
        self.url = f"http://127.0.0.1:{self.server_port}"
        self._thread = threading.Thread(target=self.serve_forever, args=(0.02,))
        self._thread.start()

    def close(self) -> None:
        self.shutdown()
        self.server_close()
        self._thread.join()


class _RequestHandler(BaseHTTPRequestHandler):
    server: JsonServer

    def do_GET(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        headers = {name.lower(): value for name, value in self.headers.items()}
        status, answer = self.server.respond(IncomingRequest(self.path, headers, body))
        is_text = isinstance(answer, str)
        data = (answer if is_text else json.dumps(answer)).encode()
        self.send_response(status)
        self.send_header("content-type", "text/plain" if is_text else "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""
