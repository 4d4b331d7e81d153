"""The reference pages generated from code: settings, commands, the operator's HTTP API and the Python API.

`python -m tests.harness.reference_docs` (`make docs`) rewrites docs/commands.md, and in the other pages of `PAGES` the
text between `<!-- generated: NAME -->` and `<!-- end -->`. A test compares the pages with the code.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests import house

DOCS = house.ROOT / "docs"
PAGES = ("commands.md", "configuration.md", "http-api.md", "python.md", "tutorial.md")
_LONG_SIGNATURE = 90  # characters
_EXAMPLES = {"example": "try_out.py", "tune": "tune.py", "loop": "gather_and_train.py"}
_HANDLES = ("TuningRun",)  # classes that users get and never call
_BLOCK = re.compile(r"(<!-- generated: ([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def page(name: str) -> str:
    """Return a page of the reference, generated from the code."""
    if name == "commands.md":
        return house.commands_page()
    blocks = {
        "configuration.md": _settings_blocks,
        "http-api.md": _operator_routes,
        "python.md": _python_blocks,
        "tutorial.md": _tutorial_blocks,
    }
    made = dict(blocks[name]())
    return _BLOCK.sub(lambda block: f"{block[1]}\n{made[block[2]]}\n\n{block[3]}", (DOCS / name).read_text())


def _settings_blocks() -> Iterator[tuple[str, str]]:
    """Yield (section, table) for every section of the settings; `project` holds the keys of no section."""
    tables: dict[str, list[str]] = {}
    learner = dict(_learner_descriptions())
    by_hand = dict(
        re.findall(r"^\| `([\w.]+)` \| .+? \| (.+) \|$", (DOCS / "configuration.md").read_text(), re.MULTILINE)
    )
    for key, default, description in house.settings_rows():
        section, _, leaf = key.rpartition(".")
        text = description or (learner.get(leaf) if section == "learner" else None) or by_hand.get(key, "")
        text = re.sub(r"(?<!\]\()docs/([\w-]+\.md)", r"[\1](\1)", text)
        tables.setdefault(section or "project", []).append(f"| `{key}` | {default} | {text} |")
    for section, rows in tables.items():
        yield section, "\n".join(["| key | default | meaning |", "|---|---|---|", *rows])
    yield "agents", "\n".join(_keys_of_agents())


def _keys_of_agents() -> Iterator[str]:
    """Yield what an entry of `agents` may hold, and what is refused there."""
    from ratchet.settings.load_settings import known_keys
    from ratchet.settings.setting_errors import ANY_NAME, Refused
    from ratchet.trainer.settings.trainer_settings import TrainerSettings

    entry = known_keys()["agents"][ANY_NAME]
    trainer, learner = known_keys()["trainer"], entry["learner"]
    share = TrainerSettings.model_fields["share"]
    yield f"- `share` (default `{share.default:g}`): {share.description}"
    for title, keys, section in (
        ("Keys of `trainer`", [key for key in trainer if not isinstance(entry[key], Refused)], ""),
        ("Keys of `learner`", [key for key in learner if not isinstance(learner[key], Refused)], "learner."),
        ("Refused, because all agents share them", [key for key in trainer if isinstance(entry[key], Refused)]
         + [f"learner.{key}" for key in learner if isinstance(learner[key], Refused)], ""),
    ):  # fmt: skip
        yield f"- {title}: {', '.join(f'`{section}{key}`' for key in keys)}"


def _learner_descriptions() -> Iterator[tuple[str, str]]:
    """Yield (field, description) from the columns of the docstrings of the learner's classes of settings."""
    from ratchet.trainer.settings.learner_settings import (
        AdapterAndMemorySettings,
        LearnerProcessSettings,
        LearnerSettings,
    )

    for settings in (AdapterAndMemorySettings, LearnerSettings, LearnerProcessSettings):
        yield from _described_fields(settings)


def _described_fields(settings: Any) -> Iterator[tuple[str, str]]:
    known = {field.name for field in dataclasses.fields(settings)}
    named: list[str] = []
    texts: dict[str, str] = {}
    for line in (settings.__doc__ or "").splitlines():
        entry = re.match(r"\s{4}(\w[\w, ]*?)\s{2,}(.+)", line)
        names = [name.strip() for name in entry[1].split(",")] if entry else []
        if entry and known.issuperset(names):
            named = names
            texts |= dict.fromkeys(names, entry[2].strip())
        elif named and line.strip():
            texts |= {name: f"{texts[name]} {line.strip()}" for name in named}
    yield from ((name, text.replace("|", "\\|")) for name, text in texts.items())


def _python_blocks() -> Iterator[tuple[str, str]]:
    """Yield the examples, and the public names of `import ratchet` with signatures and docstrings."""
    import ratchet

    for name, example in _EXAMPLES.items():
        yield name, f"```python\n{(house.ROOT / 'examples' / example).read_text()}```"
    entries = [_python_entry(name, getattr(ratchet, name)) for name in sorted(ratchet._MODULES)]
    yield "api", "\n\n".join(entries)


def _tutorial_blocks() -> Iterator[tuple[str, str]]:
    """Yield the code of the tutorial's agent."""
    for name, file in (("agent", "agent.py"), ("workflow", "workflow.py")):
        code = (house.ROOT / "examples" / "langgraph_math" / file).read_text()
        yield name, f"```python\n{code.replace('  # type: ignore[import-not-found]', '')}```"


def _python_entry(name: str, found: Any) -> str:
    """Return the section of a public name: its signature and docstring, and those of its methods."""
    is_class = inspect.isclass(found)
    is_called = name not in _HANDLES and not (is_class and issubclass(found, Exception))
    text = inspect.getdoc(found)
    if name.endswith("_async"):  # the text is that of the synchronous form, which is made from it
        text = f"Does what `{name.removesuffix('_async')}` does, in an event loop that runs already."
    parts = [f"{name}{_signature(found) if is_called else ''}\n\n{text}"]
    for member, value in vars(found).items() if is_class and not issubclass(found, Exception) else ():
        if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property)):
            signature = (
                "" if isinstance(value, property) else _signature(value).replace("(self, ", "(").replace("(self)", "()")
            )
            parts.append(f".{member}{signature}\n{textwrap.indent(inspect.getdoc(value) or '', '    ')}")
    text = "\n\n".join(parts)
    return f"## `{name}`\n\n```text\n{text}\n```"


def _signature(found: Any) -> str:
    """Return a signature, with a line for each parameter if it is long."""
    signature = inspect.signature(found)
    text = re.sub(r"(: |-> )'([^']*)'", r"\1\2", str(signature))
    if len(text) <= _LONG_SIGNATURE:
        return text
    lines = [re.sub(r": '([^']*)'", r": \1", str(one)) for one in signature.parameters.values()]
    keyword_only = [one.kind is one.KEYWORD_ONLY for one in signature.parameters.values()]
    if True in keyword_only:
        lines.insert(keyword_only.index(True), "*")
    returned = "" if signature.return_annotation in (None, signature.empty) else text[text.rindex(") -> ") + 1 :]
    return "(\n" + "".join(f"    {line},\n" for line in lines) + ")" + returned


def _operator_routes() -> Iterator[tuple[str, str]]:
    """Yield the table of the operator API's routes, from its OpenAPI description."""
    from ratchet.proxy.coordinator.operator_api.routes import create_operator_api

    nothing: Any = None  # only the routes are read; none is called
    paths = create_operator_api(nothing, nothing, nothing, nothing, nothing, nothing).openapi()["paths"]
    rows = ["| route | parameters | answers |", "|---|---|---|"]
    for path, methods in paths.items():
        for method, route in methods.items():
            named = [one["name"] for one in route.get("parameters", []) if one["in"] == "query"]
            text = " ".join(route.get("description", "").split("\n\n")[0].split()).replace("|", "\\|")
            rows.append(f"| `{method.upper()} /api{path}` | {', '.join(f'`{name}`' for name in named)} | {text} |")
    yield "operator", "\n".join(rows)


def write(folder: Path = DOCS) -> None:
    """Write every page of the reference."""
    for name in PAGES:
        (folder / name).write_text(page(name))


if __name__ == "__main__":
    write()
