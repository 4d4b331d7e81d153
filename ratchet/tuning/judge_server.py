"""Serves a judge function of this process on the loopback interface, by the HTTP judge's protocol.

So the trainer, which is another process, can use a function that it cannot import, such as one of a notebook. Only who
knows the URL's random path gets an answer; requests without a length, or of over 64 MiB, are refused.
"""

from __future__ import annotations

import hmac
import secrets
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

import msgspec

from ratchet.trainer.controller.judges.kinds.function import FunctionJudge
from ratchet.trainer.controller.judges.opinion import DraftVerdict
from ratchet.trainer.user_code.response_text import ResponseText

_MAX_BODY = 64 * 2**20  # bytes
_SOCKET_TIMEOUT = 60.0  # seconds


class JudgeServer:
    """A server for a `with` block. `spec` is the judge that the trainer is given."""

    def __init__(self, judge: FunctionJudge) -> None:
        self._path = f"/{secrets.token_urlsafe(16)}"
        self._threads = ThreadPoolExecutor(1, "judge")  # one event loop for all calls of an async function
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler(judge))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="judge server", daemon=True)

    @property
    def spec(self) -> dict[str, Any]:
        """The judge's specification, for `trainer.judge`."""
        return {"kind": "http", "url": f"http://127.0.0.1:{self._server.server_address[1]}{self._path}"}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _handler(self, judge: FunctionJudge) -> type[BaseHTTPRequestHandler]:
        path, threads = self._path, self._threads

        class ServedJudgeRequest(BaseHTTPRequestHandler):
            """Answers one request with a score, or with status 422 and the judge's failure."""

            timeout = _SOCKET_TIMEOUT

            def do_POST(self) -> None:
                if not hmac.compare_digest(self.path.encode(), path.encode()):
                    return self._respond(404, b"")
                length = int(self.headers.get("content-length") or -1)
                if not 0 <= length <= _MAX_BODY:
                    return self._respond(413, b"")
                body = msgspec.json.decode(self.rfile.read(length))
                opinion = threads.submit(judge.opinion, _parameters(body)).result()
                return self._respond(*_response(opinion))

            def _respond(self, status: int, content: bytes) -> None:
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                """Stay quiet."""

        return ServedJudgeRequest


def _parameters(body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a judge function from the HTTP judge's request."""
    row, answer = body["row"], body["answer"]
    shared = {name: body[name] for name in ("task", "version", "messages", "tools", "tool_outcomes")}
    return {
        "trajectory": {"id": body["trajectory_id"], "calls": body["metrics"]["calls"], "feedback": [], **shared},
        "response": ResponseText(answer) if isinstance(answer, str) else answer,
        "task": body["task"] if row is None else row,
        "tool_outcomes": body["tool_outcomes"],
    }


def _response(opinion: DraftVerdict) -> tuple[int, bytes]:
    if opinion.score is None:
        return 422, str(opinion.failure).encode()
    return 200, msgspec.json.encode(
        {"score": opinion.score, "components": dict(opinion.components), "explanation": opinion.explanation}
    )
