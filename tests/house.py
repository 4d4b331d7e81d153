"""Facts from the code (files, settings, commands) for tests of the documents.

`make docs` (tests/harness/reference_docs.py) writes the generated pages.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).parents[1]


def files() -> list[str]:
    """Return every file of the project: tracked, or new and not ignored."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    return sorted(name for name in set(listed.stdout.splitlines()) if (ROOT / name).is_file())


def settings_rows() -> Iterator[tuple[str, str, str]]:
    """Yield (dotted key, default as in YAML, description) of every setting."""
    from ratchet.settings.load_settings import known_keys
    from ratchet.settings.project_settings import Settings
    from ratchet.settings.setting_errors import ANY_NAME, leaves

    for path in leaves(known_keys()):
        if ANY_NAME in path:  # an agent's keys, which are those of `trainer` and `learner`, or a plug-in's
            continue
        if path[0] == "learner":
            yield ".".join(path), _format_default(_learner_default(path[-1])), ""
            continue
        model: Any = Settings
        for section in path[:-1]:
            model = model.model_fields[section].annotation
        field = model.model_fields[path[-1]]
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        yield ".".join(path), _format_default(default), (field.description or "").replace("|", "\\|")


def _learner_default(name: str) -> Any:
    from ratchet.trainer.settings.learner_settings import LearnerProcessSettings, LearnerSettings

    fields = (*dataclasses.fields(LearnerSettings), *dataclasses.fields(LearnerProcessSettings))
    return next(field.default for field in fields if field.name == name)


def _format_default(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, (tuple, frozenset)):
        value = list(value)
    return f"`{value if isinstance(value, (str, Path)) else json.dumps(value)}`"


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield (words, command) of every command below a group, groups themselves included."""
    context = click.Context(group)
    for name in sorted(group.list_commands(context)):
        command = group.get_command(context, name)
        assert command is not None
        if not is_own(command):
            continue
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


def is_own(command: click.Command) -> bool:
    """Return whether a command is Ratchet's own: the README of a plug-in describes its command."""
    return (command.callback.__module__ if command.callback else "").startswith("ratchet.")


def commands_page() -> str:
    """Return docs/commands.md."""
    from ratchet.cli import cli

    parts = [
        "# Commands\n",
        "Generated from the commands' help by `make docs`.\n",
        "Every command accepts `--config FILE` before its name. Exit codes: 0 for success, 1 for an error, with one",
        "line that names the cause and the remedy, 2 for a wrong option, 130 after Ctrl-C, 143 after SIGTERM. `proxy`,",
        "`trainer` and `learner` end with 0 after either, once they have stopped in order; a learner of several",
        "processes ends with the code of torchrun.\n",
        "Common options, which the commands below list without a description:\n",
        _options_table(_shared_options()),
    ]
    for words, command in commands(cli):
        help_text = inspect.cleandoc(re.sub(r"\x08\n?", "", command.help or ""))
        text, _, example = help_text.partition("Example:")
        parts.append(f"## `ratchet {' '.join(words)}`\n\n{text.strip()}\n")
        parts.append(f"```sh\n{_unindented(example)}\n```\n")
        if arguments := [one for one in command.params if isinstance(one, click.Argument)]:
            named = " ".join(one.make_metavar(click.Context(command)) for one in arguments)
            parts.append(f"Takes `{named}`.\n")
        options = [option for option in command.params if isinstance(option, click.Option)]
        if own := [option for option in options if (option.name, option.help) not in _shared_names()]:
            parts.append(_options_table(own))
        if shared := [f"`{option.opts[0]}`" for option in options if option not in own]:
            parts.append(f"{'Also' if own else 'Options:'} {', '.join(shared)}.\n")
    return "\n".join(parts)


def _shared_options() -> list[click.Option]:
    """Return the options that many commands take."""
    from ratchet import options

    @click.command()
    @options.project
    @options.store_url
    @options.alias
    @options.as_json
    def command() -> None: ...

    return [option for option in command.params if isinstance(option, click.Option)]


def _shared_names() -> set[tuple[str | None, str | None]]:
    return {(option.name, option.help) for option in _shared_options()}


def _options_table(options: list[click.Option]) -> str:
    rows = [f"| `{_format_option(one)}` | {one.help}{_default(one)}{_required(one)} |" for one in options]
    return "\n".join(["| option | meaning |", "|---|---|", *rows]) + "\n"


def _unindented(example: str) -> str:
    return "\n".join(line.strip() for line in example.strip().splitlines())


def _default(option: click.Option) -> str:
    shown = "--stream" if option.default is True else option.default
    return f"  [default: {shown}]" if option.show_default else ""


def _required(option: click.Option) -> str:
    return " **Required.**" if option.required else ""


def _format_option(option: click.Option) -> str:
    if option.is_flag:
        return "/".join((option.opts[0], *option.secondary_opts))
    if isinstance(option.type, click.Choice):
        return f"{option.opts[0]} {'/'.join(option.type.choices)}"
    return f"{option.opts[0]} {option.metavar or option.type.name.upper().removesuffix(' RANGE')}"
