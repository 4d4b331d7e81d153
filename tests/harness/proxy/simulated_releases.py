"""Five days of one agent: simulated scores of six versions, released by the real controller at simulated times.

Version 3 is harmful and is rolled back in its ramp; version 5 is in its ramp at the end.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from ratchet.store.db import schema
from ratchet.store.db.engine import connect, write
from ratchet.store.policies.serving import shares_in_force
from ratchet.store.records import ToolCall, Verdict, VersionDraw
from ratchet.store.states import PolicyState, ToolOutcome, ToolResult
from ratchet.store.store import Store
from tests.harness.records import call_start, ended, tool_call
from tests.harness.trainer.releases import make_release

ALIAS = "mail"
RATES = {0: 0.42, 1: 0.55, 2: 0.66, 3: 0.28, 4: 0.74, 5: 0.8}  # probability of the score 1
_GROUP, _ROUND = 8, 128  # trajectories
_LAST_RAMP = 128  # scored trajectories of the ramp that is still going on at the end
_PERIOD = 300.0  # seconds between two trajectories
_DAYS = 4.9  # what the trajectories of `fill` take
_TIMES = (("decisions", "decided_at"), ("policies", "created_at"), ("rounds", "started_at"), ("rounds", "ended_at"),
          ("releases", "updated_at"))  # fmt: skip


class SimulatedAgent:
    """The agent: its store, its controller and its clock."""

    def __init__(self, store: Store, url: str, until: float) -> None:
        self.store, self._engine, self._random = store, connect(url), random.Random(11)
        self._real_start = time.time()
        self.at = until - _DAYS * 86400.0
        self._release = make_release(
            store, alias=ALIAS, release={"max_gain": None}, groups_per_round=_ROUND // _GROUP, num_generations=_GROUP
        )
        self._numbers = itertools.count()
        self._groups: list[str] = []  # judged, and in no round yet
        store.policies.register_base(ALIAS, ALIAS)
        self._set_times()

    def release(self, version: int) -> None:
        """Train a version on the newest groups and begin its ramp."""
        parent = max((one.version for one in self.store.policies.all(ALIAS) if one.state != "rejected"), default=0)
        held = self.store.rounds.start(ALIAS, parent)
        groups, self._groups = self._groups, []
        metrics = {"reward": RATES[parent], "trajectories": len(groups) * _GROUP, "seconds": 41.0}
        self.store.rounds.commit(held.id, version=version, checkpoint=f"c{version}", groups=groups, metrics=metrics)
        candidate = self.store.policies.get(ALIAS, version)
        self._check()
        share = self._release.ramp_share(candidate)
        assert share is not None
        self.store.policies.start_ramp(ALIAS, version, share, reason="its served logprobs are those of the trainer")
        self._set_times()

    def serve(self, most: int) -> None:
        """Serve up to `most` trajectories, or until nothing is in a ramp."""
        for _ in range(most // _GROUP):
            self._serve_group()
            if self._check() and self.store.policies.serving_of(ALIAS).ramp is None:
                return

    def close(self) -> None:
        """Close the connections."""
        self._engine.dispose()

    def _serve_group(self) -> None:
        shares: Mapping[int, float] = shares_in_force(filter(None, self.store.policies.serving_of(ALIAS)))
        drawn = self._random.choices(list(shares), list(shares.values()), k=_GROUP)
        names = [f"mail-{next(self._numbers):05d}" for _ in drawn]
        for name, version in zip(names, drawn, strict=True):
            self.at += _PERIOD
            start = call_start(f"call_{name}", name, alias=ALIAS, at=self.at, version=version, task="mail/1",
                               draw=VersionDraw(shares=shares))  # fmt: skip
            self.store.calls.ship([ended(start, tool_call())])
            self.store.trajectories.seal(name, now=self.at)
        self.store.tools.record_tool_calls([self._call(*one) for one in zip(names, drawn, strict=True)], [])
        self._judge(names, drawn)

    def _call(self, name: str, version: int) -> ToolCall:
        wrong = self._random.random() < 0.3 - 0.3 * RATES[version]
        return ToolCall(
            call_id=f"call_{name}", choice=0, place=0, alias=ALIAS, version=version, tool="search", tool_call_id="c1",
            outcome=ToolOutcome.SCHEMA_VIOLATION if wrong else ToolOutcome.VALID, result=ToolResult.OK,
        )  # fmt: skip

    def _judge(self, names: list[str], drawn: list[int]) -> None:
        group = self.store.groups.create("task:mail/1", ALIAS, names, now=self.at)
        verdicts = [
            Verdict(trajectory_id=name, group_id=group.id, judge="rule", judge_version="1", judged_at=self.at,
                    score=float(self._random.random() < RATES[version]))
            for name, version in zip(names, drawn, strict=True)
        ]  # fmt: skip
        self.store.groups.record_verdicts(group.id, verdicts)
        if len({verdict.score for verdict in verdicts}) > 1:
            self._groups.append(group.id)

    def _check(self) -> bool:
        decided = self._release.check(self.at)
        self._set_times()
        return decided

    def _set_times(self) -> None:
        """Set what the store has just dated by the machine's clock to the simulated time."""
        with write(self._engine) as connection:
            for name, column in _TIMES:
                table: Any = schema.metadata.tables[name]
                fresh = table.c[column] >= self._real_start
                connection.execute(sa.update(table).where(fresh).values({column: self.at}))


def fill(store: Store, url: str, until: float) -> None:
    """Fill an empty store, whose address is `url`; the traffic ends at about `until`, a Unix time."""
    agent = SimulatedAgent(store, url, until)
    agent.serve(40)
    for version in sorted(RATES)[1:]:
        agent.release(version)
        agent.serve(_LAST_RAMP if version == max(RATES) else 4000)
        if version < max(RATES) - 1:
            agent.serve(_ROUND)
    agent.close()
    assert -3600.0 < agent.at - until <= 0.0, f"_DAYS is {(until - agent.at) / 86400.0:.2f} too many"
    states = [policy.state for policy in store.policies.all(ALIAS)]
    assert states[-1] is PolicyState.RAMP, states
