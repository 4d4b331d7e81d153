"""What the commands share: options with one meaning everywhere, and the settings and stores that they name.

Importing this is part of `ratchet --help`: everything slow is imported inside the functions.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ratchet.errors import CliError
from ratchet.settings.state_folder import current_user as current_user

if TYPE_CHECKING:
    from ratchet.settings.project_settings import Settings
    from ratchet.store.store import Store

_Command = TypeVar("_Command", bound=Callable[..., Any])
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_STATES = ("open", "sealed", "grouped", "trained", "dropped")
_OUTCOMES = (
    "valid", "unknown_tool", "invalid_json", "schema_violation", "unexpected_argument", "unchecked", "ok", "error",
    "timeout", "empty",
)  # fmt: skip


def duration(text: str) -> float:
    """Return the seconds of a duration such as `30d`, `12h`, `90m` or `2w`. Raises BadParameter."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text)
    if match is None:
        raise click.BadParameter(f"{text!r} is not a duration; write 30d, 12h or 2w")
    return float(match[1]) * _SECONDS[match[2]]


def timestamp(text: str) -> float:
    """Return the Unix seconds of a time in ISO 8601, UTC unless it names a zone. Raises BadParameter."""
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is not a time; write 2026-11-21 or 2026-11-21T12:00:00+01:00") from None
    return (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()


class Setting(click.Option):
    """An option that sets a key of the settings for one run of a command."""

    def __init__(self, *names: Any, key: str, **given: Any) -> None:
        super().__init__(*names, **given)
        self.key = key


def setting(key: str, *names: str, **given: Any) -> Callable[[_Command], _Command]:
    """Add an option that sets a key of the settings, such as `proxy.port`."""
    return click.option(*names, cls=Setting, key=key, **given)


def number(name: str, default: int, text: str, *, most: int | None = None) -> Callable[[_Command], _Command]:
    """Add an option with a number from 1 to `most`."""
    return click.option(name, type=click.IntRange(1, most), default=default, show_default=True, help=text)


project = setting(
    "project", "--project", metavar="NAME", help="Project, and name of its state folder.  [default: default]"
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
store_url = setting("store", "--store", metavar="URL", help="Store: a database URL or an SQLite path.")
alias = setting(
    "model", "--model", metavar="NAME", help="Agent, by the name that it sends as `model`.  [default: the only one]"
)
only_agent = click.option("--model", metavar="NAME", help="Only this agent.  [default: all]")
proxy_url = setting("tuner.proxy_url", "--proxy", metavar="URL", help="Proxy to use.  [default: the running project's]")
tasks = setting(
    "tuner.tasks", "--tasks", metavar="SOURCE", help="Task set: an imported name, a folder, a file or a hub name."
)
test_size = setting(
    "tuner.test_size",
    "--test-size",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    help="Share of the tasks to hold out as test split, if the task set has only one split.",
)
workflow = setting(
    "tuner.workflow", "--workflow", metavar="SPEC",
    help="Agent: module:function, file.py:function, or 'python my_agent.py'.",
)  # fmt: skip
attempts = setting("tuner.attempts", "--attempts", type=click.IntRange(min=1), help="Rollouts per task and candidate.")
concurrency = setting("tuner.concurrency", "--concurrency", type=click.IntRange(1, 1024), help="Concurrent rollouts.")
seed = setting("tuner.seed", "--seed", type=click.IntRange(min=0), help="Random seed.")
base_model = setting("base_model", "--base-model", metavar="PATH", help="Base model: a folder or a hub name.")


def read_judge(context: click.Context, parameter: click.Parameter, value: str | None) -> Any:
    """Return `module:function` unchanged, and the content of a YAML file."""
    if value is None or not value.endswith((".yaml", ".yml", ".json")):
        return value
    import yaml

    try:
        return yaml.safe_load(Path(value).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise click.BadParameter(f"{value}: {' '.join(str(error).split())}") from error


judge = setting(
    "trainer.judge",
    "--judge",
    metavar="JUDGE",
    callback=read_judge,
    help="Judge of trajectories: module:function, or a YAML file (docs/judges.md).  [default: the project's]",
)

_TRAJECTORY_FILTERS: dict[str, dict[str, Any]] = {
    "--state": {"type": click.Choice(_STATES), "help": "in this state."},
    "--model": {"metavar": "NAME", "help": "of this agent."},
    "--version": {"type": int, "help": "of this policy version."},
    "--task": {"help": "of this task key."},
    "--key": {"metavar": "ID", "help": "of the API key with this id."},
    "--tag": {"help": "with this tag."},
    "--since": {"type": timestamp, "metavar": "TIME", "help": "opened at this time or later: 2026-11-21."},
    "--until": {"type": timestamp, "metavar": "TIME", "help": "opened before this time."},
    "--round": {"metavar": "ID", "help": "trained by this round."},
    "--role": {"help": "with a call of this role."},
    "--min-score": {"type": float, "metavar": "SCORE", "help": "with a latest score of at least this."},
    "--max-score": {"type": float, "metavar": "SCORE", "help": "with a latest score of at most this."},
    "--tool": {"metavar": "NAME", "help": "with a call of this tool."},
    "--outcome": {"type": click.Choice(_OUTCOMES), "help": "with a tool call of this outcome or result."},
}


def trajectory_filters(command: _Command) -> _Command:
    """Add the options of a TrajectoryFilter to a command, under the names of its fields."""
    for name, given in reversed(_TRAJECTORY_FILTERS.items()):
        named = given | {"help": f"Only trajectories {given['help']}"}
        command = click.option(name, *(("alias",) if name == "--model" else ()), **named)(command)
    return command


def read_settings(context: click.Context, more: Mapping[str, Any] = MappingProxyType({})) -> Settings:
    """Load the settings, with the command's options that are settings, and with `more`, by key: `proxy.port`.

    A value of None is not set. Raises SettingsError, which names the option.
    """
    from ratchet.settings.load_settings import load

    names = {getattr(one, "key", one.name): one.opts[0] for one in context.command.params}
    values = _given(context, more).items()
    return load(
        context.obj, {tuple(key.split(".")): (names.get(key, f"option for {key}"), value) for key, value in values}
    )


def _given(context: click.Context, more: Mapping[str, Any]) -> dict[str, Any]:
    settings = (one for one in context.command.params if isinstance(one, Setting))
    return {one.key: context.params[one.name or ""] for one in settings} | dict(more)


def settings_file(context: click.Context) -> Path | None:
    """Return the settings file that `read_settings` reads; None if there is none."""
    from ratchet.settings.load_settings import CONFIG_FILE

    given: Path | None = context.obj
    return given or (Path(CONFIG_FILE) if Path(CONFIG_FILE).is_file() else None)


def read_project_settings(context: click.Context, more: Mapping[str, Any] = MappingProxyType({})) -> Settings:
    """Load the settings with agents and store of the project's current or last run; options win.

    Raises SettingsError.
    """
    from ratchet.settings.load_settings import with_last_run

    given = {key for key, value in _given(context, more).items() if value is not None}
    return with_last_run(read_settings(context, more), given)


def read_agent_settings(context: click.Context, more: Mapping[str, Any] = MappingProxyType({})) -> Settings:
    """Load the settings of one agent as `read_project_settings` does: `model` names it, else it is the only one.

    Raises SettingsError.
    """
    return one_agent(read_project_settings(context, more))


def with_settings(read: Callable[[click.Context], Settings]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Pass the settings that `read` returns to a command, in place of its options that are settings."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        @click.pass_context
        def run(context: click.Context, /, **given: Any) -> Any:
            return command(read(context), **_others(context, given))

        return run

    return decorate


def with_project(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command --store and --project; pass it settings and store of the project's current or last run."""

    @functools.wraps(command)
    def run(settings: Settings, **given: Any) -> Any:
        with open_store_for_command(settings.store_url) as store:
            return command(settings, store, **given)

    return store_url(project(with_settings(read_project_settings)(run)))


def with_store(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command --store and --project; pass it the store of the project's current or last run."""

    @functools.wraps(command)
    def run(_settings: Settings, store: Store, **given: Any) -> Any:
        return command(store, **given)

    return with_project(run)


def _others(context: click.Context, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are neither settings nor --json, which `output.show` reads."""
    read = {"as_json", *(one.name for one in context.command.params if isinstance(one, Setting))}
    return {name: value for name, value in given.items() if name not in read}


def one_agent(settings: Settings) -> Settings:
    """Return the settings of the project's only agent. Raises SettingsError that lists several."""
    from ratchet.settings import load_settings

    return load_settings.one_agent(settings)


def check_alias(store: Store, name: str | None) -> None:
    """Raise UsageError if the store has no version of the agent, with the nearest one; None names no agent."""
    from ratchet.proxy.agent_names import nearest_name
    from ratchet.settings.setting_errors import listed

    known = sorted({policy.alias for policy in store.policies.all()})
    if name is None or not known or name in known:
        return
    nearest = nearest_name(name, known)
    hint = f"did you mean {nearest}?" if nearest else f"known are {listed(known)}"
    raise click.UsageError(f"{name}: no such agent in this store; {hint}")


def check_listed_alias(store: Store, name: str | None) -> None:
    """Raise UsageError if nothing was found for a name that differs from an agent's by case only, or by little."""
    from ratchet.proxy.agent_names import nearest_name

    known = sorted({policy.alias for policy in store.policies.all()})
    if name is not None and name not in known and (nearest := nearest_name(name, known)):
        raise click.UsageError(f"no trajectory is of {name}; did you mean {nearest}?")


def open_store_for_command(url: str, *, create: bool = False) -> Store:
    """Open a store for one command; create it only for a command that may be the first to write to it."""
    from ratchet.store.store import open_store

    return open_store(url, create=create)


class PluginGroup(click.Group):
    """Also has the commands in the entry-point group `plugins`, each imported when it is used or listed."""

    def __init__(self, *arguments: Any, plugins: str, **given: Any) -> None:
        super().__init__(*arguments, **given)
        self.plugins = plugins

    def list_commands(self, ctx: click.Context) -> list[str]:
        from ratchet.trainer.user_code import plugin_names

        return sorted({*super().list_commands(ctx), *plugin_names(self.plugins)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command; for one that cannot be imported, or that Ratchet has as a plug-in, one that says why."""
        from ratchet.trainer.errors import PluginError
        from ratchet.trainer.user_code import OWN_PLUGINS, load_plugin, plugin_names

        command = super().get_command(ctx, cmd_name)
        if command is None and cmd_name in {*plugin_names(self.plugins), *OWN_PLUGINS.get(self.plugins, ())}:
            try:
                command = load_plugin(self.plugins, cmd_name)
            except PluginError as error:
                return _unavailable(cmd_name, str(error))
        return command


def _unavailable(name: str, reason: str) -> click.Command:
    @click.command(name, help=f"Not available: {reason}", context_settings={"ignore_unknown_options": True})
    @click.argument("arguments", nargs=-1)
    def fail(arguments: tuple[str, ...]) -> None:
        raise CliError(reason)

    return fail
