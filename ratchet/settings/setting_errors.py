"""Errors of settings: the known keys, the one nearest to a misspelt key, and pydantic's errors as one line each."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel, ValidationError

from ratchet.errors import SettingsError

Path = tuple[str, ...]  # of a key: ("proxy", "port")
_MAX_NAMED = 3  # keys of the same name that one message lists


def key_tree(model: Any) -> dict[str, Any]:
    """Return the keys of a pydantic model or dataclass: name -> type, or a mapping for a section."""
    if isinstance(model, type) and issubclass(model, BaseModel):
        types = {name: field.annotation for name, field in model.model_fields.items()}
    else:
        types = typing.get_type_hints(model)
    return {name: key_tree(kind) if _is_section(kind) else kind for name, kind in types.items()}


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and (issubclass(kind, BaseModel) or dataclasses.is_dataclass(kind))


def leaves(known: Mapping[str, Any], *, inner: bool = False) -> Iterator[Path]:
    """Yield the path of every key; with `inner`, of every section too."""
    for key, kind in known.items():
        if isinstance(kind, Mapping):
            if inner:
                yield (key,)
            yield from ((key, *rest) for rest in leaves(kind, inner=inner))
        else:
            yield (key,)


def type_of_key(path: Path, known: Mapping[str, Any], source: str) -> Any:
    """Return the type of a known key, or the mapping of a section. Raises SettingsError with the nearest known key."""
    kind: Any = known
    for depth, key in enumerate(path):
        if not isinstance(kind, Mapping):
            raise SettingsError(f"{source}: {'.'.join(path[:depth])} is one value and holds no key {key!r}")
        if key not in kind:
            raise SettingsError(f"{source}: unknown key {'.'.join(path[: depth + 1])}; {nearest_key(path, known)}")
        kind = kind[key]
    return kind


def nearest_key(path: Path, known: Mapping[str, Any]) -> str:
    """Return a clause that names the known key closest to `path`, or all keys of the same name."""

    def similarity(candidate: Path) -> float:
        whole = difflib.SequenceMatcher(None, ".".join(path), ".".join(candidate)).ratio()
        last = difflib.SequenceMatcher(None, path[-1], candidate[-1]).ratio()
        return max(whole, 0.85 * last)  # the same word in another section counts less

    keys = list(leaves(known, inner=True))
    same = [".".join(key) for key in keys if len(path) == 1 and key[-1] == path[0]]
    if 1 < len(same) <= _MAX_NAMED:
        return f"the nearest known keys are {', '.join(sorted(same))}"
    best = max(keys, key=lambda candidate: similarity(candidate))
    return f"the nearest known key is {'.'.join(best)}"


def nearest_variable(name: str, prefix: str, known: Mapping[str, Any]) -> str:
    """Return a clause that names the environment variable closest to `name`."""
    variables = [f"{prefix}{'__'.join(key).upper()}" for key in leaves(known)]
    wanted = name.replace("__", "_")

    def similarity(variable: str) -> float:
        return difflib.SequenceMatcher(None, wanted, variable.replace("__", "_")).ratio()

    nearest = max(variables, key=similarity)
    return f"the nearest variable is {nearest}, with two underscores between section and key"


@contextmanager
def readable_errors(
    sources: Mapping[Path, str], *section: str, also: type[Exception] | tuple[()] = ()
) -> Iterator[None]:
    """Turn pydantic's errors into a SettingsError of one line that names the source and the key.

    `also` is a component's own error class. `sources` maps key paths to where their value came from.
    """
    try:
        yield
    except ValidationError as error:
        raise SettingsError("; ".join(_sentence(item, sources, section) for item in error.errors())) from error
    except also as error:
        set_here = {source for path, source in sources.items() if path[: len(section)] == section}
        raise SettingsError(f"{', '.join(sorted(set_here))}: {'.'.join(section)}: {error}") from error


def _sentence(item: Any, sources: Mapping[Path, str], section: Path) -> str:
    path = (*section, *(str(part) for part in item["loc"]))
    source = next((sources[path[:end]] for end in range(len(path), 0, -1) if path[:end] in sources), None)
    message = str(item["msg"]).removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    prefix = f"{source}: " if source else ""
    return f"{prefix}{'.'.join(path)}: {message}"
