"""The caller judge: a function of the process that called `ratchet.tune`, such as a notebook's.

That process serves it on the loopback interface by the HTTP judge's protocol (tuning/judge_server.py) and keeps port
and secret in a file that only its owner can read. The file is read for each group, so that a new process is found.
Nothing is sent before the other side has proven that it knows the secret, which itself is never sent: another program
may have the port by now. While no process proves that, the judge is `unavailable` and the trajectories wait, up to
`max_wait_seconds` after their last call; then they are judge failures. What it scored of a group before is kept.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import httpx
import msgspec

from ratchet.store.records import Transcript, Verdict
from ratchet.trainer.controller.judges import GroupJudgement
from ratchet.trainer.controller.judges.kinds.http_grader import GraderJudge
from ratchet.trainer.controller.judges.opinion import DraftVerdict
from ratchet.trainer.settings.judge_specs import CallerSpec, GraderSpec

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


class CallerJudge:
    """Asks the process whose address is in the file."""

    def __init__(self, spec: CallerSpec, clock: Callable[[], float] = time.time) -> None:
        self._spec = spec
        self._clock = clock
        self._lock = threading.Lock()
        self._graders: dict[str, GraderJudge] = {}  # by secret: every process has its own
        self._kept: dict[str, dict[str, Verdict]] = {}  # by group: what a process scored before it was away
        self.concurrency = _CONCURRENCY
        self.name = f"caller:{spec.function}"
        self.version = spec.version

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            for grader in self._graders.values():
                grader.close()

    def judge(self, group_id: str | None, members: Sequence[Transcript]) -> GroupJudgement:
        """Return one verdict per member, in order."""
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
            tuple(self._record(failed, group_id, member, now) for member in members),
            unavailable=None if is_over else reason,
        )

    def _record(self, opinion: DraftVerdict, group_id: str | None, member: Transcript, now: float) -> Verdict:
        return opinion.verdict(member, group_id, judge=self.name, version=self.version, judged_at=now)


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
