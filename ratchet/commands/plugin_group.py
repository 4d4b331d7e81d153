"""A group of commands to which plug-ins add theirs."""

from __future__ import annotations

from typing import Any

import click

from ratchet.errors import CliError


class PluginGroup(click.Group):
    """Also has the commands in the entry-point group `plugins`, each imported when it is used or listed."""

    def __init__(self, *arguments: Any, plugins: str, **given: Any) -> None:
        super().__init__(*arguments, **given)
        self.plugins = plugins

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the group's own commands and of the installed ones."""
        from ratchet.trainer.user_code.plugins import plugin_names

        return sorted({*super().list_commands(ctx), *plugin_names(self.plugins)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command; for one that cannot be imported, or that Ratchet has as a plug-in, one that says why."""
        from ratchet.trainer.errors import PluginError
        from ratchet.trainer.user_code.plugins import OWN_PLUGINS, load_plugin, plugin_names

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
