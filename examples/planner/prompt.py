"""The system prompts of both roles, and the planner's only tool."""

from __future__ import annotations

from typing import Any

PLANNER = "You plan. Give the worker one step at a time."
WORKER = "You work out one step."
DELEGATE: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "delegate",
        "description": "Have the worker work out one step, such as 2 + 3.",
        "parameters": {"type": "object", "properties": {"step": {"type": "string"}}, "required": ["step"]},
    },
}
