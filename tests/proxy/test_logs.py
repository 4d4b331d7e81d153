"""Logs: one line a call with its keys; a blocked or failing log delays nothing, and dropped lines are counted."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import httpx
import pytest
from pydantic import ValidationError

from ratchet.proxy.settings import ProxySettings
from ratchet.proxy.telemetry.call_telemetry import CallTiming, log_call, logfmt
from ratchet.proxy.telemetry.logs import JsonFormatter
from ratchet.proxy.telemetry.outage_warnings import OutageWarnings
from tests.harness.proxy.running_proxy import Proxy, Start, chat_body
from tests.harness.proxy.servers import ROOT, ProxyProcess, eventually
from tests.harness.records import call_start, ended

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


SECRET = "tell-nobody"


class Lines(logging.Handler):
    """Collects the call log's records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def lines() -> Iterator[Lines]:
    """The call log of this test."""
    logger, handler = logging.getLogger("ratchet.calls"), Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


def read(line: str) -> dict[str, str]:
    """Parse a logfmt line."""
    return dict(word.partition("=")[::2] for word in shlex.split(line))


def test_every_call_logs_one_line_with_its_result(proxy: Proxy, lines: Lines) -> None:
    answer = proxy.http.post(CALL, json=chat_body("#tokens=10", stream=True), headers={"x-ratchet-trajectory": "job"})
    line = eventually(lambda: [read(record.getMessage()) for record in lines.records])
    assert len(line) == 1
    fields = line[0]
    assert fields["event"] == "call"
    assert fields["call"] == answer.headers["x-ratchet-call"]
    assert (fields["trajectory"], fields["linked_by"]) == ("job", "header")
    assert (fields["alias"], fields["version"], fields["dialect"]) == ("agent", "0", "chat")
    assert (fields["status"], fields["state"], fields["streamed"], fields["error"]) == ("200", "answered", "true", "")
    assert (fields["completion_tokens"], fields["context"]) == ("11", "root")
    assert 0 < float(fields["first_byte_ms"]) <= float(fields["total_ms"])
    assert 0 < float(fields["overhead_ms"]) <= float(fields["total_ms"])
    assert fields["upstream"].startswith("127.0.0.1:")


@pytest.mark.parametrize("sent", [None, "mine-7", 'a"b=c', "!" * 128, "two words", "!" * 129, "ü"])
def test_the_line_has_the_request_id_that_the_client_sent(proxy: Proxy, lines: Lines, sent: str | None) -> None:
    headers = [(b"x-request-id", sent.encode())] if sent is not None else []
    answer = proxy.http.post(CALL, json=chat_body("hi"), headers=headers)
    record = eventually(lambda: lines.records)[0]
    if sent is not None and re.fullmatch(r"[!-~]{1,128}", sent):
        assert answer.headers["x-request-id"] == sent
        assert read(record.getMessage())["request_id"] == sent
        assert json.loads(JsonFormatter().format(record))["request_id"] == sent
    else:
        assert answer.headers["x-request-id"] == answer.headers["x-ratchet-call"]
        assert "request_id" not in read(record.getMessage())


@pytest.mark.parametrize(
    ("trusted", "forwarded", "client"),
    [
        ([], ["203.0.113.9"], "127.0.0.1"),  # from a client that nobody trusts
        (["10.0.0.0/8"], ["203.0.113.9"], "127.0.0.1"),
        (["127.0.0.1"], ["203.0.113.9"], "203.0.113.9"),
        (["127.0.0.0/8", "10.0.0.0/8"], ["203.0.113.9, 2001:db8::7", "10.1.2.3"], "2001:db8::7"),
        (["127.0.0.1"], ["1.1.1.1, 203.0.113.9:4711"], "203.0.113.9"),  # what a client sends itself stands first
        (["127.0.0.1"], [], "127.0.0.1"),
        (["127.0.0.1"], ["203.0.113.9, unknown"], "127.0.0.1"),
    ],
)
def test_the_client_is_the_one_that_a_trusted_proxy_names(
    start: Start, lines: Lines, trusted: list[str], forwarded: list[str], client: str
) -> None:
    proxy = start(trusted_proxies=trusted)
    headers = [("x-forwarded-for", value) for value in forwarded]
    assert proxy.http.post(CALL, json=chat_body("hi"), headers=headers).status_code == 200
    assert read(eventually(lambda: lines.records)[0].getMessage())["client"] == client


def test_a_trusted_proxy_on_a_socket_for_both_families_is_known_and_a_name_is_refused(tmp_path: Path) -> None:
    values = {"upstreams": ("http://x",), "model": "agent", "store": "-", "journal": tmp_path}
    assert "::ffff:10.0.0.0/104" in ProxySettings(**values, trusted_proxies=("10.0.0.0/8",)).trusted_hosts
    with pytest.raises(ValidationError, match=r"address or .* network.* 10\.0\.0\.7"):
        ProxySettings(**values, trusted_proxies=("*",))


def test_a_failed_call_names_the_class_of_its_error(proxy: Proxy, lines: Lines) -> None:
    proxy.http.post(CALL, json=chat_body("#status=500"))
    fields = read(eventually(lambda: lines.records)[0].getMessage())
    assert (fields["status"], fields["state"], fields["error"]) == ("500", "failed", "status_5xx")


def test_neither_content_nor_keys_are_logged(proxy: Proxy, lines: Lines) -> None:
    headers = {"authorization": f"Bearer {SECRET}", "x-ratchet-task": SECRET, "x-ratchet-tags": SECRET}
    for words in (f"#say={SECRET}", f"{SECRET} #status=400", f"{SECRET} #tokens=9 #cut=2"):
        proxy.http.post(CALL, json=chat_body(words, stream=True, user=SECRET), headers=headers)
    records = eventually(lambda: len(lines.records) == 3 and lines.records)
    assert SECRET not in "".join(record.getMessage() + JsonFormatter().format(record) for record in records)


def test_a_pending_line_does_not_hold_the_calls_record(lines: Lines) -> None:
    end = ended(call_start("call", "job"), {"role": "assistant", "content": "yes"})
    timing, holders = CallTiming.of(end, 1.0, None), sys.getrefcount(end)
    log_call(end, timing, None)
    assert sys.getrefcount(end) == holders
    assert read(lines.records[0].getMessage())["call"] == "call"


def test_the_log_can_be_switched_off(start: Start, lines: Lines) -> None:
    proxy = start(log_calls=False)
    proxy.http.post(CALL, json=chat_body("hi"))
    proxy.settled()
    assert not lines.records


@pytest.mark.slow
@pytest.mark.parametrize("form", ["text", "json"])
def test_the_process_writes_its_log_in_the_configured_format(form: str, tmp_path: Path, vllm_url: str) -> None:
    process = ProxyProcess(tmp_path, upstreams=[vllm_url], log_format=form)
    with httpx.Client(base_url=process.url, timeout=60) as client:
        eventually(lambda: client.get("/health/ready").status_code == 200)
        client.post(CALL, json=chat_body("hi"))
    assert process.stop() == 0
    written = (tmp_path / "proxy.log").read_text().splitlines()
    [line] = [line for line in written if " event=call " in line or '"event":"call"' in line]
    if form == "text":
        assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO ratchet\.calls event=call call=call_", line)
    else:
        entries = [json.loads(line) for line in written]
        call = json.loads(line)
        assert (call["event"], call["status"], call["streamed"], call["error"]) == ("call", 200, False, None)
        assert call["total_ms"] > 0
        assert any(one.get("message", "").startswith("event=listening") for one in entries)


@pytest.mark.parametrize(
    ("value", "text"),
    [("plain/1.2:x", "plain/1.2:x"), (None, ""), (True, "true"), (1.5, "1.5"), ("two words", '"two words"'),
     ('say "x"', '"say \\"x\\""'), ("a=b", '"a=b"'), ("a\nevent=call", '"a\\u000aevent=call"')],
)  # fmt: skip
def test_no_value_can_forge_a_line(value: Any, text: str) -> None:
    assert logfmt(value) == text
