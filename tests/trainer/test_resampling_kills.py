"""`kill -9` of the trainer while it asks for resamples: nothing is asked for or trained twice, and all goes on."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest

from ratchet.store.records import RESAMPLE
from ratchet.store.states import ResampleState, TrajectoryState
from ratchet.store.store import Store, open_store
from tests.harness.exactly_once.processes import RestartableProcess
from tests.harness.ports import free_port
from tests.harness.proxy.servers import ProxyProcess, eventually
from tests.harness.trainer.scripted_learner import read_weights

pytestmark = pytest.mark.slow

PROMPTS, SAMPLES, KILLS = 10, 2, 5


@contextmanager
def running_trainer(folder: Path) -> Iterator[tuple[RestartableProcess, ProxyProcess, Store]]:
    ports = {"vllm": free_port(), "grader": free_port()}
    parts = [RestartableProcess(name, str(port), folder / f"{name}.log") for name, port in ports.items()]
    vllm = f"http://127.0.0.1:{ports['vllm']}"
    eventually(lambda: _answers(f"{vllm}/metrics"))
    proxy = ProxyProcess(folder, upstreams=[vllm])
    eventually(lambda: _answers(proxy.url + "/health/ready"))
    settings = {
        "store": str(folder / "store.db"), "model": "agent", "base_model": "scripted", "vllm": [vllm],
        "checkpoints": str(folder / "checkpoints"), "judge_retry_seconds": 0.2,
        "judge": {"kind": "http", "url": f"http://127.0.0.1:{ports['grader']}", "timeout_seconds": 5.0},
        "seal_after_idle_seconds": 0.1, "group_wait_seconds": 0.1, "groups_per_round": 2, "round_wait_seconds": 0.5,
        "max_staleness": 10**6, "lease_seconds": 1.0, "poll_interval_seconds": 0.02,
        "resample": {"samples": SAMPLES, "calls_per_minute": 10_000, "concurrency": 2},
    }  # fmt: skip
    parts.append(trainer := RestartableProcess("trainer", json.dumps([settings]), folder / "trainer.log"))
    store = open_store(str(folder / "store.db"))
    try:
        yield trainer, proxy, store
    finally:
        store.close()
        for part in parts:
            part.kill()
        proxy.stop()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def test_kills_of_the_trainer_ask_for_nothing_twice_and_train_nothing_twice(tmp_path: Path) -> None:
    with running_trainer(tmp_path) as (trainer, proxy, store):
        for number in range(PROMPTS):  # long enough to be killed in
            message = {"role": "user", "content": f"question {number} #tokens=6 #delay=0.05"}
            body = {"model": "agent", "messages": [message]}
            assert httpx.post(f"{proxy.url}/v1/chat/completions", json=body, timeout=60).status_code == 200
        draw = random.Random(1)
        for _ in range(KILLS):
            done = store.resamples.usage_since("agent", 0.0).count
            eventually(partial(_goes_on, store, done), 60)
            time.sleep(draw.uniform(0.0, 0.4))
            trainer.kill()
            trainer.start()
        eventually(lambda: _all_over(store), 90)
        runs = store.trajectories.page(1000)
        resamples = {run.id: run for run in runs if run.purpose == RESAMPLE}
        assert len(runs) - len(resamples) == PROMPTS
        assert {run.calls for run in resamples.values()} == {1}
        counts = store.resamples.counts("agent")
        assert sum(count.count for count in counts.values()) <= PROMPTS * SAMPLES
        assert set(counts) <= {ResampleState.ANSWERED, ResampleState.FAILED}
        trained = {run.id for run in runs if run.state is TrajectoryState.TRAINED}
        assert trained & set(resamples)
        newest = store.rounds.newest_committed("agent")
        weights = Counter(read_weights(Path(newest.checkpoint or "")) if newest else [])
        assert weights == dict.fromkeys(trained, 1)
        # What was on its way when the trainer died is no whole answer, or came after the others had been compared.
        assert {run.drop_reason for run in resamples.values()} <= {
            None,
            "resample_unmatched",
            "resample_prompt_mismatch",
        }


def _goes_on(store: Store, done: int) -> bool:
    return store.resamples.usage_since("agent", 0.0).count > done or _all_over(store)


def _all_over(store: Store) -> bool:
    counts = store.trajectories.counts()
    return not counts["open"] and not counts["sealed"] and not counts["grouped"]
