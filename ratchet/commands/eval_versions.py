"""`ratchet eval --model NAME --against NAME`: one model or version against another on the same tasks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ratchet import options

CODES = {"better": 0, "tied": 3, "inconclusive": 3, "worse": 4}


def versions(
    context: click.Context,
    model: str | None,
    against: str | None,
    png: Path | None,
    as_json: bool,
    given: dict[str, Any],
) -> int:
    """Compare, print, and return the exit code. Raises UsageError."""
    from ratchet.tuning import compare_models, selection_report
    from ratchet.tuning import context as tuning

    own = {name: given.pop(name) for name in ("split", "limit", "score_range", "resume")}
    settings = tuning.settings_of(context, given)
    candidates = (against or settings.model, model or "")  # a run that is resumed has its own
    request, found = compare_models.compare(settings, compare_models.Asked("eval", candidates, **own))
    pair = found.ranking.pair(request.candidates[1], request.candidates[0])
    if as_json:
        import msgspec

        options.emit(selection_report.plain(found) | {"pair": msgspec.to_builtins(pair), "verdict": str(pair.verdict)})
    else:
        selection_report.show(found, with_choice=False)
        click.echo(f"{pair.candidate} against {pair.against}: {pair.verdict}: {pair.told()}")
    if png is not None:
        selection_report.draw(found, png)
        click.echo(f"drawn: {png}", err=True)
    return CODES[str(pair.verdict)] if found.measured else 1
