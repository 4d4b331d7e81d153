"""What the commands share: options with one meaning everywhere, and settings with options laid over them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from ratchet.settings import Settings
    from ratchet.store.store import Store

_Command = TypeVar("_Command", bound=Callable[..., Any])

project = click.option("--project", metavar="NAME", help="Project, and name of its state folder.  [default: default]")
as_json = click.option("--json", "as_json", is_flag=True, help="Print data as JSON.")
store_url = click.option("--store", metavar="URL", help="Store: a database URL or an SQLite path.")
alias = click.option("--model", metavar="ALIAS", help="Name that agents give as `model`.  [default: policy]")
proxy_url = click.option("--proxy", metavar="URL", help="Proxy to go through.  [default: the running project's]")
tasks = click.option("--tasks", metavar="SOURCE", help="Task set: an imported name, a folder, a file or a hub name.")
split = click.option("--split", metavar="NAME", help="Split of the task set.")
test_size = click.option(
    "--test-size",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    help="Share of a task set with one split that is held out.",
)
workflow = click.option(
    "--workflow", metavar="SPEC", help="Agent: module:function, file.py:function, or 'python my_agent.py'."
)
attempts = click.option("--attempts", type=click.IntRange(min=1), help="Rollouts of each task and candidate.")
concurrency = click.option("--concurrency", type=click.IntRange(1, 1024), help="Rollouts at the same time.")
seed = click.option("--seed", type=click.IntRange(min=0), help="Seed of whatever is drawn.")
base_model = click.option("--base-model", metavar="PATH", help="Model that learns: a folder or a hub name.")


def read_judge(context: click.Context, parameter: click.Parameter, value: str | None) -> Any:
    """Return `module:function` as it is, and what a YAML file holds."""
    if value is None or not value.endswith((".yaml", ".yml", ".json")):
        return value
    import yaml

    try:
        return yaml.safe_load(Path(value).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise click.BadParameter(f"{value}: {' '.join(str(error).split())}") from error


judge = click.option(
    "--judge",
    metavar="JUDGE",
    callback=read_judge,
    help="Judge of trajectories: module:function, or a YAML file (docs/judges.md); without one nothing is trained.",
)


def settings_of(context: click.Context, values: dict[str, Any]) -> Settings:
    """Read the settings with options laid over them; `values` maps `proxy.port` to what --port was given.

    None is not set. Raises SettingsError, which names the option.
    """
    from ratchet.settings import load

    named = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    options = {
        tuple(key.split(".")): (named.get(key.rpartition(".")[2], f"option for {key}"), value)
        for key, value in values.items()
    }
    return load(context.obj, options)


def project_settings_of(context: click.Context, values: dict[str, Any]) -> Settings:
    """Read the settings as `settings_of` does, with model and store of what the project runs, or ran last.

    Options win over what runs. Raises SettingsError.
    """
    from ratchet.settings.last_run import adopt

    given = {key for key, value in values.items() if value is not None}
    return adopt(settings_of(context, values), given)


def held_out(settings: Settings) -> float:
    """Return the share of tasks that are set aside for evaluation, also where the trainer's settings are incomplete."""
    gate = dict(settings.trainer).get("release")
    share = gate.get("held_out_share", 0.0) if isinstance(gate, dict) else 0.0
    return float(share or 0.0)


@contextmanager
def open_store_for_command(url: str, *, create: bool = True) -> Iterator[Store]:
    """Open a store for one command. A command that only reads makes none where a name was misspelt."""
    from ratchet.store.store import open_store

    opened = open_store(url, create=create)
    try:
        yield opened
    finally:
        opened.close()


def open_project_store(context: click.Context, *, create: bool = False, **given: Any) -> AbstractContextManager[Store]:
    """Open the store of what the project runs, or ran last; options win. Raises SettingsError."""
    return open_store_for_command(project_settings_of(context, given).store_url, create=create)


def person() -> str:
    """Return who decides: the name of whoever runs the command."""
    import getpass

    try:
        return getpass.getuser()
    except OSError:  # a container may run under a number that has no name
        return "a person"


def emit(content: Any) -> None:
    """Print data as JSON."""
    import json

    click.echo(json.dumps(content, indent=2, default=str))
