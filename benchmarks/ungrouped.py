"""Learning from ungrouped traffic: dropped, running baseline, prompt cohort, resampling; equal traffic.

The single-call task is the first call of `ratchet.demo.email_search`: a question comes in once, and one tool call goes
out.
It is right if its search finds the mail with the answer (a rule; the trainer does not know the task).
Users arrive at random times at a steady rate, so that vLLM has idle moments. Each way is a project of its own on the
real vLLM with the tiny policy, then the same 150 held-out questions under the live version; under version 0, which all
share, they are held_out_calls in the first way alone.

    none       ungrouped: drop: what waiting alone comes to
    baseline   ungrouped: baseline
    cohort     ungrouped: cohort
    resample   ungrouped: drop, resample.samples: 3
    ranked     likewise, and the judge is RULER, asking a scripted model that is wrong about 15% of the answers

    python -m benchmarks.ungrouped [--ways none,baseline,resample] [--calls 350] [--rate 5] [--seed 1]
        [--release-held-out 0]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from benchmarks.advantages import ranking_model
from examples.production.figures import gain, wilson
from ratchet.demo.email_search.agent import TOOLS, opening
from ratchet.demo.email_search.mailbox import DATABASE, Mailbox
from ratchet.demo.email_search.tasks import MailTask, every_task, home, read_tasks
from ratchet.demo.run import TINY
from ratchet.settings.load_settings import load
from ratchet.settings.project_settings import Settings
from ratchet.store.states import ResampleState
from ratchet.store.store import Store, open_store
from ratchet.supervisor import signals
from ratchet.supervisor.up import start_services
from ratchet.trainer.rounds.backlog import is_drained

_AT_ONCE = 32  # held-out calls
_SETTLE = 15.0  # seconds, for the last round after the last call
_RESAMPLE = {
    "samples": 3,
    "calls_per_minute": 6000,
    "concurrency": 8,
    "max_running_requests": 4,
    "max_wait_seconds": 10.0,
}
_WAYS: Mapping[str, dict[str, Any]] = {
    "none": {},
    "baseline": {"ungrouped": "baseline"},
    "cohort": {"ungrouped": "cohort"},
    "resample": {"resample": _RESAMPLE},
    "ranked": {"resample": _RESAMPLE},
}
_boxes = threading.local()


@lru_cache(1)
def _tasks(folder: Path) -> dict[str, MailTask]:
    return {task.question: task for task in every_task(folder)}


def found(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the one tool call of a trajectory finds the mail that its question is about."""
    if not hasattr(_boxes, "box"):
        _boxes.box = Mailbox(home() / DATABASE)
    task = next(task for one in messages if (task := _tasks(home()).get(str(one.get("content")))) is not None)
    calls: Sequence[Any] = messages[-1].get("tool_calls") or ()
    try:
        (call,) = calls
        words = json.loads(call["function"]["arguments"])["keywords"]
        hits = _boxes.box.search([str(word) for word in words]) if call["function"]["name"] == "search_inbox" else []
    except (ValueError, KeyError, TypeError):
        return False
    return [name for name, _ in hits] == [task.message_id]


def judge(trajectory: Mapping[str, Any]) -> float:
    """Score a trajectory 1 or 0."""
    return float(found(trajectory["messages"]))


@dataclass(frozen=True, slots=True)
class AnsweredCall:
    """One call of a user: whether it was right, how long it took, and whether it failed."""

    right: bool
    seconds: float
    failed: bool = False


Run = tuple[Sequence[AnsweredCall], dict[str, Any]]


class SimulatedUser:
    """A user's agent: one question, one call."""

    def __init__(self, base_url: str, model: str) -> None:
        self._client = AsyncOpenAI(base_url=base_url, api_key="none", timeout=120)
        self._model = model

    async def close(self) -> None:
        await self._client.close()

    async def ask(self, task: MailTask) -> AnsweredCall:
        """Ask once and look at what came."""
        messages, start_time = opening(task.question), time.monotonic()
        create: Any = self._client.chat.completions.create
        try:
            answer = await create(
                model=self._model, messages=messages, tools=list(TOOLS), temperature=1.0, max_tokens=64
            )
        except Exception as error:  # noqa: BLE001  a failed call is a figure of the run
            print(f"call failed: {error}", file=sys.stderr)
            return AnsweredCall(False, time.monotonic() - start_time, failed=True)
        reply = answer.choices[0].message.model_dump(exclude_none=True)
        return AnsweredCall(found([*messages, reply]), time.monotonic() - start_time)


async def live(
    agent: SimulatedUser, tasks: Sequence[MailTask], calls: int, rate: float, rng: random.Random
) -> list[AnsweredCall]:
    """Serve `calls` users, who arrive at random, `rate` a second; each question once before any comes again."""
    order = [task for _ in range(-(-calls // len(tasks))) for task in rng.sample(list(tasks), len(tasks))][:calls]
    under_way = []
    for task in order:
        under_way.append(asyncio.create_task(agent.ask(task)))
        await asyncio.sleep(rng.expovariate(rate))
    return list(await asyncio.gather(*under_way))


async def held_out(agent: SimulatedUser, tasks: Sequence[MailTask], attempts: int) -> list[AnsweredCall]:
    """Ask every held-out question `attempts` times."""
    turn = asyncio.Semaphore(_AT_ONCE)

    async def one(task: MailTask) -> AnsweredCall:
        async with turn:
            return await agent.ask(task)

    return list(await asyncio.gather(*(one(task) for task in tasks for _ in range(attempts))))


def settings_of(way: str, folder: Path, seed: int, url: str, held_out_share: float) -> Settings:
    """Return the project of one way."""
    judged: Any = "benchmarks.ungrouped:judge"
    if way == "ranked":
        judged = {"kind": "ruler", "base_url": url, "model": "scripted"}
    trainer: dict[str, Any] = {
        "judge": judged, "num_generations": 8, "group_wait_seconds": 1.0, "groups_per_round": 8, "max_staleness": 3,
        "release": {
            "policy": "immediate", "held_out_share": held_out_share, "evaluation_prompts": 16, "evaluation_samples": 2,
        },
    } | _WAYS[way]  # fmt: skip
    values: dict[tuple[str, ...], tuple[str, Any]] = {
        ("project",): ("", way),
        ("state_dir",): ("", str(folder)),
        ("vllm", "extra_args"): ("", []),  # its metrics say whether it is idle
        ("learner", "seed"): ("", seed),
    }
    for name, value in trainer.items():
        if name in ("release", "resample"):
            values |= {("trainer", name, key): ("", one) for key, one in value.items()}
        else:
            values[("trainer", name)] = "", value
    return load(TINY, values, {})


def run(way: str, calls: int, rate: float, seed: int, folder: Path, share: float, known: Sequence[AnsweredCall]) -> Run:
    """Run one way; return the calls under version 0, unless they are `known`, and the figures."""
    with ranking_model(found) as url, contextlib.ExitStack() as services:
        settings = settings_of(way, folder, seed, url, share)
        settings.state.make(min_free_disk_mb=0)
        start_time = time.monotonic()
        supervisor = services.enter_context(start_services(settings, announce=lambda text: None))
        base_url, alias = supervisor.plan.base_url, settings.model
        tasks = {split: read_tasks(home(), split) for split in ("train", "test")}
        store = open_store(settings.store_url)
        services.callback(store.close)

        async def course() -> tuple[Sequence[AnsweredCall], list[AnsweredCall], list[AnsweredCall], int]:
            before = known or await held_out_calls(f"{alias}@0", tasks["test"])
            agent = SimulatedUser(base_url, alias)
            served = await live(agent, tasks["train"], calls, rate, random.Random(seed))
            await agent.close()
            await asyncio.to_thread(_settle, store, settings)
            version = store.policies.live()[alias].version
            return before, served, await held_out_calls(f"{alias}@{version}", tasks["test"]), version

        async def held_out_calls(model: str, some: Sequence[MailTask]) -> list[AnsweredCall]:
            agent = SimulatedUser(base_url, model)
            try:
                return await held_out(agent, some, 2)
            finally:
                await agent.close()

        before, served, after, version = asyncio.run(course())
        figures = figures_of(way, seed, before, served, after, version, store, alias)
        return before, figures | {"seconds": round(time.monotonic() - start_time)}


def _settle(store: Store, settings: Settings) -> None:
    trainer = settings.trainer
    until = time.monotonic() + _SETTLE
    while time.monotonic() < until and not is_drained(
        store, settings.model, num_generations=trainer.num_generations, groups_per_round=trainer.groups_per_round
    ):
        time.sleep(0.5)


def figures_of(
    way: str,
    seed: int,
    before: Sequence[AnsweredCall],
    served: Sequence[AnsweredCall],
    after: Sequence[AnsweredCall],
    version: int,
    store: Store,
    alias: str,
) -> dict[str, Any]:
    """Return the figures of one way."""
    first, last = ((sum(one.right for one in side), len(side)) for side in (before, after))
    low_first, high_first = wilson(*first)
    low, high = wilson(*last)
    value, low_gain, high_gain = gain(first, last)
    took = sorted(1000 * one.seconds for one in served if not one.failed)
    counts = store.resamples.counts(alias)
    answered = counts.get(ResampleState.ANSWERED)
    lately = served[-len(served) // 4 :]
    decisions = [one.reason for one in store.decisions.decisions_of(alias) if "held-out" in (one.reason or "")]
    return {
        "way": way, "seed": seed, "version": version,
        "held_out_before": [round(first[0] / first[1], 4), round(low_first, 4), round(high_first, 4)],
        "held_out_after": [round(last[0] / last[1], 4), round(low, 4), round(high, 4)],
        "gain": [round(value, 4), round(low_gain, 4), round(high_gain, 4)],
        "live_last_quarter": round(statistics.fmean(one.right for one in lately), 4),
        "live_calls": len(served), "failed": sum(one.failed for one in served),
        "live_ms": {"p50": round(took[len(took) // 2]), "p95": round(took[len(took) * 95 // 100])},
        "resamples": {str(state): one.count for state, one in counts.items()},
        "resample_tokens": answered.tokens if answered else 0,
        "rounds": len([one for one in store.rounds.page(alias, limit=1000) if one.to_version]),
        "dropped": store.trajectories.drop_counts(), "states": store.trajectories.counts(),
        "evaluations": len(decisions), "first_evaluation": decisions[-1:] and decisions[-1],
    }  # fmt: skip


def main() -> None:
    """Run the ways one after the other; print one JSON line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", default="none,baseline,resample")
    parser.add_argument("--calls", type=int, default=350)
    parser.add_argument("--rate", type=float, default=5.0, help="users a second")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--release-held-out", type=float, default=0.0, help="share of the prompts that candidates are evaluated on"
    )
    parser.add_argument("--folder", type=Path, default=Path(".ratchet/ungrouped"))
    chosen = parser.parse_args()
    signals.install_handlers()
    os.environ["EMAIL_SEARCH_HOME"] = str((chosen.folder / "mail").absolute())
    made = [sys.executable, "-m", "ratchet.demo.email_search", "build-db", "--seed", str(chosen.seed)]
    before: Sequence[AnsweredCall] = []
    subprocess.run(made, check=True, stdout=subprocess.DEVNULL)
    for way in chosen.ways.split(","):
        before, figures = run(
            way, chosen.calls, chosen.rate, chosen.seed, chosen.folder, chosen.release_held_out, before
        )
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
