"""`ratchet judge try --response`: judges one response without a store, as `ratchet.try_judge` does."""

from __future__ import annotations

from typing import Any

import click

from ratchet import options
from ratchet.output import strip_control_characters


def print_judgement(judge: Any, task: str | None, response: str, *, as_json: bool) -> None:
    """Judge a response and print the result. Raises UsageError, JudgeError."""
    import dataclasses

    from ratchet.api.try_out import try_judge

    judged = try_judge(judge, _row_or_key(task), response)
    if as_json:
        options.print_json(dataclasses.asdict(judged))
        return
    parts = " ".join(f"{name}={value:g}" for name, value in judged.components.items())
    shown = (f"{judged.score:g}", parts, judged.explanation)
    click.echo("  ".join(strip_control_characters(part) for part in shown if part))


def _row_or_key(task: str | None) -> dict[str, Any] | str | None:
    """Return a task's row if it is written as a JSON object, else its key. Raises UsageError."""
    import json

    if task is None or not task.lstrip().startswith("{"):
        return task
    try:
        row: dict[str, Any] = json.loads(task)
    except ValueError as error:
        raise click.UsageError(f"--task is no JSON object: {error}") from error
    return row
