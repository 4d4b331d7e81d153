"""A store with content for every page of the console, including hostile texts."""

from __future__ import annotations

import random
import struct
import time
from collections.abc import Sequence
from typing import Any

from ratchet.store.ids import new_id
from ratchet.store.operation_records import JobProgress
from ratchet.store.records import AnswerTraining, Feedback, JudgeRequest, ToolCall, Verdict
from ratchet.store.states import ToolOutcome, ToolResult
from ratchet.store.store import Store
from tests.harness.records import answered_trajectory, call_start, ended, tool_call

ALIAS = "agent"
MARK = "window.ranHostile = true"
HOSTILE = (
    f"<img src=x onerror=\"{MARK}\"><script>{MARK}</script><svg onload='{MARK}'></svg>"
    f"[click](javascript:{MARK}) <a href='javascript:{MARK}'>here</a> "
    "pay \u202egnp.exe\u202c \u200b\u200dnow \u2066x\u2069 \U000e0041tag \x1b[31mred <iframe src='https://evil.example'>"
)
TALK: list[dict[str, Any]] = [
    {"role": "system", "content": "You find e-mails." + HOSTILE},
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "Where is Oslo? " + HOSTILE},
            {"type": "image_url", "image_url": {"url": "https://evil.example/pixel.png"}},
        ],
    },
]


def fill(store: Store) -> None:
    """Fill an empty store."""
    randomness = random.Random(5)
    store.policies.register_base(ALIAS, ALIAS)
    hostile(store)
    for version in range(5):
        names = [f"run-{version}-{number:02d}" for number in range(40)]
        scores = [float(randomness.random() < 0.25 + 0.15 * version) for _ in names]
        starts = [
            call_start(f"call_{name}", name, version=version, task=f"mail/{place % 8}")
            for place, name in enumerate(names)
        ]
        store.calls.ship([ended(start, {"role": "assistant", "content": "Oslo"}) for start in starts])
        later = call_start(f"call_{names[1]}b", names[1], at=1.75, version=version, parent_call=f"call_{names[1]}")
        store.calls.ship([ended(later, {"role": "assistant", "content": "Bergen"})])  # 250 ms after the first
        store.tools.record_tool_calls([_tool_call(version, place) for place in range(40 - 5 * version)], [])
        store.trajectories.seal_idle_trajectories(ALIAS, now=100.0, idle_seconds=1.0)
        group = store.groups.create(f"task:mail/{version}", ALIAS, names, now=101.0)
        verdicts = [
            Verdict(
                trajectory_id=name, group_id=group.id, judge="rule", judge_version="1", score=score, judged_at=103.0
            )
            for name, score in zip(names, scores, strict=True)
        ]
        store.groups.record_verdicts(group.id, verdicts)
        _train(store, version, group.id, names, sum(scores) / len(scores))
    store.policies.start_ramp(ALIAS, 5, 0.2, {"low": 0.02})
    evidence = {
        "harm": 31.5, "streams": {"score": 30.0, "finished": 1.5}, "enough": 1000.0, "counted": 120, "ramp_length": 256,
        "anchor": 4, "anchor_gain": 1.2, "live_minus_anchor": {"value": -0.02, "low": -0.1, "high": 0.05, "count": 9},
        "per_day": 300.0, "spread": 0.5, "detectable": {"day": 0.41, "week": 0.154, "month": 0.075},
        "traffic_too_small": False, "deserved_round_size": 1024, "round_size": 128, "status": "doubt " + HOSTILE,
    }  # fmt: skip
    store.releases.record_evidence(ALIAS, 5, evidence)
    store.alarms.raise_("no_signal", "last 5 groups: no variance, judge rule gave 0.0 to all 20: take harder tasks")
    gathering = JobProgress(
        alias=ALIAS, phase="gathering", done=3, total=8, seconds=12.0, means={"tokens": 42.67, "reward": 0.5},
        ended=False, updated_at=time.time(),
    )  # fmt: skip  # 4 s each, 20 s left
    store.job_progress.update([gathering])


def _tool_call(version: int, place: int) -> ToolCall:
    """Return the tool call of a trajectory; the more versions were trained, the fewer are wrong."""
    wrong = place < 10 - 2 * version
    return ToolCall(
        call_id=f"call_run-{version}-{place:02d}", choice=0, place=0, alias=ALIAS, version=version, tool="search",
        tool_call_id=f"c{place}", outcome=ToolOutcome.UNKNOWN_TOOL if wrong else ToolOutcome.VALID,
        result=ToolResult.ERROR if place % 8 == 0 else ToolResult.OK,
    )  # fmt: skip


def _train(store: Store, version: int, group: str, names: Sequence[str], reward: float) -> None:
    round_ = store.rounds.start(ALIAS, version)
    metrics: dict[str, Any] = {
        "reward": reward,
        "trajectories": 40,
        "tokens_trained": 900,
        "loss": 0.01,
        "seconds": 3.5,
    }
    metrics |= {
        "approx_kl": 0.004,
        "approx_kl_tokens": 900,
        "logprob_change_positive_mean": 0.002,
        "learning_rate": 2e-3,
    }
    metrics |= {"dtype": "fp32", "rows": 8, "rows_rejected": 1}
    store.rounds.commit(round_.id, version=version + 1, checkpoint=f"c/{version + 1}", groups=[group], metrics=metrics)
    trained = [
        AnswerTraining(call_id=f"call_{name}", choice=0, advantage=0.75, mismatch=struct.pack("<2e", 0.25, -0.5))
        for name in names
    ]
    store.answer_training.record(round_.id, trained)
    if version < 4:
        store.policies.promote(ALIAS, version + 1, {"gain": 0.1}, by="release", reason="better: +0.15 (0.05 to 0.25)")


def hostile(store: Store) -> None:
    """Add a trajectory whose texts try to run scripts, hide or mislead."""
    first = call_start("call_h1", "hostile", TALK, at=2.0, task="evil/" + HOSTILE[:60], role="planner" + HOSTILE[:20],
                  tags=("nightly",))  # fmt: skip
    request = {**tool_call('{"query": "' + "x" * 20 + '<b>"}'), "reasoning": "thinking " + HOSTILE}
    seen = [*TALK, request, {"role": "tool", "tool_call_id": "c1", "content": HOSTILE}]
    second = call_start("call_h2", "hostile", seen, at=3.0, parent_call="call_h1", linked_by="graph+tool_ids")
    store.calls.ship([first, ended(first, request, messages=TALK)])
    store.calls.ship([second, ended(second, {"role": "assistant", "content": "Oslo " + HOSTILE}, messages=seen,
                                    context="exact", prompt=(6, 7))])  # fmt: skip
    answered_trajectory(store, "beside", HOSTILE, task="evil/2", at=2.5)
    store.trajectories.seal_idle_trajectories(ALIAS, now=100.0, idle_seconds=1.0)
    group = store.groups.create("task:evil", ALIAS, ["hostile", "beside"], now=101.0)
    asking = JudgeRequest(
        id=new_id("exg"), group_id=group.id, judge="ruler", url="http://judge.example/v1", request=b'{"messages": []}',
        response=HOSTILE.encode(), status=200, error=None, prompt_tokens=9, completion_tokens=3, cost=None,
        latency=0.5, requested_at=101.0,
    )  # fmt: skip
    verdicts = [
        Verdict(
            trajectory_id=name, group_id=group.id, judge="ruler" + HOSTILE[:30], judge_version="v1", score=score,
            explanation=HOSTILE, components={"answer": score, HOSTILE[:40]: 0.1}, judge_request_id=asking.id,
            judged_at=102.0,
        )
        for name, score in (("hostile", 0.25), ("beside", 0.75))
    ]  # fmt: skip
    store.groups.record_verdicts(group.id, verdicts, [asking])
    text = Feedback(id="fb_1", kind="trajectory", target="hostile", source="user", given_at=103.0, value=0.0,
                    comment=HOSTILE, trusted=True)  # fmt: skip
    store.feedback.add([text])
