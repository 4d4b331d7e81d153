"""Scenarios: an agent's question, its tools' results, and what the scripted engine samples in each call.

The directives of tests/harness/proxy/scripted_vllm.py travel in the question and in the tools' results.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tests.harness.proxy.scripted_vllm import tool_text

SYSTEM = "You answer questions about a mailbox. Use the tools."
ANSWER = "It is 40"
_ARGUMENTS = {"q": "budget", "n": 2}
_SCHEMA = {
    "type": "object",
    "properties": {"q": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["q", "n"],
}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": f"{name} mails", "parameters": _SCHEMA}}
    for name in ("search", "read")
]


@dataclass(frozen=True)
class Scenario:
    """A question's directives, the tools' results in order (the last one for good), and what is sampled."""

    directives: str
    search: tuple[str, ...]
    read: tuple[str, ...]
    sampled: tuple[str, ...]

    def question(self, marker: str, streamed: bool) -> dict[str, Any]:
        """Return the task as a program reads it."""
        return {
            "question": f"{marker} What is the budget? {self.directives}",
            "streamed": streamed,
            "replies": {"search": self.search, "read": self.read},
            "system": SYSTEM,
            "tools": TOOLS,
            "options": {},
        }


def _loop(end: str, last: str) -> Scenario:
    """One tool, another one, both at once, the end."""
    search, read = (tool_text(name, _ARGUMENTS) for name in ("search", "read"))
    return Scenario(
        "#tool=search",
        search=("Two mails. #tool=read", f"No more mails. {end}"),
        read=("Look again. #tool=search+read", f"The budget is 40. {end}"),
        sampled=(search, read, search + read, last),
    )


LOOP = _loop("#say=It.is.40", ANSWER)
FINAL_TOOL = _loop(
    '#tool=final_answer #args={"answer":"It.is.40"}', tool_text("final_answer", {"answer": ANSWER})
)  # the agent ends with a tool of its framework
CODE = Scenario(
    "#say=I.search:<code>print(search('budget',2)) #stopped=</code>",
    search=("Two mails. #say=I.read:<code>print(read('budget',2)) #stopped=</code>",),
    read=("The budget is 40. #say=I.know:<code>final_answer('It.is.40') #stopped=</code>",),
    sampled=(
        "I search:<code>print(search('budget',2))",
        "I read:<code>print(read('budget',2))",
        "I know:<code>final_answer('It is 40')",
    ),
)  # the agent acts in code and appends the closing tag itself
