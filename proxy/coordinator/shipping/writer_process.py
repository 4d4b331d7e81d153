"""Carries in a process of its own, so that the process that serves calls does nothing else.

The two speak over the child's stdin and stdout, one question and one answer at a time; the first thing said is the
store's address. Promises: the child ends when the pipe closes, so also when the serving process is killed; a child
that died is started again with the next piece; what it was carrying then is carried again. It yields to the serving
process where both want the same core.

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
from ratchet.proxy.coordinator.shipping.store_writer import Carried, InProcessWriter, SegmentRange
from ratchet.proxy.runtime.malloc import return_large_blocks
from ratchet.proxy.telemetry import logs
from ratchet.store.db.engine import connect
from ratchet.store.errors import SchemaMismatch, StoreError, StoreUnavailable
from ratchet.store.store import Store

log = logging.getLogger("ratchet.proxy")

_ROOT = Path(ratchet.__file__).parents[1]
_HEAD = struct.Struct("<I")
_NICENESS = 5  # calls are served first; what waits meanwhile is safe in the journal
COLLECT = (10_000, 10, 10)  # collections by default are 8% of a batch; at five times less than this memory grows
_PATIENCE = 2.0  # seconds for a child to end by itself


class _Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Why a piece has to be carried again; `kind` names one of `_KINDS`."""

    kind: str
    reason: str


class _Done(msgspec.Struct, frozen=True, tag="done"):
    """A piece was carried."""

    carried: Carried


_KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (StoreUnavailable, SchemaMismatch, StoreError, OSError)
}
_ask = msgspec.msgpack.Encoder().encode
_asked = msgspec.msgpack.Decoder(SegmentRange).decode
_told = msgspec.msgpack.Decoder(_Refused | _Done).decode


class WriterProcess:
    """The serving process's end. One thread at a time may ask."""

    def __init__(self, store_url: str, log_format: str = "text", log_level: str = "info") -> None:
        self._store_url = store_url
        self._log = (log_format, log_level)
        self._child: subprocess.Popen[bytes] | None = None
        self._closed = False

    @property
    def pid(self) -> int | None:
        """The child's process id; None while there is none."""
        return self._child.pid if self._child else None

    def start(self) -> None:
        """Start the child; it is not waited for. Raises OSError."""
        if self._closed:
            raise OSError("the store_writer is closed")
        path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH")]))
        self._child = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__, *self._log],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert self._child.stdin is not None
        _say(self._child.stdin, self._store_url.encode())

    def carry(self, piece: SegmentRange) -> Carried:
        """Have a piece carried. Raises StoreError, OSError."""
        if self._child is None:
            self.start()
        child = self._child
        assert child is not None
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            _say(child.stdin, _ask(piece))
            answer = _hear(child.stdout)
        except OSError as error:
            answer = None
            log.warning("event=carrier_unreachable reason=%r", str(error))
        if answer is None:
            self._bury(child)
            raise OSError("the process that ships the journal died; another one takes its place")
        told = _told(answer)
        if isinstance(told, _Refused):
            raise _KINDS.get(told.kind, StoreError)(told.reason)
        carried: Carried = told.carried
        return carried

    def close(self) -> None:
        """End the child; one that is still carrying is killed after a moment, and its piece carried again later."""
        self._closed = True
        child, self._child = self._child, None
        if child is None:
            return
        if child.stdin is not None:
            try:
                child.stdin.close()
            except OSError as error:  # it has died already
                log.debug("event=carrier_gone reason=%r", str(error))
        try:
            child.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            child.kill()
        self._bury(child)

    def _bury(self, child: subprocess.Popen[bytes]) -> None:
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            try:
                if pipe is not None:
                    pipe.close()
            except OSError as error:
                log.debug("event=carrier_gone reason=%r", str(error))
        if self._child is child:
            self._child = None


def _say(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(_HEAD.pack(len(data)) + data)
    pipe.flush()


def _hear(pipe: IO[bytes]) -> bytes | None:
    """Return what was said; None where the pipe has closed."""
    head = pipe.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    data = pipe.read(_HEAD.unpack(head)[0])
    return data if len(data) == _HEAD.unpack(head)[0] else None


def main(log_format: Any, log_level: Any) -> None:
    """Carry what is asked for until the pipe closes."""
    logs.configure_logging(log_format, log_level)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # they are meant for the proxy, which closes the pipe when it has done
    os.nice(_NICENESS)
    return_large_blocks()
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    url = _hear(questions)
    if url is None:
        return
    porter = InProcessWriter(Store(connect(url.decode(), create=False, writes_much=True)))
    gc.collect()
    gc.freeze()  # what was imported stays
    gc.set_threshold(*COLLECT)
    while (question := _hear(questions)) is not None:
        try:
            _say(answers, _ask(_answer(porter, _asked(question))))
        except BrokenPipeError:
            return


def _answer(porter: InProcessWriter, piece: SegmentRange) -> _Done | _Refused:
    try:
        return _Done(porter.carry(piece))
    except Exception as error:  # noqa: BLE001 -- told to the one who asks, who tries again
        kind = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), "StoreError")
        return _Refused(kind, f"{type(error).__name__}: {error}" if kind == "StoreError" else str(error))


if __name__ == "__main__":
    main(*sys.argv[1:3])
