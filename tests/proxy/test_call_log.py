"""One line per call: what it says, and what it never says."""

from __future__ import annotations

import json
import logging
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ratchet.proxy.telemetry.call_telemetry import CallTiming, log_call, logfmt
from ratchet.proxy.telemetry.logs import JsonFormatter
from tests.harness.proxy.servers import ProxyProcess, eventually
from tests.harness.records import call_start, ended
from tests.proxy.conftest import Proxy, Start

CALL = "/v1/chat/completions"
SECRET = "tell-nobody"


class Lines(logging.Handler):
    """Keeps the call log's records."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def lines() -> Iterator[Lines]:
    """The lines of this test's calls."""
    logger, handler = logging.getLogger("ratchet.calls"), Lines()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    logger.removeHandler(handler)
    logger.setLevel(level)


def read(line: str) -> dict[str, str]:
    """The keys and values of a logfmt line."""
    return dict(word.partition("=")[::2] for word in shlex.split(line))


def asking(words: str, **fields: Any) -> dict[str, Any]:
    """A chat request."""
    return {"model": "agent", "messages": [{"role": "user", "content": words}], **fields}


def test_a_call_ends_with_one_line_that_says_how_it_went(proxy: Proxy, lines: Lines) -> None:
    answer = proxy.http.post(CALL, json=asking("#tokens=10", stream=True), headers={"x-ratchet-trajectory": "job"})
    line = eventually(lambda: [read(record.getMessage()) for record in lines.records])
    assert len(line) == 1
    told = line[0]
    assert told["event"] == "call"
    assert told["call"] == answer.headers["x-ratchet-call"]
    assert (told["trajectory"], told["linked_by"]) == ("job", "header")
    assert (told["alias"], told["version"], told["dialect"]) == ("agent", "0", "chat")
    assert (told["status"], told["state"], told["streamed"], told["error"]) == ("200", "answered", "true", "")
    assert (told["completion_tokens"], told["context"]) == ("11", "root")
    assert 0 < float(told["first_byte_ms"]) <= float(told["total_ms"])
    assert 0 < float(told["overhead_ms"]) <= float(told["total_ms"])
    assert told["upstream"].startswith("127.0.0.1:")


def test_a_failed_call_names_the_class_of_its_error(proxy: Proxy, lines: Lines) -> None:
    proxy.http.post(CALL, json=asking("#status=500"))
    told = read(eventually(lambda: lines.records)[0].getMessage())
    assert (told["status"], told["state"], told["error"]) == ("500", "failed", "status_5xx")


def test_neither_content_nor_keys_are_logged(proxy: Proxy, lines: Lines) -> None:
    headers = {"authorization": f"Bearer {SECRET}", "x-ratchet-task": SECRET, "x-ratchet-tags": SECRET}
    for words in (f"#say={SECRET}", f"{SECRET} #status=400", f"{SECRET} #tokens=9 #cut=2"):
        proxy.http.post(CALL, json=asking(words, stream=True, user=SECRET), headers=headers)
    records = eventually(lambda: len(lines.records) == 3 and lines.records)
    assert SECRET not in "".join(record.getMessage() + JsonFormatter().format(record) for record in records)


def test_what_waits_for_its_line_is_not_the_calls_record(lines: Lines) -> None:
    end = ended(call_start("call", "job"), {"role": "assistant", "content": "yes"})
    timing, holders = CallTiming.of(end, 1.0, None), sys.getrefcount(end)
    log_call(end, timing, None)
    assert sys.getrefcount(end) == holders
    assert read(lines.records[0].getMessage())["call"] == "call"


def test_the_log_can_be_switched_off(start: Start, lines: Lines) -> None:
    proxy = start(log_calls=False)
    proxy.http.post(CALL, json=asking("hi"))
    proxy.settled()
    assert not lines.records


@pytest.mark.parametrize("form", ["text", "json"])
def test_the_process_writes_its_log_in_the_form_that_was_asked_for(form: str, tmp_path: Path, vllm_url: str) -> None:
    process = ProxyProcess(tmp_path, upstreams=[vllm_url], log_format=form)
    with httpx.Client(base_url=process.url, timeout=20) as client:
        eventually(lambda: client.get("/health/ready").status_code == 200)
        client.post(CALL, json=asking("hi"))
    assert process.stop() == 0
    written = (tmp_path / "proxy.log").read_text().splitlines()
    [line] = [line for line in written if " event=call " in line or '"event":"call"' in line]
    if form == "text":
        assert re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} INFO ratchet\.calls event=call call=call_", line)
    else:
        told = [json.loads(line) for line in written]
        call = json.loads(line)
        assert (call["event"], call["status"], call["streamed"], call["error"]) == ("call", 200, False, None)
        assert call["total_ms"] > 0
        assert any(one.get("message", "").startswith("event=listening") for one in told)


@pytest.mark.parametrize(
    ("value", "text"),
    [("plain/1.2:x", "plain/1.2:x"), (None, ""), (True, "true"), (1.5, "1.5"), ("two words", '"two words"'),
     ('say "x"', '"say \\"x\\""'), ("a=b", '"a=b"'), ("a\nevent=call", '"a\\u000aevent=call"')],
)  # fmt: skip
def test_no_value_can_forge_a_line(value: Any, text: str) -> None:
    assert logfmt(value) == text
