"""The `ratchet` command. Slow imports happen inside the command that needs them: `ratchet --help` takes 0.15 s.

An error is one line on stderr and a non-zero exit code, with a traceback only under RATCHET_DEBUG=1. Ctrl-C exits with
130 and no traceback, also while a judge function hangs.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import logging
import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import click

from ratchet import __version__
from ratchet.commands import (
    access,
    evaluate,
    feedback,
    judge,
    policies,
    project,
    services,
    store,
    tasks,
    trajectories,
    tune,
)
from ratchet.errors import InvalidArgument, RatchetError
from ratchet.supervisor.signals import INTERRUPTED, TERMINATED, Terminated

_STOP_SECONDS = 2.0  # for threads after Ctrl-C

# Errors of a path that the user gave.
_PATH_ERRORS = (errno.ENOENT, errno.EACCES, errno.ENOTDIR, errno.EISDIR, errno.EROFS, errno.ENAMETOOLONG)


_MIN_SIMILARITY = 0.75  # of a command that is suggested


class SuggestingGroup(click.Group):
    """A group that suggests similar commands if a command is unknown."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            if self.get_command(ctx, args[0]) is None and (found := _nearest(args, self)):
                words = " or ".join(f"`ratchet {words}`" for words in found)
                raise click.UsageError(f"No such command {args[0]!r}; did you mean {words}?", ctx) from error
            raise


def _nearest(words: list[str], group: click.Group) -> list[str]:
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


@click.group(cls=SuggestingGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.option("--config", type=click.Path(path_type=Path), help="Settings file.  [default: ratchet.yaml]")
@click.version_option(__version__, prog_name="ratchet")
@click.pass_context
def cli(context: click.Context, config: Path | None) -> None:
    """Reinforcement learning from an agent's production traffic.

    \b
    Example:
      ratchet up --base-model Qwen/Qwen2.5-0.5B-Instruct --judge my_agent.judge:judge
      export OPENAI_BASE_URL=http://127.0.0.1:8000/v1
    """
    context.obj = config


for command in (
    project.up,
    project.down,
    project.reload_agents,
    project.status,
    project.doctor,
    project.plan,
    project.demo,
    services.proxy,
    services.trainer,
    services.learner,
    store.store,
    trajectories.trajectories,
    trajectories.groups,
    policies.policies,
    access.keys,
    access.usage,
    access.audit,
    judge.judge,
    feedback.feedback,
    tasks.tasks,
    tune.tune,
    evaluate.evaluate,
):
    cli.add_command(command)


def main() -> None:
    """Run the command line of this process; never returns."""
    try:
        code = run(sys.argv[1:])
    except Terminated:
        code = TERMINATED
    if code in (INTERRUPTED, TERMINATED):
        _end_with_threads(code)
    sys.exit(code)


def _end_with_threads(code: int) -> None:
    """Exit at once if threads go on after a stop: a judge function may never return, and Python waits for threads."""
    others = [one for one in threading.enumerate() if one is not threading.current_thread() and not one.daemon]
    until = time.monotonic() + _STOP_SECONDS
    with contextlib.suppress(KeyboardInterrupt):  # Ctrl-C again
        for thread in others:
            thread.join(max(0.0, until - time.monotonic()))
    if any(thread.is_alive() for thread in others):
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):  # closed, or nobody reads it
                stream.flush()
        os._exit(code)


def run(arguments: list[str]) -> int:
    """Run one command; return its exit code."""
    try:
        result = cli.main(arguments, prog_name="ratchet", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except InvalidArgument as error:
        click.UsageError(str(error)).show()
        return 2
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except Exception as error:  # the last place where an error can become one line
        if os.environ.get("RATCHET_DEBUG") == "1":
            raise
        click.echo(f"ratchet: {_sentence(error)}", err=True)
        return 1
    return result if isinstance(result, int) else 0


def _sentence(error: Exception) -> str:
    if isinstance(error, RatchetError):
        return str(error)
    if isinstance(error, OSError) and error.errno in _PATH_ERRORS and error.filename:
        return f"{error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        where = f" at {error.filename}" if error.filename else ""
        return f"the disk is full{where}: free it, or set `state_dir` to another folder"
    return f"unexpected {type(error).__name__}: {error} (set RATCHET_DEBUG=1 for the traceback; please report it)"
