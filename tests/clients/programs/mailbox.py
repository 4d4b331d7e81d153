"""What the programs here share: a mailbox with two tools, and the tasks of an agent.

A program reads its tasks from standard input and prints one JSON line with the agent's result for each. The model's
URL and key are in the environment, as for any agent: OPENAI_BASE_URL or ANTHROPIC_BASE_URL and a key. The test
scripts the tools' results, so that the scripted engine behind the proxy knows what to answer.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import json
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

BASE_URL = os.environ["OPENAI_BASE_URL"]
KEY = os.environ["OPENAI_API_KEY"]
MODEL = os.environ.get("AGENT_MODEL", "agent")
SYSTEM = "You answer questions about a mailbox. Use the tools."

Task = dict[str, Any]  # question, streamed, replies by tool; for the SDKs also: system, tools, options, rounds
Tool = Callable[[str, int], str]


def tools(task: Task) -> tuple[Tool, Tool]:
    """Return an agent's two tools, as a user would write them."""

    def search(q: str, n: int) -> str:
        """Search the mailbox.

        Args:
            q: the words to look for
            n: how many mails to return
        """
        return take(task, "search")

    def read(q: str, n: int) -> str:
        """Read a mail.

        Args:
            q: the words that the mail contains
            n: the number of the mail
        """
        return take(task, "read")

    return search, read


def take(task: Task, tool: str) -> str:
    """Return the next scripted result of a tool."""
    replies = task["replies"].get(tool, ["there is no such tool"])
    return str(replies.pop(0) if len(replies) > 1 else replies[0])


def answer(agent: Callable[[Task], Any], package: str) -> None:
    """Run the agent on every task in turn and print its results. Ends with every thread's stack if it hangs."""
    faulthandler.dump_traceback_later(110, exit=True)  # before the test's own limit of 120 s, which shows nothing
    asyncio.run(_answer(agent, package))


async def _answer(agent: Callable[[Task], Any], package: str) -> None:
    results, sys.stdout = sys.stdout, sys.stderr  # some frameworks print
    for task in json.load(sys.stdin):
        result = await agent(task) if inspect.iscoroutinefunction(agent) else await asyncio.to_thread(agent, task)
        print(json.dumps({"answer": result, "package": package, "version": version(package)}), file=results, flush=True)
