"""Writes the journal into the store in a child process, so that the serving process only serves calls.

The two exchange one request and one response at a time over the child's stdin and stdout; the first message is the
store's URL. Promises: the child exits when the pipe closes, also if the serving process is killed. A child that died is
replaced at the next range, and its last range is written again. The child has a lower scheduling priority.

    python -m ratchet.proxy.coordinator.shipping.writer_process FORMAT LEVEL      (of its log; started by the proxy)
"""

from __future__ import annotations

import gc
import logging
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import msgspec

import ratchet
from ratchet.proxy.coordinator.shipping.store_writer import InProcessWriter, SegmentRange, WriteResult
from ratchet.proxy.runtime.malloc import return_large_blocks
from ratchet.proxy.telemetry import logs
from ratchet.store.db.engine import connect
from ratchet.store.errors import SchemaMismatch, StoreError, StoreUnavailable
from ratchet.store.store import Store

log = logging.getLogger("ratchet.proxy")

_ROOT = Path(ratchet.__file__).parents[1]
_HEAD = struct.Struct("<I")
_NICENESS = 10  # calls have priority: on one core half as many stall as with 5; waiting records are in the journal
# With the default thresholds collections take 8% of a batch; with five times fewer than this, memory grows.
GC_THRESHOLDS = (10_000, 10, 10)
_EXIT_TIMEOUT = 2.0  # seconds


class _Failed(msgspec.Struct, frozen=True, tag="failed"):
    """A failed write; `kind` names one of `_KINDS`."""

    kind: str
    reason: str


class _Done(msgspec.Struct, frozen=True, tag="done"):
    """A successful write."""

    result: WriteResult


_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (StoreUnavailable, SchemaMismatch, StoreError, OSError)
}
_encode = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(SegmentRange).decode
_decode_response = msgspec.msgpack.Decoder(_Failed | _Done).decode


class WriterProcess:
    """The serving process's side. For one thread at a time."""

    def __init__(self, store_url: str, log_format: str = "text", log_level: str = "info") -> None:
        self._store_url = store_url
        self._log = (log_format, log_level)
        self._child: subprocess.Popen[bytes] | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The child's process id; None without a child."""
        return self._child.pid if self._child else None

    def start(self) -> None:
        """Start the child without waiting for it. Raises OSError."""
        if self._closed:
            raise OSError("the store writer is closed")
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, *self._log],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert self._child.stdin is not None
        _send(self._child.stdin, os.fsencode(self._store_url))

    def write(self, segment: SegmentRange) -> WriteResult:
        """Write a range, or its beginning. Raises StoreError, OSError; then it must be written again."""
        if self._child is None:
            self.start()
        child = self._child
        assert child is not None
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            _send(child.stdin, _encode(segment))
            response = _receive(child.stdout)
        except OSError as error:
            response = None
            log.warning("event=store_writer_unreachable reason=%r", str(error))
        if response is None:
            self._clean_up(child)
            raise OSError("the store writer process died; a new one will be started")
        outcome = _decode_response(response)
        if isinstance(outcome, _Failed):
            raise _KINDS.get(outcome.kind, StoreError)(outcome.reason)
        result: WriteResult = outcome.result
        return result

    def close(self) -> None:
        """Stop the child. A child that is writing is killed after a moment, and its range is written again later."""
        self._closed = True
        child, self._child = self._child, None
        if child is None:
            return
        if child.stdin is not None:
            try:
                child.stdin.close()
            except OSError as error:  # the child is dead
                log.debug("event=store_writer_pipe_closed reason=%r", str(error))
        try:
            child.wait(_EXIT_TIMEOUT)
        except subprocess.TimeoutExpired:
            child.kill()
        self._clean_up(child)

    def _clean_up(self, child: subprocess.Popen[bytes]) -> None:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except OSError as error:
                log.debug("event=store_writer_pipe_closed reason=%r", str(error))
        if self._child is child:
            self._child = None


def _send(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(_HEAD.pack(len(data)) + data)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes | None:
    """Return the next message; None if the pipe is closed."""
    head = pipe.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    data = pipe.read(_HEAD.unpack(head)[0])
    return data if len(data) == _HEAD.unpack(head)[0] else None


def main(log_format: Any, log_level: Any) -> None:
    """Write the requested ranges until the pipe closes."""
    logs.configure_logging(log_format, log_level)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # meant for the proxy, which closes the pipe when it has finished
    os.nice(_NICENESS)
    return_large_blocks()
    requests, responses = sys.stdin.buffer, sys.stdout.buffer
    url = _receive(requests)
    if url is None:
        return
    writer = InProcessWriter(Store(connect(os.fsdecode(url), create=False, writes_much=True)))
    gc.collect()
    gc.freeze()  # imported modules stay
    gc.set_threshold(*GC_THRESHOLDS)
    while (request := _receive(requests)) is not None:
        try:
            _send(responses, _encode(_write(writer, _decode_request(request))))
        except BrokenPipeError:
            return


def _write(writer: InProcessWriter, segment: SegmentRange) -> _Done | _Failed:
    try:
        return _Done(writer.write(segment))
    except Exception as error:  # noqa: BLE001 -- sent to the parent process, which retries
        kind = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), "StoreError")
        return _Failed(kind, f"{type(error).__name__}: {error}" if kind == "StoreError" else str(error))


if __name__ == "__main__":
    main(*sys.argv[1:3])
