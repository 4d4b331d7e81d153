"""The group `ratchet eval`: measure without training anything; each kind of evaluation in a file of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ratchet import options
from ratchet.commands.eval_versions import versions
from ratchet.errors import CliError
from ratchet.tuning.context import add_rollout_options


class EvaluationGroup(click.Group):
    """A group whose commands are the plug-ins of `ratchet.evaluations`, imported when one is used or listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the installed evaluations."""
        from ratchet.trainer.user_code.plugins import EVALUATIONS, plugin_names

        return plugin_names(EVALUATIONS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return an evaluation's command; for one that cannot be imported, a command that fails with the reason."""
        from ratchet.trainer.user_code.plugins import EVALUATIONS, PluginError, load_plugin

        if cmd_name not in self.list_commands(ctx):
            return None
        try:
            command: click.Command = load_plugin(EVALUATIONS, cmd_name)
        except PluginError as error:
            return _unavailable(cmd_name, str(error))
        return command


def _unavailable(name: str, reason: str) -> click.Command:
    @click.command(name, help=f"Not available: {reason}", context_settings={"ignore_unknown_options": True})
    @click.argument("arguments", nargs=-1)
    def fail(arguments: tuple[str, ...]) -> None:
        raise CliError(reason)

    return fail


@click.group("eval", cls=EvaluationGroup, invoke_without_command=True)
@click.option("--model", metavar="NAME", help="What is measured: a version such as policy@4, or a model of model_list.")
@click.option("--against", metavar="NAME", help="What it is compared with.  [default: the live version]")
@click.option("--split", default="test", show_default=True, help="Split of the task set that is asked.")
@click.option("--limit", type=click.IntRange(1), help="Only the first so many tasks of the split.")
@click.option("--score-range", type=(float, float), metavar="LOW HIGH", help="What the judge can give.  [default: 0 1]")
@click.option("--resume", metavar="ID", help="Go on with a run that was stopped; what ended is not run again.")
@click.option("--png", type=click.Path(path_type=Path, dir_okay=False), help="Draw the comparison into this file.")
@add_rollout_options
@options.as_json
@click.pass_context
def evaluate(
    context: click.Context, /, model: str | None, against: str | None, png: Path | None, as_json: bool, **given: Any
) -> int:
    """Measure a model or a version on a task set, beside another: the same tasks for both, compared task by task.

    Nothing is trained. Ends with 0 where it is shown to be better, 3 where no difference is shown, 4 where it is shown
    to be worse, 1 on errors and where no rollout at all could be scored. The commands below measure on public
    benchmarks.

    \b
    Example:
      ratchet eval --model policy@4 --against policy@0 --tasks ./tasks --workflow agent:run
    """
    if context.invoked_subcommand is not None:
        return 0
    if model is None and given["resume"] is None:
        raise click.UsageError("say what is measured: --model policy@4, or one of the commands that --help shows")
    return versions(context, model, against, png, as_json, given)
