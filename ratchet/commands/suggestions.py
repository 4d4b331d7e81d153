"""Suggestions for words that are no command: the same or a like word, wherever it stands among the commands."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

import click

_LIKE = 0.75


class SuggestingGroup(click.Group):
    """A group whose unknown words are answered with the commands that may be meant."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command of the first word. Raises UsageError, which names the nearest ones."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            if self.get_command(ctx, args[0]) is None and (found := nearest(args, self)):
                words = " or ".join(f"`ratchet {words}`" for words in found)
                raise click.UsageError(f"No such command {args[0]!r}; did you mean {words}?", ctx) from error
            raise


def nearest(words: list[str], group: click.Group) -> list[str]:
    """Return the commands below a group that `words` may mean, the likeliest first; three at most."""
    asked = [word for word in words if not word.startswith("-")][:3]
    scored = [(max(_likeness(asked, path), _likeness(asked[:1], path)), path) for path in _paths(group)]
    best = sorted((pair for pair in scored if pair[0] >= _LIKE), key=lambda pair: (-pair[0], len(pair[1])))
    return [" ".join(path) for score, path in best if score > best[0][0] - 0.1][:3]


def _likeness(asked: list[str], path: tuple[str, ...]) -> float:
    """Return how like a command's words, or its last one, are to what was asked for: 1 is the same."""
    whole = difflib.SequenceMatcher(None, " ".join(asked), " ".join(path)).ratio()
    last = difflib.SequenceMatcher(None, asked[-1], path[-1]).ratio()
    return max(whole, last)


def _paths(group: click.Group, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        yield (*before, name)
        if isinstance(command, click.Group):
            yield from _paths(command, (*before, name))
