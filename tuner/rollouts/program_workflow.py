"""Workflows that are programs: the task as JSON on stdin, the answer on stdout.

The program gets OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL, in prompt tuning RATCHET_SYSTEM_PROMPT, and in a
comparison RATCHET_SEED. Other RATCHET_* variables, which may hold secrets, are removed. If stdout is one JSON object of
`response`, `reward` and `metrics`, these are used; otherwise stdout is the response. A non-zero exit code is a failure,
reported with the end of stderr. Guarantee: the program and its process group end with the rollout.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, BinaryIO

from ratchet.trainer.errors import WorkflowError, WorkflowFailed
from ratchet.tuner.rollouts.workflow_output import WorkflowOutput, outcome_of

_MAX_STDOUT_BYTES = 16 * 2**20
_MAX_STDERR_CHARS = 2000  # in an error
_PARTS = frozenset({"response", "reward", "metrics"})


class ProgramWorkflow:
    """A workflow that is a command line, run once per task."""

    def __init__(self, name: str, words: Sequence[str]) -> None:
        if not words or shutil.which(words[0]) is None:
            raise WorkflowError(
                f"workflow {name!r}: no such program: {words[0] if words else ''!r}; give module:function, or a "
                "command line such as 'python my_agent.py'"
            )
        self.name = name
        self._words = tuple(words)

    async def run(
        self,
        task: Mapping[str, Any],
        *,
        base_url: str,
        api_key: str,
        model: str,
        system_prompt: str | None = None,
        seed: int | None = None,
    ) -> WorkflowOutput:
        """Run the program once. Raises WorkflowFailed."""
        given = {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key, "OPENAI_MODEL": model}
        if system_prompt is not None:
            given["RATCHET_SYSTEM_PROMPT"] = system_prompt
        if seed is not None:
            given["RATCHET_SEED"] = str(seed)
        output, errors, status = await _run_program(
            self._words, environment(os.environ) | given, json.dumps(task).encode()
        )
        if status:
            message = errors.decode(errors="replace").strip()[-_MAX_STDERR_CHARS:]
            raise WorkflowFailed(f"exit code {status}: {message or 'nothing on stderr'}")
        return _read(output)


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables for a program."""
    return {name: value for name, value in environ.items() if not name.startswith("RATCHET_")}


async def _run_program(words: Sequence[str], environ: Mapping[str, str], task: bytes) -> tuple[bytes, bytes, int]:
    """Run a program; return stdout, the end of stderr and the exit status."""
    async with _pipe() as (output, output_end), _pipe() as (errors, errors_end):
        with tempfile.TemporaryFile() as stdin:
            stdin.write(task)
            stdin.seek(0)
            process = await asyncio.create_subprocess_exec(
                *words, stdin=stdin, stdout=output_end, stderr=errors_end, env=environ,
                start_new_session=True,  # a process group of its own
            )  # fmt: skip
        output_end.close()
        errors_end.close()
        try:
            both = asyncio.gather(_read_all(output), _read_tail(errors))
            # Child processes may keep the pipes open: wait for the end of the program itself.
            ended = asyncio.create_task(_wait_and_kill(process))
            either: list[asyncio.Future[Any]] = [both, ended]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if both.done():
                both.result()
            status = await ended
            return *(await both), status
        finally:
            _kill_group(process)
            await process.wait()


@contextlib.asynccontextmanager
async def _pipe() -> AsyncIterator[tuple[asyncio.StreamReader, BinaryIO]]:
    """A pipe read here and written by a child; the caller closes the write end after passing it on."""
    end, other_end = os.pipe()
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(end, "rb", 0)
    )
    try:
        with os.fdopen(other_end, "wb", 0) as written:
            yield reader, written
    finally:
        transport.close()


async def _read_all(stream: asyncio.StreamReader) -> bytes:
    read = bytearray()
    while chunk := await stream.read(2**16):
        read += chunk
        if len(read) > _MAX_STDOUT_BYTES:
            raise WorkflowFailed(f"the program wrote more than {_MAX_STDOUT_BYTES:,} bytes to stdout")
    return bytes(read)


async def _read_tail(stream: asyncio.StreamReader) -> bytes:
    read = b""
    while chunk := await stream.read(2**16):
        read = (read + chunk)[-4 * _MAX_STDERR_CHARS :]
    return read


async def _wait_and_kill(process: asyncio.subprocess.Process) -> int:
    """Wait for the exit status, then kill the process group."""
    status = await process.wait()
    _kill_group(process)
    return status


def _kill_group(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _read(output: bytes) -> WorkflowOutput:
    text = output.decode(errors="replace").strip()
    if text.startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):
            found: Any = json.loads(text)
            if isinstance(found, dict) and set(found) <= _PARTS:
                return outcome_of(found)
    return WorkflowOutput(text)
