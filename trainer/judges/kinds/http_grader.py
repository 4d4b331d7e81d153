"""The HTTP judge: sends the whole trajectory to a service, which returns a score.

The body is JSON: {"trajectory_id", "group_id", "task", "model", "version", "messages", "tools", "tool_calls",
"tool_outcomes", "answer", "row", "metrics"}. Signed: `x-ratchet-signature: t=UNIX_SECONDS,v1=HEX`, HEX is the
HMAC-SHA256 of "UNIX_SECONDS.BODY" under the secret. `idempotency-key` is the same for all attempts at one trajectory in
one group. The response is a number, or {"score", "components", "explanation"}; other responses and every status but
200 are failures, never zeros. 408, 425, 429 and 5xx are retried. In an outage the judge is unavailable.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec

from ratchet.store.records import Transcript, Verdict
from ratchet.trainer.errors import JudgeAway
from ratchet.trainer.judges.judgement import (
    DraftVerdict,
    GroupJudgement,
    NamedJudge,
    read,
    response_of,
    version_of,
)
from ratchet.trainer.judges.language_model import ask_unless_away, is_unreached, remedy_of
from ratchet.trainer.judges.transcript_json import tool_outcomes
from ratchet.trainer.settings.judge_specs import CallerSpec, GraderSpec

_RETRIED = (408, 425, 429, 500, 502, 503, 504)
_MAX_PAUSE = 30.0  # seconds


class GraderJudge(NamedJudge):
    """Sends each trajectory to one service."""

    def __init__(
        self,
        spec: GraderSpec,
        secret: str | None,
        clock: Callable[[], float] = time.time,
        sleep: Callable[[float], None] = time.sleep,
        *,
        trust_env: bool = True,
    ) -> None:
        """`trust_env`: use the proxies that the environment names."""
        super().__init__(clock)
        self._spec = spec
        self._secret = secret.encode() if secret else None
        self._sleep = sleep
        self._http = httpx.Client(
            timeout=httpx.Timeout(spec.timeout_seconds, connect=10.0), follow_redirects=False, trust_env=trust_env
        )
        self.concurrency = spec.concurrency
        self.name = f"http:{spec.url}"
        self.version = version_of("http", spec.url)

    def close(self) -> None:
        self._http.close()

    def judge(self, group_id: str | None, members: Sequence[Transcript]) -> GroupJudgement:
        """Return one verdict per member, in order; once the service is away, it is not asked about further ones."""
        verdicts: list[Verdict] = []
        away: str | None = None
        for member in members:
            started_at = time.perf_counter()
            opinion, away = ask_unless_away(away, partial(self._ask, group_id, member))
            latency = time.perf_counter() - started_at
            verdicts.append(self.record(opinion, group_id, member, cost=None, latency=latency))
        return GroupJudgement(tuple(verdicts), unavailable=away)

    def _ask(self, group_id: str | None, member: Transcript) -> DraftVerdict:
        """Return the draft verdict on one trajectory. Raises JudgeAway."""
        body = msgspec.json.encode(request_body(group_id, member))
        key = hashlib.sha256(f"{self.version}\0{group_id}\0{member.trajectory.id}".encode()).hexdigest()[:32]
        problem, remedy = "", None
        for attempt in range(self._spec.max_attempts):
            if attempt:
                self._sleep(min(_MAX_PAUSE, 0.5 * 2.0**attempt))
            try:
                response = self._http.post(self._spec.url, content=body, headers=self._headers(body, key))
            except (httpx.HTTPError, httpx.InvalidURL, UnicodeError) as error:
                problem = f"{type(error).__name__}: {error}"
                remedy = self._remedy(None) if is_unreached(error) else None
                continue
            if response.status_code == 200:
                return _opinion(response.content)
            problem = f"status {response.status_code}: {response.text[:500]}"
            remedy = self._remedy(response.status_code)
            if response.status_code not in _RETRIED:
                break
        if remedy is not None:
            raise JudgeAway(f"grader {self._spec.url}: {problem}; {remedy}")
        return DraftVerdict.failed(f"grader {self._spec.url}: {problem}")

    def _remedy(self, status: int | None) -> str | None:
        secret = (
            f"set the secret that it checks in {self._spec.secret_env} (`secret_env` names the variable) and restart"
        )
        return remedy_of(status, secret, "url")

    def _headers(self, body: bytes, key: str) -> dict[str, str]:
        headers = {"content-type": "application/json", "idempotency-key": key}
        if self._secret:
            headers["x-ratchet-signature"] = signature(self._secret, body, int(self._clock()))
        return headers


def signature(secret: bytes, body: bytes, now: int) -> str:
    """Return the value of `x-ratchet-signature`."""
    return f"t={now},v1={hmac.new(secret, b'%d.' % now + body, hashlib.sha256).hexdigest()}"


def request_body(group_id: str | None, member: Transcript) -> dict[str, Any]:
    run = member.trajectory
    calls = [call for message in member.messages for call in message.get("tool_calls") or ()]
    return {
        "trajectory_id": run.id,
        "group_id": group_id,
        "task": run.task,
        "model": run.alias,
        "version": run.version,
        "messages": [dict(message) for message in member.messages],
        "tools": [dict(tool) for tool in member.tools],
        "tool_calls": calls,
        "tool_outcomes": tool_outcomes(member),
        "answer": response_of(member),
        "row": None if member.row is None else dict(member.row),
        "metrics": {
            "calls": len(member.calls),
            "prompt_tokens": sum(call.prompt_tokens for call in member.calls),
            "completion_tokens": sum(call.completion_tokens for call in member.calls),
            "seconds": run.last_active_at - run.opened_at,
        },
    }


def _opinion(content: bytes) -> DraftVerdict:
    try:
        return read(msgspec.json.decode(content))
    except msgspec.DecodeError as error:
        return DraftVerdict.failed(f"the grader's response is not JSON: {error}")


# The caller judge: a function of the process that called `ratchet.tune`, such as a notebook's.
#
# That process serves it on the loopback interface by the HTTP judge's protocol (api/judge_server.py) and keeps port
# and secret in a file that only its owner can read. The file is read for each group, so that a new process is found.
# Nothing is sent before the other side has proven that it knows the secret, which itself is never sent: another program
# may have the port by now. While no process proves that, the judge is `unavailable` and the trajectories wait, up to
# `max_wait_seconds` after their last call; then they are judge failures. What it scored of a group before is kept.

_PROOF_TIMEOUT = 5.0  # seconds
_TIMEOUT = 600.0  # seconds, of one judgement
_CONCURRENCY = 4  # groups; the process judges one trajectory after another
AWAY = "belongs to a process that is away"
_OTHERS = 0o077  # permissions of group and others


class CallerAddress(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a process serves its judges; the content of the file. Always on the loopback interface."""

    port: int
    secret: str
    versions: Mapping[str, str]  # of the functions, by place

    @property
    def url(self) -> str:
        """The URL without a slash at its end."""
        return f"http://127.0.0.1:{self.port}"


def proof_of(secret: str, challenge: str) -> str:
    """Return the answer to a challenge, which only who knows the secret can give."""
    return hmac.new(secret.encode(), f"proof.{challenge}".encode(), hashlib.sha256).hexdigest()


def read_address(file: Path) -> CallerAddress | None:
    """Return the address in a file; None if there is none, or if the file is not this user's alone."""
    try:
        with file.open("rb") as opened:
            status = os.fstat(opened.fileno())
            if status.st_uid != os.geteuid() or status.st_mode & _OTHERS:
                return None
            return msgspec.json.decode(opened.read(), type=CallerAddress)
    except (OSError, msgspec.DecodeError):
        return None


class CallerJudge(NamedJudge):
    """Asks the process whose address is in the file."""

    def __init__(self, spec: CallerSpec, clock: Callable[[], float] = time.time) -> None:
        super().__init__(clock)
        self._spec = spec
        self._lock = threading.Lock()
        self._graders: dict[str, GraderJudge] = {}  # by secret: every process has its own
        self._kept: dict[str, dict[str, Verdict]] = {}  # by group: what a process scored before it was away
        self.concurrency = _CONCURRENCY
        self.name = f"caller:{spec.function}"
        self.version = spec.version

    def close(self) -> None:
        with self._lock:
            for grader in self._graders.values():
                grader.close()

    def judge(self, group_id: str | None, members: Sequence[Transcript]) -> GroupJudgement:
        kept = self._kept.get(group_id or "", {})
        address = read_address(self._spec.address)
        if address is None or not _proves(address):
            return self._away(group_id, members)
        missing = [member for member in members if member.trajectory.id not in kept]
        version = address.versions.get(self._spec.place, self.version)
        requested = self._grader(address).judge(group_id, missing).verdicts
        named = [msgspec.structs.replace(one, judge=self.name, judge_version=version) for one in requested]
        verdicts = kept | {one.trajectory_id: one for one in named}
        if any(one.failure is not None for one in named) and not _proves(address):  # it ended meanwhile
            self._kept[group_id or ""] = {name: one for name, one in verdicts.items() if one.failure is None}
            return self._away(group_id, members)
        self._kept.pop(group_id or "", None)
        return GroupJudgement(tuple(verdicts[member.trajectory.id] for member in members))

    def _grader(self, address: CallerAddress) -> GraderJudge:
        with self._lock:
            if address.secret not in self._graders:
                spec = GraderSpec(
                    kind="http", url=f"{address.url}/{self._spec.place}", max_attempts=1,
                    timeout_seconds=_TIMEOUT,
                )  # fmt: skip
                self._graders[address.secret] = GraderJudge(spec, address.secret, self._clock, trust_env=False)
            return self._graders[address.secret]

    def _away(self, group_id: str | None, members: Sequence[Transcript]) -> GroupJudgement:
        now = self._clock()
        waits = self._spec.max_wait_seconds
        reason = f"its function {self._spec.function} {AWAY}"
        is_over = now - max(member.trajectory.last_active_at for member in members) > waits
        failed = DraftVerdict.failed(f"{reason}, for longer than {waits:g} s (tuner.judge_away_seconds)")
        return GroupJudgement(
            tuple(self.record(failed, group_id, member) for member in members),
            unavailable=None if is_over else reason,
        )


def _proves(address: CallerAddress) -> bool:
    """Return whether a process at the address knows its secret."""
    challenge = secrets.token_hex(16)
    try:
        answer = httpx.get(f"{address.url}/{challenge}", timeout=_PROOF_TIMEOUT, trust_env=False)
    except (httpx.HTTPError, httpx.InvalidURL):
        return False
    return answer.status_code == 200 and hmac.compare_digest(
        answer.content, proof_of(address.secret, challenge).encode()
    )
