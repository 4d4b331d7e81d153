"""The documents are true: every `ratchet` command in them exists, and the reference is what the code makes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from ratchet.cli import cli
from ratchet.trainer.judges.quality import tricks
from tests.harness import reference_docs

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*/README.md"))]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```|((?:^    \S.*\n(?:^     .*\n)*)+)", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`(ratchet [^`]+)`")
_END = {"&&", "||", "|", ";", ">", "&"}


def commands_in(text: str) -> Iterator[str]:
    """Yield the commands of a page, in blocks and in lines. `$AGENT` of the tutorial is the command line, too."""
    text = text.replace("$AGENT ", "ratchet ")
    for match in _BLOCK.finditer(text):
        if match[1] not in (None, "", "sh"):
            continue  # another language
        for line in (match[2] or match[3] or "").replace("\\\n", " ").splitlines():
            found = re.search(r"(?:^|&& |=\S+ )(ratchet .+)", line.strip())
            if found and not re.match(r"ratchet [\w./-]*: ", found[1]):
                yield found[1]
    yield from _INLINE.findall(_BLOCK.sub("", text))


def parsed(line: str) -> None:
    """Parse a command as the command line would, but for what is required and what must exist on disk."""
    words = shlex.split(re.sub(r"\[[^]]*\]", "", line), comments=True)[1:]  # [--json]: may be left out
    words = words[: next((place for place, word in enumerate(words) if word in _END), len(words))]
    context = click.Context(cli, info_name="ratchet")
    while isinstance(context.command, click.Group):
        rest = context.command.make_parser(context).parse_args(args=list(words))[1]
        named = context.command.get_command(context, rest[0]) if rest else None
        if named is None:
            assert not rest or context.command.invoke_without_command, f"there is no command {rest[0]!r}"
            return
        words, context = rest[1:], click.Context(named, context)
    values, left, _ = context.command.make_parser(context).parse_args(args=[w for w in words if w != "..."])
    assert not left, f"{left} are too many words"
    for parameter in context.command.params:
        if parameter.name in values and isinstance(parameter.type, click.Choice | click.IntRange | click.FloatRange):
            parameter.type_cast_value(context, values[parameter.name])


def wrong_commands(text: str) -> list[str]:
    """Return the commands of a page that cannot be typed, with the reason."""
    wrong = []
    for line in commands_in(text):
        try:
            parsed(line)
        except click.BadOptionUsage as error:  # an option that is only named: `ratchet doctor --workflow`
            if not line.endswith(error.option_name):
                wrong.append(f"{line}: {error}")
        except (click.UsageError, AssertionError, ValueError) as error:
            wrong.append(f"{line}: {error}")
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_of_a_page_can_be_typed(page: Path) -> None:
    wrong = wrong_commands(page.read_text())
    assert not wrong, "\n".join(wrong)


def test_the_judge_of_the_readme_is_fooled_by_nothing_that_the_lint_tries() -> None:
    block = re.search(r"```python\n# my_agent/judge.py\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert block is not None
    names: dict[str, Any] = {}
    exec(block[1], names)
    request = {"messages": [{"role": "user", "content": "What is the capital of Norway?"}]}
    assert names["judge"](request, "Oslo.") == 1.0
    assert {names["judge"](request, answer) for _, answer in tricks("Oslo", ["Rome"])} == {0.0}


def test_the_commands_of_the_pages_are_found() -> None:
    assert len([line for page in PAGES for line in commands_in(page.read_text())]) > 150
    with pytest.raises(click.NoSuchOption):
        parsed("ratchet up --modle mail")
    with pytest.raises(AssertionError, match="no command"):
        parsed("ratchet stat")


@pytest.mark.parametrize("name", reference_docs.PAGES)
def test_a_reference_page_equals_what_the_code_makes(name: str) -> None:
    assert (reference_docs.DOCS / name).read_text() == reference_docs.page(name), "run `make docs`"
