"""Serves judge functions of this process on the loopback interface, by the HTTP judge's protocol.

So the trainer, which is another process, can use functions that it cannot import, such as those of a notebook. Port and
secret are in a file that only this user can read; the caller judge of the trainer (judges/kinds/http_grader.py) reads
it and signs its requests. Every server has a new port and secret, and a resumed run the same file: the trainer finds
the new process there. Requests without a valid signature or length, or of over 64 MiB, are refused.
"""

from __future__ import annotations

import hmac
import os
import re
import secrets
import sys
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from ratchet.trainer.judges.judgement import DraftVerdict
from ratchet.trainer.judges.kinds.function import FunctionJudge
from ratchet.trainer.judges.kinds.http_grader import CallerAddress, proof_of, read_address, signature
from ratchet.trainer.user_code import ResponseText

_MAX_BODY = 64 * 2**20  # bytes
_MAX_REQUESTS = 16  # at the same time
_SOCKET_TIMEOUT = 60.0  # seconds
_CHALLENGE = re.compile(r"/([0-9a-f]{32})")
_SIGNED_AT = re.compile(r"t=(\d{1,12}),v1=")


class _LoopbackServer(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report an error, unless a client has closed its connection."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)


class JudgeServer:
    """A server of functions by name, for a `with` block; `spec` is the judge that the trainer is given.

    address            file for port and secret
    max_wait_seconds   how long trajectories wait for this process while it is away
    """

    def __init__(self, functions: Mapping[str, FunctionJudge], address: Path, max_wait_seconds: float) -> None:
        self._functions = dict(functions)
        self._address = address
        self._max_wait_seconds = max_wait_seconds
        self._secret = secrets.token_urlsafe(32)
        self._threads = ThreadPoolExecutor(1, "judge")  # one event loop for all calls of an async function
        self._server = _LoopbackServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, name="judge server", daemon=True)

    def spec(self, name: str) -> dict[str, Any]:
        """Return the specification of a function, for `trainer.judge` and a run's request. It has no secret."""
        function = self._functions[name]
        return {
            "kind": "caller", "function": function.name, "version": function.version, "address": str(self._address),
            "place": name, "max_wait_seconds": self._max_wait_seconds,
        }  # fmt: skip

    def __enter__(self) -> Self:
        self._thread.start()
        self._write_address()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        found = read_address(self._address)
        if found is not None and found.secret == self._secret:  # not that of a process that resumed the run meanwhile
            self._address.unlink(missing_ok=True)
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._threads.submit(self._close_functions)  # in the thread that has their event loop
        self._threads.shutdown(wait=False)

    def _close_functions(self) -> None:
        for function in self._functions.values():
            function.close()

    def _write_address(self) -> None:
        versions = {name: function.version for name, function in self._functions.items()}
        address = CallerAddress(self._server.server_address[1], self._secret, versions)
        self._address.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        temporary = self._address.with_suffix(".new")
        temporary.unlink(missing_ok=True)
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(msgspec.json.encode(address))
        temporary.replace(self._address)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        functions, secret, threads = self._functions, self._secret, self._threads
        free = threading.BoundedSemaphore(_MAX_REQUESTS)

        class ServedJudgeRequest(BaseHTTPRequestHandler):
            """Proves that this process knows the secret, or answers a signed request with a score or a failure."""

            timeout = _SOCKET_TIMEOUT

            def do_GET(self) -> None:
                challenge = _CHALLENGE.fullmatch(self.path)
                if challenge is None:
                    return self._respond(404, b"")
                return self._respond(200, proof_of(secret, challenge[1]).encode())

            def do_POST(self) -> None:
                function = functions.get(self.path.removeprefix("/"))
                length = self.headers.get("content-length") or ""
                if function is None:
                    return self._respond(404, b"")
                if not length.isdecimal() or int(length) > _MAX_BODY:
                    return self._respond(413, b"")
                if not free.acquire(blocking=False):
                    return self._respond(503, b"")
                try:
                    body = self.rfile.read(int(length))
                    if not _is_signed(secret, body, self.headers.get("x-ratchet-signature") or ""):
                        return self._respond(401, b"")
                    values = _parameters(msgspec.json.decode(body))
                    return self._respond(*_response(threads.submit(function.opinion_on, values).result()))
                finally:
                    free.release()

            def _respond(self, status: int, content: bytes) -> None:
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:
                """Stay quiet."""

        return ServedJudgeRequest


def _is_signed(secret: str, body: bytes, given: str) -> bool:
    found = _SIGNED_AT.match(given)
    wanted = signature(secret.encode(), body, int(found[1])) if found else ""
    return bool(wanted) and hmac.compare_digest(given.encode(), wanted.encode())


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
