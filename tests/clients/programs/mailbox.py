"""What the programs here share: a mailbox with two tools, and the questions that are put to an agent.

A program reads its questions from standard input and prints one JSON line with the agent's own result for each. Where
the agent reaches its model is in the environment, as for any agent: OPENAI_BASE_URL or ANTHROPIC_BASE_URL and a key.
What the tools return is scripted by the test, so that the scripted engine behind the proxy knows what to answer.
"""

from __future__ import annotations

import asyncio
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

Asked = dict[str, Any]  # question, streamed, replies by tool; for the SDKs also: system, tools, options, rounds
Tool = Callable[[str, int], str]


def tools(asked: Asked) -> tuple[Tool, Tool]:
    """Return the two tools of one agent, as a user would write them."""

    def search(q: str, n: int) -> str:
        """Search the mailbox.

        Args:
            q: the words to look for
            n: how many mails to return
        """
        return take(asked, "search")

    def read(q: str, n: int) -> str:
        """Read a mail.

        Args:
            q: the words that the mail contains
            n: the number of the mail
        """
        return take(asked, "read")

    return search, read


def take(asked: Asked, tool: str) -> str:
    """Return what this call of a tool returns."""
    replies = asked["replies"].get(tool, ["there is no such tool"])
    return str(replies.pop(0) if len(replies) > 1 else replies[0])


def answer(agent: Callable[[Asked], Any], package: str) -> None:
    """Put every question to the agent, one after the other, and print its results."""
    asyncio.run(_answer(agent, package))


async def _answer(agent: Callable[[Asked], Any], package: str) -> None:
    results, sys.stdout = sys.stdout, sys.stderr  # some frameworks talk
    for asked in json.load(sys.stdin):
        said = await agent(asked) if inspect.iscoroutinefunction(agent) else await asyncio.to_thread(agent, asked)
        print(json.dumps({"answer": said, "package": package, "version": version(package)}), file=results, flush=True)
