"""What the code says of itself, for the tests that hold the documents true, and the README's file tree.

`python -m tests.house` rewrites what is made from code: the file tree in README.md, from the first sentence of each
file's docstring, and docs/commands.md, from the commands' own help.
"""

from __future__ import annotations

import ast
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
README = ROOT / "README.md"
COMMANDS = ROOT / "docs" / "commands.md"
BEGIN, END = "<!-- tree -->\n```text\n", "```\n<!-- /tree -->"
ROOMS = ("proxy", "store", "trainer", "ratchet", "examples")
_WIDTH = 118
_COLUMN = 28

# Files without a docstring, and folders that are told as one.
NOTES = {
    ".ci": "what must pass before a change lands: make check, make test",
    ".gitignore": "",
    "CHANGELOG.md": "what changed, by version",
    "CONTRIBUTING.md": "how to work on it",
    "Dockerfile": "images: proxy (no torch) and trainer",
    ".dockerignore": "",
    "LICENSE": "Apache-2.0",
    "Makefile": "demo, test, check, e2e, bench",
    "README.md": "this page",
    "pyproject.toml": "dependencies, extras, lint, types, import contracts",
    "examples/email_search/README.md": "how to run it, and what it shows",
    "examples/math/README.md": "the three methods on one task set",
    "examples/math/policy": "the tiny policy that make_policy.py reproduces, for planner too",
    "examples/math/tasks": "the task set that problems.py makes",
    "examples/planner/README.md": "which role trains, and how to run it",
    "examples/planner/tasks": "the task set that problems.py makes",
    "examples/production/README.md": "who the users are, and how to run it",
    "examples/reward_hacking/README.md": "how the judge is fooled, and what catches it",
    "benchmarks": "what it costs, measured",
    "deploy": "compose file, systemd unit, Grafana dashboard, the environments' set-up, a plugin for vLLM on CPU",
    "docs": "how each part works and is set; production.md to run it for others",
    "tests": "claims, by room; tests/e2e runs the real vLLM",
    "store/migrations": "the schema, step by step (Alembic)",
    "proxy/console/static": "the pages: HTML, CSS and a few ES modules, as they are sent",
    "examples/email_search/policy": "the tiny policy that make_policy.py reproduces",
}


def files() -> list[str]:
    """Return every file of the project: tracked, or new and not ignored; sorted, folders with their rooms."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    found = {name for name in listed.stdout.splitlines() if (ROOT / name).is_file()}
    return sorted(found, key=lambda name: name.replace("__init__.py", "\0"))  # a package before its files


def tree() -> str:
    """Return the file tree, one line per file of a room and per folder elsewhere."""
    lines: list[str] = []
    told: set[str] = set()
    for name in files():
        entry = _entry(name)
        if entry in told:
            continue
        told.add(entry)
        room = entry.split("/")[0]
        if room in ROOMS and room not in told:
            told.add(room)
            lines.append(_line(0, f"{room}/", first_sentence(ROOT / room / "__init__.py")))
        if entry.endswith("/__init__.py"):
            if entry.count("/") > 1:
                lines.append(_line(entry.count("/") - 1, f"{entry.split('/')[-2]}/", comment(entry)))
            continue
        lines.append(_line(entry.count("/"), _label(entry), comment(entry)))
    return "\n".join(lines) + "\n"


def _entry(name: str) -> str:
    """Return what a file is shown as: itself, or the folder that stands for it."""
    parts = name.split("/")
    folders = ["/".join(parts[:end]) for end in range(1, len(parts))]
    return next((folder for folder in folders if folder in NOTES), name)


def _label(entry: str) -> str:
    parts = entry.split("/")
    if entry in NOTES and (ROOT / entry).is_dir():
        return parts[-1] + "/"
    return parts[-1]


def comment(entry: str) -> str:
    """Return the comment of one file or folder."""
    if entry in NOTES:
        return NOTES[entry]
    if entry.endswith((".yaml", ".yml")):
        return (ROOT / entry).read_text().split("\n", 1)[0].lstrip("# ").rstrip(".")
    return first_sentence(ROOT / entry) if entry.endswith(".py") else ""


def first_sentence(file: Path) -> str:
    """Return the first sentence of a module's docstring, without its full stop."""
    text = ast.get_docstring(ast.parse(file.read_text())) or ""
    paragraph = " ".join(text.split("\n\n")[0].split())
    return paragraph.split(". ")[0].rstrip(".:")


def _line(depth: int, label: str, said: str) -> str:
    left = f"{'  ' * depth}{label} "
    room = _WIDTH - max(len(left), _COLUMN)
    if len(said) > room:  # a whole clause reads better than a cut sentence
        clauses = [match.start() for match in re.finditer(r"[,:;] ", said) if 16 < match.start() <= room]
        said = said[: clauses[-1]] if clauses else said[: room + 1].rsplit(" ", 1)[0]
    return f"{left:<{_COLUMN}}{said}".rstrip()


def settings_rows() -> Iterator[tuple[str, str, str]]:
    """Yield (dotted key, default as in YAML, description) of every setting."""
    from proxy.settings import ProxySettings
    from ratchet.layers import leaves
    from ratchet.settings import Settings, VllmSettings, known_keys
    from trainer.settings import TrainerSettings
    from trainer.tuning.settings import TunerSettings

    sections: dict[str, Any] = {
        "vllm": VllmSettings, "proxy": ProxySettings, "trainer": TrainerSettings, "tuner": TunerSettings,
    }  # fmt: skip
    for path in leaves(known_keys()):
        if path[:2] == ("trainer", "learner"):
            yield ".".join(path), _shown(_learner_default(path[-1])), ""
            continue
        model = Settings if len(path) == 1 else sections[path[0]]
        for section in path[1:-1]:
            model = model.model_fields[section].annotation
        field = model.model_fields[path[-1]]
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        yield ".".join(path), _shown(default), (field.description or "").replace("|", "\\|")


def _learner_default(name: str) -> Any:
    from trainer.learning.learner_settings import LearnerSettings

    return next(field.default for field in dataclasses.fields(LearnerSettings) if field.name == name)


def _shown(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, (tuple, frozenset)):
        value = list(value)
    return f"`{value if isinstance(value, (str, Path)) else json.dumps(value)}`"


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield (words, command) of every command below a group, groups themselves included."""
    for name, command in sorted(group.commands.items()):
        yield (*path, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))


def commands_page() -> str:
    """Return docs/commands.md."""
    from ratchet.cli import cli

    parts = [
        "# Commands\n",
        "Made from the commands' own help by `python -m tests.house`; a test holds it equal to the code.\n",
        "Every command takes `--config FILE` before its name and ends with a non-zero exit code where it fails: 1 with",
        "one line that names the thing and the remedy, 2 for a wrong option, 130 after Ctrl-C, 143 after SIGTERM.\n",
    ]
    for words, command in commands(cli):
        help_text = inspect.cleandoc(re.sub(r"\x08\n?", "", command.help or ""))
        said, _, example = help_text.partition("Example:")
        parts.append(f"## `ratchet {' '.join(words)}`\n\n{said.strip()}\n")
        parts.append(f"```sh\n{_unindented(example)}\n```\n")
        if arguments := [one for one in command.params if isinstance(one, click.Argument)]:
            named = " ".join(one.make_metavar(click.Context(command)) for one in arguments)
            parts.append(f"Takes `{named}`.\n")
        options = [option for option in command.params if isinstance(option, click.Option)]
        if options:
            rows = [f"| `{_spelt(option)}` | {option.help} |" for option in options]
            parts.append("\n".join(["| option | meaning |", "|---|---|", *rows]) + "\n")
    return "\n".join(parts)


def _unindented(example: str) -> str:
    return "\n".join(line.strip() for line in example.strip().splitlines())


def _spelt(option: click.Option) -> str:
    if option.is_flag:
        return option.opts[0]
    if isinstance(option.type, click.Choice):
        return f"{option.opts[0]} {'/'.join(option.type.choices)}"
    return f"{option.opts[0]} {option.metavar or option.type.name.upper()}"


def write() -> None:
    """Write what is made from code."""
    text = README.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    README.write_text(before + BEGIN + tree() + END + after)
    COMMANDS.write_text(commands_page())


if __name__ == "__main__":
    write()
