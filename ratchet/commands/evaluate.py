"""The group `ratchet eval`: measure models without training. Evaluations on public benchmarks are plug-ins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ratchet import options
from ratchet.commands.tune import (
    add_rollout_options,
    draw,
    limit,
    png,
    print_result,
    resume_comparison,
    score_range,
    split,
)

_EXIT_CODES = {"better": 0, "tied": 3, "inconclusive": 3, "worse": 4}


@click.group("eval", cls=options.PluginGroup, plugins="ratchet.evaluations", invoke_without_command=True)
@click.option("--model", metavar="NAME", help="Model to measure: a version such as policy@4, or a `model_list` name.")
@click.option("--against", metavar="NAME", help="Model to compare with.  [default: the live version]")
@split
@limit
@score_range
@resume_comparison
@png("the comparison")
@add_rollout_options
@options.as_json
@click.pass_context
def evaluate(context: click.Context, /, model: str | None, against: str | None, png: Path | None, **given: Any) -> int:
    """Compare a model or version with another one on a task set, task by task.

    Nothing is trained. Exits with 0 if the model is better, 3 if no difference is shown, 4 if it is worse, and 1 on
    errors or if no rollout could be scored. If nothing runs, the services that the models need are started and stopped
    again: only the proxy for models of `model_list`. Without --against, a model is compared with the live version; the
    live version itself, and models of a project without a base model, are measured alone. The commands below run
    public benchmarks.

    \b
    Example:
      ratchet eval --model policy@4 --against policy@0 --tasks ./tasks --workflow agent:run
      ratchet eval --model gpt-small --against gpt-big --tasks ./tasks --workflow agent:run
    """
    if context.invoked_subcommand is not None:
        return 0
    if model is None and given["resume"] is None:
        raise click.UsageError("name a model (--model policy@4) or one of the commands that --help lists")
    import msgspec

    from ratchet.api import evaluate, reports
    from ratchet.api.context import serves_agent

    settings = options.read_agent_settings(context)
    baseline_name = against or (settings.model if serves_agent(settings) else None)
    candidates = (baseline_name, model or "") if baseline_name else (model or "",)  # a resumed run has its own
    own = {name: given[name] for name in ("split", "limit", "score_range", "resume")}
    wanted = evaluate.ComparisonOptions("eval", candidates, **own, may_be_one=against is None)
    request, found = evaluate.compare(settings, wanted)
    baseline, measured = request.candidates[0], request.candidates[-1]
    pair = found.ranking.pair(measured, baseline) if measured != baseline else None
    both = {} if pair is None else {"pair": msgspec.to_builtins(pair), "verdict": str(pair.verdict)}

    def printed() -> None:
        reports.show_selection(found, with_choice=False)
        if pair is not None:
            click.echo(f"{pair.candidate} against {pair.against}: {pair.verdict}: {pair.describe()}")

    print_result(evaluate.plain(found) | both, printed)
    draw(reports.draw_selection, found, png)
    if not found.measured:
        return 1
    return 0 if pair is None else _EXIT_CODES[str(pair.verdict)]
