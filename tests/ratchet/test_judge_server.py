"""A judge function of this process, called by the caller judge of another one."""

from __future__ import annotations

import http.client
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

import ratchet
from ratchet.api.judge_server import JudgeServer
from ratchet.api.try_out import transcript_of
from ratchet.store.records import Verdict
from ratchet.trainer.judges.judgement import GroupJudgement, Judge
from ratchet.trainer.judges.kinds.function import FunctionJudge
from ratchet.trainer.judges.kinds.http_grader import CallerJudge, read_address
from ratchet.trainer.judges.make_judge import make_judge
from ratchet.trainer.settings.judge_specs import CallerSpec, read_spec

TRANSCRIPT = transcript_of({"question": "How many?"}, ratchet.WorkflowOutput("three"), ())
OPENED_LONG_AGO = 1_000_000.0


def length(response: str) -> float:
    return float(len(response))


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "run" / "judges" / "one.json"


@contextmanager
def served(file: Path, function: Any = length, **limits: float) -> Iterator[Judge]:
    """Serve a function, and yield the judge that the trainer makes of it."""
    with JudgeServer({"judge": FunctionJudge(function)}, file, limits.get("max_wait_seconds", 1e12)) as server:
        judge = make_judge(read_spec(server.spec("judge")), {})
        try:
            yield judge
        finally:
            judge.close()


def verdict_of(judgement: GroupJudgement) -> Verdict:
    assert judgement.unavailable is None
    (verdict,) = judgement.verdicts
    return verdict


def test_a_function_gets_what_it_gets_in_the_trainer(file: Path) -> None:
    values: list[dict[str, Any]] = []

    async def judge(trajectory: dict[str, Any], response: str, task: Any, tool_outcomes: list[Any]) -> dict[str, Any]:
        values.append({"trajectory": trajectory, "response": response, "task": task, "tool_outcomes": tool_outcomes})
        return {"score": 0.5, "components": {"length": len(response)}, "explanation": "half"}

    with served(file, judge) as caller:
        verdict = verdict_of(caller.judge("grp_1", [TRANSCRIPT]))
    assert (verdict.score, verdict.explanation) == (0.5, "half")
    assert set(verdict.components) == {"length"}
    assert verdict.judge.startswith("caller:")
    here: list[dict[str, Any]] = []

    def keep(**given: Any) -> float:
        here.append(given)
        return 0.0

    FunctionJudge(keep).judge("grp_1", [TRANSCRIPT])
    assert values == here


def test_a_failure_of_the_function_is_a_failure_and_is_not_retried(file: Path) -> None:
    calls: list[str] = []

    def judge(response: str) -> float:
        calls.append(response)
        raise ValueError("cannot count")

    with served(file, judge) as caller:
        verdict = verdict_of(caller.judge("grp_1", [TRANSCRIPT]))
    assert verdict.score is None
    assert verdict.failure is not None
    assert "ValueError: cannot count" in verdict.failure
    assert len(calls) == 1


def test_a_process_that_is_away_is_waited_for_and_the_next_one_is_found(file: Path) -> None:
    with served(file) as caller:
        assert verdict_of(caller.judge("grp_1", [TRANSCRIPT])).score == 5.0
        first = read_address(file)
        with served(file, lambda response: float("e" in response)):  # a process that resumed the run
            assert read_address(file) != first
            assert verdict_of(caller.judge("grp_1", [TRANSCRIPT])).score == 1.0
        assert not file.exists()
        gone = caller.judge("grp_1", [TRANSCRIPT])
        assert gone.unavailable is not None
        assert "belongs to a process that is away" in gone.unavailable
    with served(file) as after, served(file.with_name("other.json")):
        assert verdict_of(after.judge("grp_1", [TRANSCRIPT])).score == 5.0


def test_after_the_limit_the_judge_has_failed(file: Path) -> None:
    with JudgeServer({"judge": FunctionJudge(length)}, file, 60.0) as server:
        spec = CallerSpec(**server.spec("judge"))
    late = msgspec.structs.replace(
        TRANSCRIPT, trajectory=msgspec.structs.replace(TRANSCRIPT.trajectory, last_active_at=OPENED_LONG_AGO)
    )
    assert CallerJudge(spec, clock=lambda: OPENED_LONG_AGO + 59.0).judge("grp_1", [late]).unavailable is not None
    failure = verdict_of(CallerJudge(spec, clock=lambda: OPENED_LONG_AGO + 61.0).judge("grp_1", [late])).failure
    assert failure is not None
    assert "longer than 60 s (tuner.judge_away_seconds)" in failure


class Impostor(BaseHTTPRequestHandler):
    """Has the port of a process that is gone, and answers whatever it is asked."""

    bodies: list[bytes]

    def do_GET(self) -> None:
        self.respond(b"0" * 64)

    def do_POST(self) -> None:
        self.bodies.append(self.rfile.read(int(self.headers["content-length"])))
        self.respond(b"1.0")

    def respond(self, content: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_another_program_at_the_port_gets_nothing_and_judges_nothing(file: Path) -> None:
    Impostor.bodies = []
    with served(file) as caller, ThreadingHTTPServer(("127.0.0.1", 0), Impostor) as other:
        thread = threading.Thread(target=other.serve_forever)
        thread.start()
        try:
            known = read_address(file)
            assert known is not None
            moved = msgspec.structs.replace(known, port=other.server_address[1])
            file.write_bytes(msgspec.json.encode(moved))
            assert caller.judge("grp_1", [TRANSCRIPT]).unavailable is not None
        finally:
            other.shutdown()
            thread.join()
    assert Impostor.bodies == []


def test_the_address_is_its_owners_alone_and_a_file_that_others_may_read_is_not_used(file: Path) -> None:
    with served(file) as caller:
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        file.chmod(0o644)
        assert caller.judge("grp_1", [TRANSCRIPT]).unavailable is not None


def test_the_secret_is_in_no_specification_and_in_no_verdict(file: Path) -> None:
    def judge(response: str) -> float:
        raise ValueError("cannot count")

    with JudgeServer({"judge": FunctionJudge(judge)}, file, 60.0) as server:
        address = read_address(file)
        assert address is not None
        spec = server.spec("judge")
        caller = make_judge(read_spec(spec), {})
        verdict = verdict_of(caller.judge("grp_1", [TRANSCRIPT]))
        caller.close()
    assert address.secret not in f"{spec} {verdict}"


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/other", {"content-length": "2"}, 404), ("/judge", {"content-length": "2"}, 401),
        ("/judge", {"content-length": "2", "x-ratchet-signature": "t=1,v1=00"}, 401),
        ("/judge", {"content-length": "99999999999"}, 413), ("/judge", {"content-length": "x"}, 413),
        ("/judge", {}, 413),
    ],
)  # fmt: skip
def test_what_is_not_signed_or_too_large_is_refused(
    file: Path, path: str, headers: dict[str, str], status: int
) -> None:
    with served(file):
        address = read_address(file)
        assert address is not None
        client = http.client.HTTPConnection("127.0.0.1", address.port, timeout=60)
        try:
            client.putrequest("POST", path)
            for name, value in headers.items():
                client.putheader(name, value)
            client.endheaders(b"{}" if headers.get("content-length") == "2" else None)
            assert client.getresponse().status == status
        finally:
            client.close()


def test_only_a_challenge_is_answered(file: Path) -> None:
    with served(file):
        address = read_address(file)
        assert address is not None
        for path in ("proof", "0" * 31, "0" * 32 + "?a"):
            assert httpx.get(f"{address.url}/{path}", trust_env=False).status_code == 404
