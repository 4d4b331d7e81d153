"""What every client's agent is asked, what its tools return, and what the scripted engine therefore samples.

Four calls: one tool, another tool, both at once, the answer. The directives of tests/proxy/scripted_vllm.py travel in
the question and in the tools' results.
"""

from __future__ import annotations

from typing import Any

from tests.proxy.scripted_vllm import tool_text

SYSTEM = "You answer questions about a mailbox. Use the tools."
ANSWER = "It is 40"
_ARGUMENTS = {"q": "budget", "n": 2}
_SCHEMA = {
    "type": "object",
    "properties": {"q": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["q", "n"],
}
_SEARCH, _READ = (tool_text(name, _ARGUMENTS) for name in ("search", "read"))

SAMPLED = (_SEARCH, _READ, _SEARCH + _READ, ANSWER)
REPLIES = {
    "search": ["Two mails. #tool=read", "No more mails. #say=It.is.40"],
    "read": ["Look again. #tool=search+read", "The budget is 40. #say=It.is.40"],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"{name} mails", "parameters": _SCHEMA}}
    for name in ("search", "read")
]


def marker(client: str, streamed: bool) -> str:
    """What tells this run's question from all others."""
    return f"[{client} {'streamed' if streamed else 'whole'}]"


def asked(client: str, streamed: bool) -> dict[str, Any]:
    """The question of one run."""
    return {
        "question": f"{marker(client, streamed)} What is the budget? #tool=search",
        "streamed": streamed,
        "replies": REPLIES,
        "system": SYSTEM,
        "tools": TOOLS,
        "options": {},
    }
