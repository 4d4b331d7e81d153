"""`ratchet tune prompt`: a better system prompt for an agent that is left as it is; and what was found, promoted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ratchet import options
from ratchet.output.tables import strip_control_characters
from ratchet.tuning.context import EXIT_NOT_BETTER, add_rollout_options, fail_unless_better


@click.command()
@click.option("--method", metavar="NAME", help="Optimizer: gepa, mipro or a plug-in.  [default: gepa]")
@click.option(
    "--rollouts", type=click.IntRange(1), help="Most rollouts in all.  [default: 300 and those on held-out tasks]"
)
@click.option("--tokens", type=click.IntRange(1), help="Most tokens in all, the agent's and the reflections'.")
@click.option("--reflection-url", metavar="URL", help="Language model that proposes prompts: its base URL.")
@click.option("--reflection-model", metavar="NAME", help="Its name there.")
@click.option(
    "--seed-prompt", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Begin from this text."
)
@click.option(
    "--mode", type=click.Choice(["auto", "replace", "append"]), help="How the prompt is used.  [default: auto]"
)
@click.option("--train", type=click.IntRange(1), help="Most training tasks.  [default: 40]")
@click.option("--validation", type=click.IntRange(1), help="Most validation tasks.  [default: 40]")
@click.option("--held-out", type=click.IntRange(1), help="Most held-out tasks.  [default: the whole test split]")
@click.option("--resume", metavar="ID", help="Go on with a run that was stopped or killed; nothing is paid for twice.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write the prompt that was found here.")
@click.option("--promote", is_flag=True, help="Make a candidate version of it where it is shown to be better.")
@options.alias
@add_rollout_options
@fail_unless_better
@options.as_json
@click.pass_context
def prompt(
    context: click.Context, /, resume: str | None, out: Path | None, promote: bool, as_json: bool, **given: Any
) -> int:
    """Search for a better system prompt, and let held-out tasks decide whether it is one.

    The agent is not changed: the proxy swaps the prompt in, for these rollouts only. Training, validation and held-out
    tasks are disjoint. The verdict is `better`, `no better`, `worse` or `undecided`; only the first is promoted. Ends
    with 0 when it came to its end, with 1 on errors; with --fail-unless-better, with 3 for every verdict but `better`.

    \b
    Example:
      ratchet tune prompt --tasks ./tasks --workflow my_agent:run --judge my_agent:judge \\
        --reflection-url http://127.0.0.1:8001 --reflection-model big --rollouts 300
      ratchet tune prompt --resume tun_01J8
    """
    from ratchet.tuning import tune_prompt

    fails: bool = given.pop("fail_unless_better")
    found = tune_prompt.resumed(context, resume, given) if resume else tune_prompt.begun(context, given)
    version = tune_prompt.promoted(context, found, given) if promote and found.better else None
    if out is not None:
        out.write_text(found.prompt)
    if as_json:
        options.emit(found.content | {"promoted": version})
        return EXIT_NOT_BETTER if fails and not found.better else 0
    for line in found.lines():
        click.echo(strip_control_characters(line))
    if promote:
        click.echo(f"candidate {version}: `ratchet policies` shows it" if version else "not promoted: it is not better")
    return EXIT_NOT_BETTER if fails and not found.better else 0


@click.command("promote")
@click.argument("run", metavar="ID")
@click.option("--force", is_flag=True, help="Also where it is not shown to be better.")
@options.store_url
@options.project
@options.as_json
@click.pass_context
def promote_(
    context: click.Context, run: str, anyway: bool, store: str | None, project: str | None, as_json: bool
) -> None:
    """Make a candidate version of the prompt that a run found; the gate, or you, promote it.

    \b
    Example:
      ratchet tune promote tun_01J8
    """
    from ratchet.tuning import tune_prompt

    with options.open_project_store(context, store=store, project=project) as opened:
        version = tune_prompt.candidate(opened, run, anyway=anyway)
    if as_json:
        options.emit({"run": run, "promoted": version})
    else:
        click.echo(f"candidate {version}: the gate takes it from here, or `ratchet policies promote`")
