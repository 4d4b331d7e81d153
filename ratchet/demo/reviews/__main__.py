"""The agent's command line: `python -m ratchet.demo.reviews train | test`.

`train` sends ordinary traffic: several attempts at each training review, until --rounds or --seconds are over. It does
no training. `test` labels the held-out reviews. OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL name the server.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from ratchet.demo.email_search.agent import TaskRollout, run_attempts, shuffled
from ratchet.demo.email_search.openai_client import connection
from ratchet.demo.email_search.progress import Results, RolloutProgress, summary
from ratchet.demo.reviews.agent import ReviewAgent
from ratchet.demo.reviews.tasks import ReviewTask, held_out_tasks, training_tasks


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0 on success, 1 if nothing succeeded or a variable is missing, 130 on Ctrl-C."""
    chosen = _parser().parse_args(arguments)
    missing = [name for name in ("OPENAI_BASE_URL", "OPENAI_MODEL") if not os.environ.get(name)]
    if missing:
        print(f"reviews {chosen.verb}: set {' and '.join(missing)}", file=sys.stderr)
        return 1
    try:
        rollouts = _train(chosen) if chosen.verb == "train" else _test(chosen)
    except KeyboardInterrupt:
        print(f"reviews {chosen.verb}: stopped; finished rollouts are kept", file=sys.stderr)
        return 130
    print(json.dumps(summary(rollouts)))
    if rollouts and all(one.end == "api_error" for one in rollouts):
        print(f"every rollout failed; the first error: {rollouts[0].errors[0]}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ratchet.demo.reviews", description="An agent that labels reviews.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    train = verbs.add_parser("train", help="attempt training reviews, each several times")
    train.add_argument("--tasks-per-round", type=int, default=8, help="reviews in a line of the progress")
    train.add_argument("--rounds", type=int, help="end after so many times --tasks-per-round reviews")
    train.add_argument("--seconds", type=float, help="start no attempt after this time")
    train.add_argument("--seed", type=int, default=0, help="seed of the order")
    test = verbs.add_parser("test", help="attempt the held-out reviews")
    test.add_argument("--tasks", type=int, help="only the first N")
    for verb, attempts in ((train, 8), (test, 1)):
        verb.add_argument("--attempts", type=int, default=attempts, help="attempts at each review")
        verb.add_argument("--concurrency", type=int, default=16)
        verb.add_argument("--temperature", type=float, default=1.0)
        verb.add_argument("--out", type=Path, help="JSON Lines file for the rollouts")
    return parser


def _train(chosen: argparse.Namespace) -> list[TaskRollout]:
    count = chosen.rounds and chosen.rounds * chosen.tasks_per_round
    tasks = itertools.islice(shuffled(training_tasks(), chosen.seed), count)
    return asyncio.run(
        _run(
            chosen, tasks, total=count and count * chosen.attempts, per_round=chosen.tasks_per_round * chosen.attempts,
            seconds=chosen.seconds,
        )
    )  # fmt: skip


def _test(chosen: argparse.Namespace) -> list[TaskRollout]:
    tasks = held_out_tasks()[: chosen.tasks]
    return asyncio.run(_run(chosen, tasks, total=len(tasks) * chosen.attempts))


async def _run(
    chosen: argparse.Namespace,
    tasks: Iterable[ReviewTask],
    *,
    total: int | None,
    per_round: int | None = None,
    seconds: float | None = None,
) -> list[TaskRollout]:
    stop = asyncio.Event()
    if seconds is not None:
        asyncio.get_running_loop().call_later(seconds, stop.set)
    client = connection(os.environ["OPENAI_BASE_URL"], os.environ.get("OPENAI_API_KEY", "none"))
    with RolloutProgress(chosen.verb, total, per_round) as progress, Results(chosen.out) as results:

        def on_result(rollout: TaskRollout) -> None:
            results.write(rollout)
            progress.add(rollout)

        async with client:
            agent = ReviewAgent(client, os.environ["OPENAI_MODEL"], chosen.temperature)
            return await run_attempts(
                tasks, agent.attempt, attempts=chosen.attempts, concurrency=chosen.concurrency, on_result=on_result,
                stop=stop,
            )  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
