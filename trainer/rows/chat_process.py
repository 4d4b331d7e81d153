"""ChatRowsProcess: chat rows from a process of its own, so that the controller never imports transformers and torch.

The process lives as long as a warm start needs it, and its memory ends with it.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from types import TracebackType
from typing import Any

import msgspec

from ratchet.trainer.errors import ModelNotFound, NotAModel, RowError, TuningError
from ratchet.trainer.rows.chat_rows import Conversation
from ratchet.trainer.rows.token_row import TokenRow

_START_SECONDS = 300.0  # for the imports, and for the download of a tokenizer from the hub
_ROW_SECONDS = 60.0
_ERRORS = {kind.__name__: kind for kind in (ModelNotFound, NotAModel, RowError)}


class ChatRowsProcess:
    """Renders conversations with a model's chat template. A context manager; it starts and ends the process.

    Raises RowError if the model has no chat template, ModelNotFound, NotAModel; TuningError if the process ends.
    """

    def __init__(self, model: str) -> None:
        self._model = model

    def __enter__(self) -> ChatRowsProcess:
        command = [sys.executable, "-m", "ratchet.trainer.rows.chat_rows_program", self._model]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        try:
            self._response(_START_SECONDS)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def rows(self, conversation: Conversation) -> list[TokenRow]:
        """Return the rows of a conversation, all with advantage 1. Raises RowError if there are none."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(conversation) + b"\n")
            self._process.stdin.flush()
        except OSError:  # it has ended: the missing response says so
            pass
        return msgspec.convert(self._response(_ROW_SECONDS)["rows"], list[TokenRow])

    def _response(self, seconds: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        alarm = threading.Timer(seconds, self._process.kill)
        alarm.start()
        try:
            line = self._process.stdout.readline()
        finally:
            alarm.cancel()
        if not line.endswith(b"\n"):
            raise TuningError(
                f"the process that renders conversations for {self._model} ended, or did not respond within "
                f"{seconds:g} s; the trainer's log says why: start the tuning run again"
            )
        response: dict[str, Any] = msgspec.json.decode(line)
        if "error" in response:
            raise _ERRORS[response["kind"]](response["error"])
        return response

    def _end(self) -> None:
        process = self._process
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
