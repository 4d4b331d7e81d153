"""Renders conversations as token rows over standard input and output; the controller starts it (`chat_rows.py`).

    python -m ratchet.trainer.rows.chat_rows_program MODEL          one JSON value per line

The first response is {} or {"error", "kind"}. Each request is a conversation, each response {"rows": [...]} or
{"error", "kind"}. transformers loads the tokenizer, as vLLM does, and with it torch; exits at the end of its input.
"""

from __future__ import annotations

import os
import sys

import msgspec

from ratchet.trainer.errors import ModelError, RowError
from ratchet.trainer.rows.chat_rows import ChatRows, Conversation
from ratchet.trainer.rows.tokenizer import load_tokenizer


def main() -> None:
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # a template or a library may print to standard output

    def respond(response: dict[str, object]) -> None:
        output.write(msgspec.json.encode(response) + b"\n")
        output.flush()

    try:
        chat = ChatRows(load_tokenizer(sys.argv[1]))
    except (ModelError, RowError) as error:
        respond({"error": str(error), "kind": type(error).__name__})
        return
    respond({})
    for line in sys.stdin.buffer:
        try:
            respond({"rows": chat.rows(msgspec.json.decode(line, type=Conversation))})
        except RowError as error:
            respond({"error": str(error), "kind": type(error).__name__})


if __name__ == "__main__":
    main()
