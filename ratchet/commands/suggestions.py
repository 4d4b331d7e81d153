"""Suggestions for unknown commands: similar command names at any level."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

import click

_MIN_SIMILARITY = 0.75


class SuggestingGroup(click.Group):
    """A group that suggests similar commands if a command is unknown."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command of the first word. Raises UsageError, which names similar commands."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            if self.get_command(ctx, args[0]) is None and (found := nearest(args, self)):
                words = " or ".join(f"`ratchet {words}`" for words in found)
                raise click.UsageError(f"No such command {args[0]!r}; did you mean {words}?", ctx) from error
            raise


def nearest(words: list[str], group: click.Group) -> list[str]:
    """Return at most three commands of a group similar to `words`, the most similar first."""
    typed = [word for word in words if not word.startswith("-")][:3]
    scored = [(max(_similarity(typed, path), _similarity(typed[:1], path)), path) for path in _paths(group)]
    best = sorted((pair for pair in scored if pair[0] >= _MIN_SIMILARITY), key=lambda pair: (-pair[0], len(pair[1])))
    return [" ".join(path) for score, path in best if score > best[0][0] - 0.1][:3]


def _similarity(typed: list[str], path: tuple[str, ...]) -> float:
    """Return the similarity of `typed` to a command's words or its last word; 1 is equal."""
    whole = difflib.SequenceMatcher(None, " ".join(typed), " ".join(path)).ratio()
    last = difflib.SequenceMatcher(None, typed[-1], path[-1]).ratio()
    return max(whole, last)


def _paths(group: click.Group, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        yield (*before, name)
        if isinstance(command, click.Group):
            yield from _paths(command, (*before, name))
