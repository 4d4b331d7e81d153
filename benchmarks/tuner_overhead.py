"""What the tuner adds to an agent's own time: the same agent on the same tasks through the same proxy, bare and tuned.

Bare: tasks taken by so many coroutines, each rollout at its own base URL, nothing planned, written or judged. Tuned:
the RolloutRunner. The arms take turns within one run; the ratio of their wall times is the result. The agent is three
calls of the OpenAI SDK; the scripted vLLM answers each after a fixed time. Also: `ratchet tasks preview` of a huge
file.

    python -m benchmarks.tuner_overhead [--rollouts 192] [--rounds 4] [--seconds 0.5] [--gigabytes 10] [--json]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import openai

from ratchet.store.store import open_store
from ratchet.trainer.tasks import Task, content_id
from ratchet.tuner.rollouts.runner import RolloutJob, RolloutRunner
from ratchet.tuner.rollouts.workflow import WorkflowInput, WorkflowOutput
from ratchet.tuner.settings import TunerSettings
from tests.harness.proxy.servers import ProxyProcess, VllmProcess

AT_ONCE = 32
CALLS = 3


@dataclass(frozen=True)
class Arm:
    """One arm of a round. `cpu_ms` of this process for each rollout."""

    name: str
    seconds: float
    cpu_ms: float


class OneCallWorkflow:
    """A workflow of a few turns; all rollouts share one connection pool, as a service would."""

    name = "agent"

    def __init__(self, web: openai.DefaultAsyncHttpxClient) -> None:
        self._web = web

    async def run(self, given: WorkflowInput) -> WorkflowOutput:
        """Ask, and ask on."""
        client = openai.AsyncOpenAI(
            base_url=given.base_url, api_key=given.api_key, http_client=self._web, max_retries=0
        )
        messages: list[Any] = [{"role": "user", "content": given.task["question"]}]
        for _ in range(CALLS):
            answer = await client.chat.completions.create(model=given.model, messages=messages)
            messages += [answer.choices[0].message.model_dump(exclude_none=True)]
            messages += [{"role": "user", "content": given.task["question"]}]
        return WorkflowOutput(answer.choices[0].message.content)


def tasks_of(count: int, seconds: float) -> list[Task]:
    """Return tasks whose every call takes so many seconds."""
    rows = [{"question": f"What is {number} + 1? #wait={seconds} #tokens=20"} for number in range(count)]
    return [Task(content_id(row), row, "train", number) for number, row in enumerate(rows)]


async def bare(agent: OneCallWorkflow, tasks: list[Task], url: str) -> None:
    """Run the agent on every task without the tuner."""
    waiting = enumerate(tasks)

    async def work() -> None:
        for number, task in waiting:
            base_url = f"{url}/t/bare-{time.time_ns()}-{number}/v1"
            await agent.run(WorkflowInput(task.row, base_url, "none", "agent"))

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))


async def timed(name: str, rollouts: int, work: Callable[[], Awaitable[Any]]) -> Arm:
    """Run an arm once."""
    started, cpu = time.perf_counter(), time.process_time()
    await work()
    return Arm(name, time.perf_counter() - started, (time.process_time() - cpu) / rollouts * 1000)


async def measure(url: str, store_path: str, arguments: argparse.Namespace) -> list[Arm]:
    """Return the arms of all rounds, in turns."""
    store = open_store(store_path)
    tasks = tasks_of(arguments.rollouts, arguments.seconds)
    jobs = [RolloutJob(task) for task in tasks]
    arms: list[Arm] = []
    async with openai.DefaultAsyncHttpxClient(timeout=60) as web:
        agent = OneCallWorkflow(web)
        runner = RolloutRunner(store, url, None, agent, TunerSettings(concurrency=AT_ONCE), alias="agent")
        run = store.tunings.begin("eval", "agent", {})
        await bare(agent, tasks[:AT_ONCE], url)  # warm
        for number in range(arguments.rounds):
            pair = [
                ("bare", lambda: bare(agent, tasks, url)),
                ("tuned", lambda: runner.run(jobs, run.id)),
            ]
            for name, work in pair if number % 2 else pair[::-1]:
                arms.append(await timed(name, len(tasks), work))
    store.close()
    return arms


def preview_seconds(gigabytes: int, folder: Path) -> float:
    """Return how long `ratchet tasks preview` of so large a JSONL file takes, as a process, at best of three."""
    file = folder / "huge.jsonl"
    row = json.dumps({"question": "x" * 900, "answer": "4"}) + "\n"
    block = row * (2**20 // len(row))
    with file.open("w") as written:
        for _ in range(gigabytes * 2**30 // len(block)):
            written.write(block)
    best = float("inf")
    for _ in range(3):
        started = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "ratchet", "tasks", "preview", str(file)], check=True, capture_output=True
        )
        best = min(best, time.perf_counter() - started)
    file.unlink()
    return best


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=192)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--gigabytes", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ratchet-bench-") as name:
        folder = Path(name)
        preview = preview_seconds(arguments.gigabytes, folder) if arguments.gigabytes else None
        vllm = VllmProcess()
        proxy = ProxyProcess(folder, upstreams=[vllm.url], log_format="text")
        try:
            arms = asyncio.run(measure(proxy.url, str(folder / "store.db"), arguments))
        finally:
            proxy.stop()
            vllm.kill()
    means = {name: statistics.median(arm.seconds for arm in arms if arm.name == name) for name in ("bare", "tuned")}
    ratio = means["tuned"] / means["bare"]
    if arguments.json:
        print(json.dumps({"arms": [asdict(arm) for arm in arms], "ratio": ratio, "preview_seconds": preview}, indent=2))
    else:
        for arm in arms:
            print(f"{arm.name:<6} {arm.seconds:7.2f} s   {arm.cpu_ms:6.2f} ms CPU per rollout")
        print(f"median tuned / median bare: {ratio:.3f} at {AT_ONCE} at once, {CALLS} calls of {arguments.seconds:g} s")
        if preview is not None:
            print(f"preview of {arguments.gigabytes} GB of JSONL: {preview:.2f} s")
    return int(ratio > 1.05)


if __name__ == "__main__":
    os.environ.setdefault("OPENAI_API_KEY", "none")
    sys.exit(main())
