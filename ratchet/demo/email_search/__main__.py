"""The agent's command line: `python -m ratchet.demo.email_search build-db | train | test`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from openai import AsyncOpenAI

from ratchet.demo.email_search.agent import MAX_TOKENS, MAX_TURNS, Agent
from ratchet.demo.email_search.mailbox import DATABASE, Mailbox, synthetic_mails
from ratchet.demo.email_search.tasks import every_task, home, make_tasks, read_tasks, write_tasks
from ratchet.demo.traffic import Attempt, command_line, run_verb


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0 on success, 1 with a message on stderr on failure, 130 on Ctrl-C."""
    parser, verbs = command_line("ratchet.demo.email_search", ("test", "validation"))
    build = verbs.add_parser("build-db", help="write the mailbox and the task set")
    build.add_argument("--seed", type=int, default=42, help="of mails and questions")
    for verb in verbs.choices.values():
        verb.add_argument("--home", type=Path, default=home(), help="folder of mailbox and tasks (EMAIL_SEARCH_HOME)")
        if verb is not build:
            verb.add_argument("--max-turns", type=int, default=MAX_TURNS)
            verb.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help="of a reply")
    chosen = parser.parse_args(arguments)
    if chosen.verb == "build-db":
        return _build(chosen.home, chosen.seed)

    def attempt_with(client: AsyncOpenAI) -> Attempt:
        answers, box = frozenset(task.answer for task in every_task(chosen.home)), Mailbox(chosen.home / DATABASE)
        return Agent(
            client, box, chosen.model, chosen.temperature, chosen.max_turns, chosen.max_tokens, answers
        ).attempt  # fmt: skip

    return run_verb(chosen, lambda split: read_tasks(chosen.home, split), attempt_with)


def _build(folder: Path, seed: int) -> int:
    mails = synthetic_mails(seed)
    splits = make_tasks(mails, seed)
    Mailbox.build(folder / DATABASE, [one.mail for one in mails]).close()
    write_tasks(folder, splits)
    counts = ", ".join(f"{len(tasks)} {split}" for split, tasks in splits.items())
    print(f"{folder / DATABASE}: {len(mails)} mails; tasks: {counts}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
