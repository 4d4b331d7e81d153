"""The HTTP judge: sends the whole trajectory to a service, which returns a score.

The body is JSON: {"trajectory_id", "group_id", "task", "model", "version", "messages", "tools", "tool_calls",
"tool_outcomes", "answer", "row", "metrics"}. Signed: `x-ratchet-signature: t=UNIX_SECONDS,v1=HEX`, HEX is the
HMAC-SHA256 of "UNIX_SECONDS.BODY" under the secret. `idempotency-key` is the same for all attempts at one trajectory in
one group. The response is a number, or {"score", "components", "explanation"}; other responses and every status but
200 are failures, never zeros. 408, 425, 429 and 5xx are retried. In an outage (outages.py) the judge is unavailable.
"""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import httpx
import msgspec

from ratchet.store.records import Transcript, Verdict
from ratchet.trainer.controller.judges import GroupJudgement
from ratchet.trainer.controller.judges.opinion import DraftVerdict, read, response_of, version_of
from ratchet.trainer.controller.judges.outages import ask_unless_away, is_unreached, remedy_of
from ratchet.trainer.controller.judges.tool_outcomes import tool_outcomes
from ratchet.trainer.errors import JudgeAway
from ratchet.trainer.settings.judge_specs import GraderSpec

_RETRIED = (408, 425, 429, 500, 502, 503, 504)
_MAX_PAUSE = 30.0  # seconds


class GraderJudge:
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
        self._spec = spec
        self._secret = secret.encode() if secret else None
        self._clock = clock
        self._sleep = sleep
        self._http = httpx.Client(
            timeout=httpx.Timeout(spec.timeout_seconds, connect=10.0), follow_redirects=False, trust_env=trust_env
        )
        self.concurrency = spec.concurrency
        self.name = f"http:{spec.url}"
        self.version = version_of("http", spec.url)

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def judge(self, group_id: str | None, members: Sequence[Transcript]) -> GroupJudgement:
        """Return one verdict per member, in order; once the service is away, it is not asked about further ones."""
        verdicts: list[Verdict] = []
        away: str | None = None
        for member in members:
            started_at = time.perf_counter()
            opinion, away = ask_unless_away(away, partial(self._ask, group_id, member))
            verdicts.append(self._verdict(group_id, member, opinion, started_at))
        return GroupJudgement(tuple(verdicts), unavailable=away)

    def _verdict(self, group_id: str | None, member: Transcript, opinion: DraftVerdict, started_at: float) -> Verdict:
        return opinion.verdict(
            member,
            group_id,
            judge=self.name,
            version=self.version,
            cost=None,
            latency=time.perf_counter() - started_at,
            judged_at=self._clock(),
        )

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
    """Return the JSON body for a trajectory."""
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
