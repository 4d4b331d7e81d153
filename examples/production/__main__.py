"""The stream's command line: `python -m examples.production --users 2400`.

OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL name the server. `python -m ratchet.demo.email_search build-db` writes
the mailbox. With `--harmful-version` the users meet a version that is worse on purpose (`harmful.py`).
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
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from examples.production import harmful
from examples.production.figures import figures
from examples.production.stream import Served, serve
from examples.production.users import USUAL, Habits, visits
from ratchet.demo.email_search.mailbox import DATABASE, Mailbox
from ratchet.demo.email_search.tasks import home


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve the users and print the figures. Returns 1 if an argument is missing or every rollout failed."""
    chosen = _parser().parse_args(arguments)
    base_url = os.environ.get("OPENAI_BASE_URL")
    try:
        if not chosen.model or not base_url:
            raise ValueError("no server or no model: set OPENAI_BASE_URL and OPENAI_MODEL")
        box = Mailbox(chosen.home / DATABASE)
        version = (
            harmful.hand_in(chosen.model, chosen.harmful_version, chosen.config) if chosen.harmful_version else None
        )
    except (OSError, ValueError, harmful.NotReady) as error:
        print(f"production: {error}", file=sys.stderr)
        return 1
    result = _run(chosen, base_url, box, version)
    if chosen.json:
        chosen.json.write_text(json.dumps(result) + "\n", encoding="utf-8")
    print(json.dumps(result, indent=2))
    return int(result["errors"] == result["users"])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m examples.production", description="A stream of simulated users.")
    parser.add_argument("--model", default=os.environ.get("OPENAI_MODEL"), help="model name (default: OPENAI_MODEL)")
    parser.add_argument("--users", type=int, default=2400, help="users to serve")
    parser.add_argument("--concurrency", type=int, default=24, help="concurrent users")
    parser.add_argument("--seed", type=int, default=0, help="seed of the users and their feedback")
    parser.add_argument("--silent", type=float, default=USUAL.silent, help="share of users without feedback")
    parser.add_argument("--mistaken", type=float, default=USUAL.mistaken, help="share of thumbs that are wrong")
    parser.add_argument("--delay", type=float, default=USUAL.delay, help="mean seconds to the thumb")
    kinds = (harmful.OPPOSITE, harmful.RANDOM)
    parser.add_argument("--harmful-version", choices=kinds, help="first hand in a copy of the live version, made worse")
    parser.add_argument("--config", type=Path, default=harmful.CONFIG, help="the project that takes the version")
    parser.add_argument("--home", type=Path, default=home(), help="folder of the mailbox (EMAIL_SEARCH_HOME)")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    return parser


def _run(chosen: argparse.Namespace, base_url: str, box: Mailbox, version: int | None) -> dict[str, Any]:
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("content={task.fields[content]:.2f}"),
    )
    with Progress(TextColumn("{task.description}"), *columns, console=Console(stderr=True)) as bars:
        bar = bars.add_task("users", total=chosen.users, content=0.0)
        contents: list[bool] = []

        def on_served(one: Served) -> None:
            contents.append(one.rollout.success)
            bars.update(bar, advance=1, content=sum(contents) / len(contents))

        served, counter = asyncio.run(
            serve(
                itertools.islice(visits(chosen.seed), chosen.users),
                base_url=base_url,
                api_key=os.environ.get("OPENAI_API_KEY", "none"),
                model=chosen.model,
                box=box,
                concurrency=chosen.concurrency,
                seed=chosen.seed,
                habits=Habits(silent=chosen.silent, mistaken=chosen.mistaken, delay=chosen.delay),
                on_served=on_served,
            )
        )
    result = figures(served) | {"thumb_statuses": {str(code): n for code, n in sorted(counter.statuses.items())}}
    if version is not None:
        result["harmful_version"] = harmful.outcome(chosen.model, version, served, chosen.config)
    return result


if __name__ == "__main__":
    sys.exit(main())
