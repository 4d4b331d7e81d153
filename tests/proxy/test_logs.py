"""A process's log: a blocked or failing log delays nothing, and dropped lines are counted."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import IO, Any

import httpx
import pytest

from ratchet.proxy.telemetry.outage_warnings import OutageWarnings
from tests.harness.proxy.servers import ROOT, ProxyProcess, eventually

CALL = "/v1/chat/completions"
_PIPES: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
_SET_UP = "from ratchet.proxy.telemetry import logs; from logging import getLogger; log = getLogger('x'); "


def running(program: str) -> subprocess.Popen[str]:
    """Start a process that logs; its stdout and stderr are pipes."""
    command = [sys.executable, "-c", _SET_UP + program]
    return subprocess.Popen(command, cwd=ROOT, text=True, **_PIPES)


def line(pipe: IO[str] | None) -> str:
    """Read the next line of a pipe."""
    assert pipe is not None
    return pipe.readline().strip()


@pytest.mark.slow
def test_an_unread_stderr_blocks_no_call_probe_or_shutdown(tmp_path: Path, vllm_url: str) -> None:
    reader, writer = os.pipe()
    process = ProxyProcess(tmp_path, errors=writer, upstreams=[vllm_url])
    os.close(writer)
    good, failed = ([{"role": "user", "content": text}] for text in ("#say=yes", "#tokens=9 #cut=2"))
    with httpx.Client(base_url=process.url, timeout=60) as client:
        eventually(lambda: client.get("/health/ready").status_code == 200)
        for number in range(1050):
            messages = failed if number % 21 == 0 else good
            answer = client.post(CALL, json={"model": "agent", "messages": messages, "stream": messages is failed})
            assert answer.status_code == 200 if messages is good else b"error" in answer.content
        assert client.get("/health/live").status_code == 200
    assert process.stop() == 0
    os.close(reader)


@pytest.mark.slow
def test_dropped_lines_are_counted_and_reported_once_the_log_is_read_again() -> None:
    process = running(
        "logs.configure_logging('text'); [log.info('event=busy number=%d', n) for n in range(30_000)]; "
        "print(logs.dropped_lines(), flush=True); input()"
    )
    dropped = int(line(process.stdout))
    assert 10_000 < dropped < 30_000
    read: list[str] = []
    while "log_lines_dropped" not in "".join(read[-1:]):
        read.append(line(process.stderr))
    assert f"count={dropped} " in read[-1]
    assert len(read) + dropped == 30_001
    assert process.communicate("\n")[1] == ""


def test_remaining_lines_are_written_at_the_end() -> None:
    process = running("logs.configure_logging('text'); [log.info('number=%d', n) for n in range(500)]")
    assert process.communicate()[1].splitlines()[-1].endswith("number=499")


def test_a_line_keeps_its_values_at_the_time_of_the_call_and_its_traceback() -> None:
    process = running(
        "logs.configure_logging('json'); seen = [1]; log.info('seen=%s', seen); seen.append(2)\ntry: 1 / 0\n"
        "except ZeroDivisionError: log.exception('event=defect')"
    )
    first, second = map(json.loads, process.communicate()[1].splitlines())
    assert first["message"] == "seen=[1]"
    assert (second["message"], second["traceback"].splitlines()[-1]) == (
        "event=defect",
        "ZeroDivisionError: division by zero",
    )


def test_lines_that_cannot_be_formatted_or_written_are_counted() -> None:
    process = running(
        "logs.configure_logging('text'); input(); log.info('a'); log.info('b %d', 'no number')\n"
        "while logs.dropped_lines() < 2: pass\nprint('on')"
    )
    assert process.stderr is not None
    process.stderr.close()
    process.stderr = None
    assert process.communicate("\n")[0] == "on\n"
    assert process.returncode == 0


@pytest.mark.parametrize(("level", "expected"), [("info", ["a", "b", "ready"]), ("warning", ["b", "ready"])])
def test_lines_below_the_level_are_dropped_except_the_ready_line(level: str, expected: list[str]) -> None:
    program = (
        f"from ratchet.proxy.telemetry import logs; logs.configure_logging('text', '{level}'); "
        "from logging import getLogger; "
        "getLogger('x').info('a'); getLogger('x').warning('b'); getLogger(logs.START_LOGGER).info('ready')"
    )
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert [line.split()[-1] for line in run.stderr.splitlines()] == expected


def test_an_outage_is_logged_when_it_begins_and_not_at_each_attempt(caplog: pytest.LogCaptureFixture) -> None:
    outage = OutageWarnings(logging.getLogger("ratchet.proxy"), "not_read")
    for _ in range(2):
        for _ in range(100):
            outage.warn(OSError("refused"))
        outage.end()
    assert [record.getMessage() for record in caplog.records] == ["event=not_read reason='refused'"] * 2
