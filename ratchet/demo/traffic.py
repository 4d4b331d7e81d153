"""What the demo's agents share: rollouts, many at once, over the OpenAI SDK, and the command line `train | test`.

`train` sends ordinary traffic: several attempts at each training task. It does no training. `test` attempts tasks that
are never trained, and both print a summary. OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL name the server.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import ssl
import sys
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, TypeVar

from openai import AsyncOpenAI, DefaultAsyncHttpxClient

TIMEOUT_SECONDS = 120.0
Task = TypeVar("Task")
Attempt = Callable[[Any, int], Awaitable["TaskRollout"]]  # a task and the number of the attempt


@dataclass(slots=True)
class TaskRollout:
    """One attempt at one task. An error of the server or the model never raises: it is the rollout's end.

    `index` counts the attempts of the run from 0; `models` are the distinct model names in the responses; token counts
    are sums of the server's usage over all calls; `response_id` is the id of the last response; `tools` are the tools
    called, in order.
    """

    index: int
    task_id: str
    question: str
    correct_answer: str
    answer: str | None = None
    success: bool = False
    end: Literal["answer", "text", "ran_out_of_turns", "api_error"] = "ran_out_of_turns"
    turns: int = 0
    tool_failures: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    models: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0
    response_id: str | None = None
    tools: list[str] = field(default_factory=list)
    mails_read: int = 0

    def count(self, response: Any) -> None:
        self.models += [response.model] if response.model not in self.models else []
        self.response_id = response.id
        self.turns += 1
        if response.usage is not None:
            self.prompt_tokens += response.usage.prompt_tokens
            self.completion_tokens += response.usage.completion_tokens

    def fail(self, error: Exception) -> None:
        self.end = "api_error"
        self.errors.append(f"{type(error).__name__}: {error}"[:300])


def connection(base_url: str, api_key: str) -> AsyncOpenAI:
    """Return a client to close. The SDK would read the machine's certificates for each: here they are read once."""
    web = DefaultAsyncHttpxClient(verify=_certificates())
    return AsyncOpenAI(base_url=base_url, api_key=api_key, timeout=TIMEOUT_SECONDS, http_client=web)


_certificates = cache(ssl.create_default_context)


def shuffled(tasks: Sequence[Task], seed: int) -> Iterator[Task]:
    """Yield the tasks endlessly: each pass contains every task once, in an order determined by `seed`."""
    rng = random.Random(seed)
    while tasks:
        yield from rng.sample(tasks, len(tasks))


async def run_attempts(
    tasks: Iterable[Any],
    attempt: Attempt,
    *,
    attempts: int = 1,
    concurrency: int = 64,
    on_result: Callable[[TaskRollout], None] | None = None,
    stop: asyncio.Event | None = None,
) -> list[TaskRollout]:
    """Attempt each task `attempts` times, `concurrency` rollouts at a time; return them in the order of their end.

    `tasks` may be endless (`shuffled`). After `stop` is set no attempt starts, and running ones finish. `on_result` is
    called in the event loop at the end of each rollout.
    """
    jobs = enumerate(task for task in tasks for _ in range(attempts))
    done: list[TaskRollout] = []

    async def work() -> None:
        for index, task in jobs:
            rollout = await attempt(task, index)
            done.append(rollout)
            if on_result is not None:
                on_result(rollout)
            if stop is not None and stop.is_set():
                return

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())
    return done


def means(rollouts: Iterable[TaskRollout]) -> dict[str, float]:
    """Return the mean of each metric over the rollouts that have it: an API error is a failure, but has no turns."""
    columns: defaultdict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        columns["success"].append(rollout.success)
        if rollout.end != "api_error":
            columns["turns"].append(rollout.turns)
            columns["tool_failures"].append(sum(rollout.tool_failures.values()))
            columns["seconds"].append(rollout.seconds)
        if rollout.completion_tokens:
            columns["completion_tokens"].append(rollout.completion_tokens)
    return {name: round(fmean(values), 4) for name, values in columns.items()}


def summary(rollouts: Sequence[TaskRollout]) -> dict[str, Any]:
    """Return counts and means of a run: `success` is over all rollouts, including API errors."""
    failures = sum((Counter(rollout.tool_failures) for rollout in rollouts), Counter[str]())
    return {
        "rollouts": len(rollouts),
        "tasks": len({rollout.task_id for rollout in rollouts}),
        **means(rollouts),
        "ends": dict(Counter(rollout.end for rollout in rollouts)),
        "tool_failures_by_class": dict(failures),
        "models": sorted({model for rollout in rollouts for model in rollout.models}),
    }


@contextmanager
def progress(name: str, total: int | None, per_round: int | None) -> Iterator[Callable[[TaskRollout], None]]:
    """Show a bar on stderr, and a line with means at the end of each round and of all; outside a terminal the lines."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    rounds: defaultdict[int, list[TaskRollout]] = defaultdict(list)
    every: list[TaskRollout] = []

    def report(head: str, rollouts: Sequence[TaskRollout]) -> None:
        figures = " ".join(f"{metric}={value:.3f}" for metric, value in means(rollouts).items())
        bars.console.print(f"{head} rollouts={len(rollouts)} {figures}", markup=False)

    def add(rollout: TaskRollout) -> None:
        every.append(rollout)
        bars.advance(bar)
        if per_round:
            number = rollout.index // per_round
            rounds[number].append(rollout)
            if len(rounds[number]) == per_round:
                report(f"round={number + 1}", rounds.pop(number))

    with Progress(console=console, transient=True, disable=not console.is_terminal) as bars:
        bar = bars.add_task(name, total=total)
        try:
            yield add
        finally:
            if every:
                report(name, every)


def command_line(module: str, splits: Sequence[str] = ("test",)) -> tuple[argparse.ArgumentParser, Any]:
    """Return the parser with the verbs `train` and `test`, and its verbs, to which the agent may add its own."""
    parser = argparse.ArgumentParser(prog=f"python -m {module}")
    verbs = parser.add_subparsers(dest="verb", required=True)
    train = verbs.add_parser("train", help="attempt training tasks, each several times")
    train.add_argument("--tasks-per-round", type=_positive, default=16)
    train.add_argument("--rounds", type=_positive, help="default: until --seconds are over")
    train.add_argument("--seconds", type=float, help="start no attempt after this time, or after SIGTERM")
    train.add_argument("--seed", type=int, default=0, help="seed of the order")
    test = verbs.add_parser("test", help="attempt tasks that are never trained, and print a summary")
    test.add_argument("--tasks", type=_positive, help="only the first N")
    test.add_argument("--split", choices=splits, default="test")
    for verb, attempts in ((train, 8), (test, 1)):
        verb.add_argument("--model", default=os.environ.get("OPENAI_MODEL"), help="default: OPENAI_MODEL")
        verb.add_argument("--attempts", type=_positive, default=attempts, help="attempts at each task")
        verb.add_argument("--concurrency", type=_positive, default=64, help="concurrent rollouts")
        verb.add_argument("--temperature", type=float, default=1.0)
        verb.add_argument("--out", type=Path, default=os.devnull, help="JSON Lines file for the rollouts")
    return parser, verbs


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def run_verb(
    chosen: argparse.Namespace, tasks_of: Callable[[str], Sequence[Any]], attempt_with: Callable[[AsyncOpenAI], Attempt]
) -> int:
    """Run `train` or `test`: `tasks_of` returns the tasks of a split, `attempt_with` an attempt with a client.

    Returns 0 on success, 1 with a message on stderr if nothing succeeded or something is missing, 130 on Ctrl-C.
    """
    missing = [] if os.environ.get("OPENAI_BASE_URL") else ["OPENAI_BASE_URL, for example to http://127.0.0.1:8000/v1"]
    missing += [] if chosen.model else ["OPENAI_MODEL, or give --model NAME"]
    if chosen.verb == "train" and chosen.rounds is None and chosen.seconds is None:
        missing.append("--rounds or --seconds")
    try:
        if missing:
            raise ValueError(f"set {' and '.join(missing)}")
        rollouts = asyncio.run(_run(chosen, tasks_of, attempt_with))
    except (OSError, ValueError) as error:
        print(f"{chosen.verb}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{chosen.verb}: stopped; finished rollouts are kept", file=sys.stderr)
        return 130
    print(json.dumps({"temperature": chosen.temperature, "model": chosen.model, **summary(rollouts)}))
    if rollouts and all(one.end == "api_error" for one in rollouts):
        print(f"every rollout failed; the first error: {rollouts[0].errors[0]}", file=sys.stderr)
        return 1
    return 0


async def _run(
    chosen: argparse.Namespace, tasks_of: Callable[[str], Sequence[Any]], attempt_with: Callable[[AsyncOpenAI], Attempt]
) -> list[TaskRollout]:
    tasks: Iterable[Any]
    stop, per_round = asyncio.Event(), None
    if chosen.verb == "train":
        per_round, count = (
            chosen.tasks_per_round * chosen.attempts,
            chosen.rounds and chosen.rounds * chosen.tasks_per_round,
        )
        tasks = itertools.islice(shuffled(tasks_of("train"), chosen.seed), count)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, stop.set)
        if chosen.seconds is not None:
            loop.call_later(chosen.seconds, stop.set)
    else:
        tasks = tasks_of(chosen.split)[: chosen.tasks]
        count = len(tasks)
    chosen.out.parent.mkdir(parents=True, exist_ok=True)
    with (
        chosen.out.open("w", encoding="utf-8", buffering=1) as rows,
        progress(chosen.verb, count and count * chosen.attempts, per_round) as shown,
    ):

        def on_result(rollout: TaskRollout) -> None:
            print(json.dumps(asdict(rollout), ensure_ascii=False), file=rows)
            shown(rollout)

        async with connection(os.environ["OPENAI_BASE_URL"], os.environ.get("OPENAI_API_KEY", "none")) as client:
            return await run_attempts(
                tasks, attempt_with(client), attempts=chosen.attempts, concurrency=chosen.concurrency,
                on_result=on_result, stop=stop,
            )  # fmt: skip
