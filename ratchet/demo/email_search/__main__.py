"""The agent's command line: `python -m ratchet.demo.email_search build-db | train | test`.

`train` sends ordinary traffic: several attempts at each training task. It does no training. `test` attempts the
held-out tasks, or with --split the validation tasks or the hard set, and prints a summary. OPENAI_BASE_URL,
OPENAI_API_KEY and OPENAI_MODEL name the server.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ratchet.demo.email_search.agent import MAX_TOKENS, TaskRollout, run_tasks, shuffled
from ratchet.demo.email_search.hard_tasks import make_hard_set
from ratchet.demo.email_search.mailbox import DATABASE, Mailbox, synthetic_mails
from ratchet.demo.email_search.progress import Results, RolloutProgress, summary
from ratchet.demo.email_search.prompt import MAX_TURNS
from ratchet.demo.email_search.tasks import HARD, MailTask, every_task, home, make_tasks, read_tasks, write_tasks


class UsageError(Exception):
    """A missing or wrong argument; the text names it and the remedy."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0 on success, 1 with a message on stderr on failure, 130 on Ctrl-C."""
    chosen = _parser().parse_args(arguments)
    try:
        return int(chosen.run(chosen))
    except (UsageError, OSError, ValueError, ImportError) as error:
        print(f"email_search {chosen.verb}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"email_search {chosen.verb}: stopped; finished rollouts are kept", file=sys.stderr)
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m ratchet.demo.email_search", description="An e-mail search agent.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    build = verbs.add_parser("build-db", help="write the mailbox and the task set")
    build.add_argument("--source", choices=("synthetic", "hub"), default="synthetic")
    build.add_argument(
        "--dataset", nargs="+", help="with --source hub: hub names or local folders of mails, and of questions"
    )
    build.add_argument("--limit", type=int, default=20_000, help="with --source hub: at most this many mails")
    build.add_argument("--seed", type=int, default=42, help="with --source synthetic: seed of mails and questions")
    build.set_defaults(run=_build)
    train = verbs.add_parser("train", help="attempt training tasks, each several times")
    train.add_argument("--tasks-per-round", type=_positive, default=16)
    train.add_argument("--attempts", type=_positive, default=8, help="attempts at each task")
    train.add_argument("--rounds", type=_positive, default=10)
    train.set_defaults(run=_train)
    test = verbs.add_parser("test", help="attempt the held-out tasks and print a summary")
    test.add_argument("--attempts", type=_positive, default=1)
    test.add_argument("--tasks", type=_positive, help="attempt only the first N tasks")
    test.add_argument("--split", choices=("test", "validation", HARD), default="test", help="which tasks")
    test.add_argument("--json", type=Path, help="write the summary to this file")
    test.set_defaults(run=_test)
    for verb in (train, test):
        _add_traffic_options(verb)
    for verb in (build, train, test):
        verb.add_argument("--home", type=Path, default=home(), help="folder of mailbox and tasks (EMAIL_SEARCH_HOME)")
    return parser


def _add_traffic_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--model", default=os.environ.get("OPENAI_MODEL"), help="model name (default: OPENAI_MODEL)")
    verb.add_argument("--concurrency", type=_positive, default=64, help="concurrent rollouts")
    verb.add_argument("--temperature", type=float, default=1.0)
    verb.add_argument("--max-turns", type=_positive, default=MAX_TURNS)
    verb.add_argument("--max-tokens", type=_positive, default=MAX_TOKENS, help="maximum tokens per reply")
    verb.add_argument("--seed", type=int, default=0, help="seed of the task order")
    verb.add_argument("--out", type=Path, help="JSON Lines file for the rollouts")


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return number


def _build(chosen: argparse.Namespace) -> int:
    path = chosen.home / DATABASE
    if chosen.source == "hub":
        from ratchet.demo.email_search.mail_datasets import build_from_datasets

        if not chosen.dataset:
            raise UsageError("--source hub needs --dataset NAME (hub names or local folders)")
        count, splits = build_from_datasets(path, chosen.dataset, chosen.limit)
    else:
        made = synthetic_mails(chosen.seed)
        Mailbox.build(path, (one.mail for one in made)).close()
        count, splits = len(made), make_tasks(made, chosen.seed)
        _build_hard_set(chosen.home / HARD, chosen.seed, splits)
    if splits:
        write_tasks(chosen.home, splits)
    counts = ", ".join(f"{len(tasks)} {split}" for split, tasks in splits.items())
    print(f"{path}: {count} mails; tasks: {counts or 'unchanged'}")
    return 0


def _build_hard_set(folder: Path, seed: int, splits: dict[str, list[MailTask]]) -> None:
    taken = {task.question for tasks in splits.values() for task in tasks}
    mails, tasks = make_hard_set(seed, taken)
    Mailbox.build(folder / DATABASE, mails).close()
    write_tasks(folder, {"test": tasks})


def _train(chosen: argparse.Namespace) -> int:
    order = shuffled(read_tasks(chosen.home, "train"), chosen.seed)
    tasks = list(itertools.islice(order, chosen.rounds * chosen.tasks_per_round))
    rollouts = _run(chosen, tasks, "train", per_round=chosen.tasks_per_round * chosen.attempts)
    print(json.dumps(summary(rollouts)))
    return _status(rollouts)


def _test(chosen: argparse.Namespace) -> int:
    if chosen.split == HARD:
        chosen.home, chosen.split = chosen.home / HARD, "test"
    tasks = read_tasks(chosen.home, chosen.split)[: chosen.tasks]
    rollouts = _run(chosen, tasks, "test", per_round=None)
    text = json.dumps({"temperature": chosen.temperature, "model": chosen.model, **summary(rollouts)})
    if chosen.json:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(text + "\n", encoding="utf-8")
    print(text)
    return _status(rollouts)


def _run(chosen: argparse.Namespace, tasks: list[MailTask], name: str, per_round: int | None) -> list[TaskRollout]:
    if not chosen.model:
        raise UsageError("no model: give --model NAME or set OPENAI_MODEL")
    base_url = os.environ.get("OPENAI_BASE_URL")
    if not base_url:
        raise UsageError("no server: set OPENAI_BASE_URL, for example to http://127.0.0.1:8000/v1")
    answers = {task.answer for task in every_task(chosen.home)}
    with RolloutProgress(name, len(tasks) * chosen.attempts, per_round) as progress, Results(chosen.out) as results:

        def on_result(rollout: TaskRollout) -> None:
            results.write(rollout)
            progress.add(rollout)

        return asyncio.run(
            run_tasks(
                tasks,
                base_url=base_url,
                api_key=os.environ.get("OPENAI_API_KEY", "none"),
                model=chosen.model,
                box=Mailbox(chosen.home / DATABASE),
                attempts=chosen.attempts,
                concurrency=chosen.concurrency,
                temperature=chosen.temperature,
                max_turns=chosen.max_turns,
                max_tokens=chosen.max_tokens,
                other_answers=answers,
                on_result=on_result,
            )
        )


def _status(rollouts: list[TaskRollout]) -> int:
    """Return 1 if every rollout failed with an API error."""
    if rollouts and all(rollout.end == "api_error" for rollout in rollouts):
        print(f"every rollout failed; the first error: {rollouts[0].errors[0]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
