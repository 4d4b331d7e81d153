"""The opening of a rollout, and the three tools: their JSON schemas, and their effect on the mailbox.

`call_tool` never raises on input from a model: each mistake has a failure class and a short error text for the model.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ratchet.demo.email_search.mailbox import TODAY, USER_EMAIL, Mailbox

MAX_TURNS = 6
ARGUMENT = {"search_inbox": "keywords", "read_email": "message_id", "return_final_answer": "answer"}
ACCEPTED = "done"


def opening(question: str, max_turns: int = MAX_TURNS, inbox: str = "", date: str = "") -> list[dict[str, Any]]:
    """Return the first two messages of a rollout, short because the tiny policy reads them in every call.

    `inbox` is the user's address and `date` the day of the question; "": those of the synthetic mailbox.
    """
    user, today = inbox or USER_EMAIL, date or TODAY
    system = f"Search the inbox of {user} with the tools. Today is {today}. You may take {max_turns} turns."
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def _tool(name: str, description: str, schema: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {ARGUMENT[name]: schema}, "required": [ARGUMENT[name]]}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


TOOLS: tuple[dict[str, Any], ...] = (
    _tool(
        "search_inbox",
        "Find mails that hold every keyword. Returns message ids and subjects.",
        {"type": "array", "items": {"type": "string"}},
    ),
    _tool("read_email", "Read the mail with this message id.", {"type": "string"}),
    _tool("return_final_answer", "End the task with the answer, as short as possible.", {"type": "string"}),
)


@dataclass(frozen=True, slots=True)
class ToolOutput:
    """The text for the model, the failure class (None: success), and the final answer if the call gave one.

    Failure classes: malformed_json, unknown_tool, unexpected_argument, missing_argument, wrong_type, no_hits,
    no_such_message.
    """

    content: str
    failure: str | None = None
    answer: str | None = None


def call_tool(box: Mailbox, name: str, arguments: str) -> ToolOutput:
    """Run tool `name` with `arguments`, the JSON text from the model."""
    if name not in ARGUMENT:
        return _failed("unknown_tool", f"unknown tool {name}")
    try:
        parsed = json.loads(arguments)
    except ValueError:
        return _failed("malformed_json", "arguments are not JSON")
    if not isinstance(parsed, dict):
        return _failed("wrong_type", "arguments must be an object")
    key = ARGUMENT[name]
    extra = next((field for field in parsed if field != key), None)
    if extra is not None:
        return _failed("unexpected_argument", f"unexpected argument {extra}")
    if key not in parsed:
        return _failed("missing_argument", f"missing argument {key}")
    if name == "search_inbox":
        return _search(box, parsed[key])
    if not isinstance(parsed[key], str):
        return _failed("wrong_type", f"{key} must be a string")
    if name == "read_email":
        body = box.read(parsed[key])
        return _failed("no_such_message", "no such message") if body is None else ToolOutput(body)
    return ToolOutput(ACCEPTED, answer=parsed[key])


def _search(box: Mailbox, keywords: object) -> ToolOutput:
    if not isinstance(keywords, list) or not keywords or not all(isinstance(word, str) for word in keywords):
        return _failed("wrong_type", "keywords must be a list of strings")
    hits = [{"message_id": message_id, "subject": subject} for message_id, subject in box.search(keywords)]
    return ToolOutput(json.dumps(hits, ensure_ascii=False), None if hits else "no_hits")


def _failed(failure: str, text: str) -> ToolOutput:
    return ToolOutput(json.dumps({"error": text}), failure)
