"""The agent's tool: it works out what two numbers come to, and raises on what it cannot read."""

from __future__ import annotations

import re

from examples.math.problems import calculated

_EXPRESSION = re.compile(r"\s*(\d{1,6})\s*([-+*])\s*(\d{1,6})\s*")


async def calculate(expression: str) -> str:
    """Work out an expression.

    Args:
        expression (`str`): Two whole numbers with +, - or * between them.
    """
    read = _EXPRESSION.fullmatch(expression)
    if read is None:
        raise ValueError("not an expression of two numbers")
    return str(calculated(int(read[1]), read[2], int(read[3])))


SCHEMA = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Work out an expression.",
        "parameters": {
            "properties": {
                "expression": {"description": "Two whole numbers with +, - or * between them.", "type": "string"}
            },
            "required": ["expression"],
            "type": "object",
        },
    },
}
