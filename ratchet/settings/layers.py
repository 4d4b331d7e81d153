"""Layers of settings, laid over each other, each value with the place that it came from.

Knows no setting: it is given the tree of known keys. Raises SettingsError for whatever it does not know, with the
nearest key that it knows.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from ratchet.errors import SettingsError

# Free-form mappings such as vllm.env: their keys are the user's own.
_FREE = "free"
_MAX_NAMED = 3  # keys of one name that are all named
# What Kubernetes puts into every container of a namespace that has a service of our name: RATCHET_PORT=tcp://..., say.
_SERVICE_LINK = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$")


def tree(model: Any) -> dict[str, Any]:
    """Return the keys of a pydantic model or dataclass: name -> type, or a mapping for a section."""
    if isinstance(model, type) and issubclass(model, BaseModel):
        kinds = {name: field.annotation for name, field in model.model_fields.items()}
    else:
        kinds = typing.get_type_hints(model)
    return {name: tree(kind) if _is_section(kind) else kind for name, kind in kinds.items()}


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and (issubclass(kind, BaseModel) or dataclasses.is_dataclass(kind))


class Layers:
    """Values by key, and the source of each leaf by key path."""

    def __init__(self, known: Mapping[str, Any]) -> None:
        self._known = known
        self.values: dict[str, Any] = {}
        self.sources: dict[tuple[str, ...], str] = {}

    def add_file(self, file: Path) -> None:
        """Lay a YAML file over what is there."""
        try:
            content = yaml.safe_load(file.read_text())
        except OSError as error:
            raise SettingsError(f"{file}: cannot be read: {error.strerror}") from error
        except yaml.YAMLError as error:
            raise SettingsError(f"{file}: is not YAML: {' '.join(str(error).split())}") from error
        if content is None:
            return
        if not isinstance(content, dict):
            raise SettingsError(f"{file}: must hold keys and values, such as `project: demo`")
        self._add(content, (), str(file))

    def _add(self, content: Mapping[Any, Any], path: tuple[str, ...], source: str) -> None:
        for key, value in content.items():
            here = (*path, str(key))
            kind = self._kind(here, source)
            if isinstance(kind, Mapping):
                if value is None:
                    continue
                if not isinstance(value, dict):
                    raise SettingsError(f"{source}: {'.'.join(here)} is a section; put its keys under it, indented")
                self._add(value, here, source)
            else:
                self.set(here, value, source)

    def add_variables(self, environ: Mapping[str, str], prefix: str, others: frozenset[str]) -> None:
        """Lay variables over what is there: `RATCHET_PROXY__PORT` sets `proxy.port`."""
        for name in sorted(environ):
            if not name.startswith(prefix) or name in others or _is_service_link(name, environ[name]):
                continue
            path = tuple(name.removeprefix(prefix).lower().split("__"))
            try:
                kind = self._kind(path, f"variable {name}")
            except SettingsError as error:
                if alike := difflib.get_close_matches(name, others, n=1, cutoff=0.9):
                    raise SettingsError(f"variable {name} is not known; did you mean {alike[0]}?") from error
                raise SettingsError(f"{error}; {_nearest_variable(name, prefix, self._known)}") from error
            if isinstance(kind, Mapping):
                key = "__".join((*path, next(iter(kind)))).upper()
                raise SettingsError(f"variable {name}: names a section; name a key, such as {prefix}{key}")
            self.set(path, _parse(kind, environ[name], name), f"variable {name}")

    def set(self, path: tuple[str, ...], value: Any, source: str) -> None:
        """Set one leaf."""
        place = self.values
        for key in path[:-1]:
            place = place.setdefault(key, {})
        place[path[-1]] = value
        self.sources[path] = source

    def _kind(self, path: tuple[str, ...], source: str) -> Any:
        """Return the type of a known key, or its section. Raises SettingsError, naming the nearest key."""
        kind: Any = self._known
        for depth, key in enumerate(path):
            if not isinstance(kind, Mapping):
                kind = _FREE
            elif key in kind:
                kind = kind[key]
                continue
            if kind is not _FREE:
                dotted = ".".join(path[: depth + 1])
                raise SettingsError(f"{source}: unknown key {dotted}; {nearest(path, self._known)}")
            raise SettingsError(f"{source}: {'.'.join(path[:depth])} is one value and holds no key {key!r}")
        return kind


def nearest(path: tuple[str, ...], known: Mapping[str, Any]) -> str:
    """Return a clause that names the known key closest to `path`, or those that are called the same."""

    def closeness(candidate: tuple[str, ...]) -> float:
        whole = difflib.SequenceMatcher(None, ".".join(path), ".".join(candidate)).ratio()
        last = difflib.SequenceMatcher(None, path[-1], candidate[-1]).ratio()
        return max(whole, 0.85 * last)  # the same word in another section counts less

    keys = list(leaves(known, inner=True))
    same = [".".join(key) for key in keys if len(path) == 1 and key[-1] == path[0]]
    if 1 < len(same) <= _MAX_NAMED:
        return f"the nearest known keys are {', '.join(sorted(same))}"
    best = max(keys, key=closeness)
    return f"the nearest known key is {'.'.join(best)}"


def _nearest_variable(name: str, prefix: str, known: Mapping[str, Any]) -> str:
    """Return a clause that names the variable closest to `name`, whose sections and keys two underscores part."""
    variables = [f"{prefix}{'__'.join(key).upper()}" for key in leaves(known)]
    asked = name.replace("__", "_")

    def closeness(variable: str) -> float:
        return difflib.SequenceMatcher(None, asked, variable.replace("__", "_")).ratio()

    nearest_one = max(variables, key=closeness)
    return f"the nearest variable is {nearest_one}, with two underscores between section and key"


def _is_service_link(name: str, value: str) -> bool:
    return bool(_SERVICE_LINK.search(name)) or (name.endswith("_PORT") and "://" in value)


def leaves(known: Mapping[str, Any], *, inner: bool = False) -> Iterator[tuple[str, ...]]:
    """Yield the path of every key; with `inner` of every section too."""
    for key, kind in known.items():
        if isinstance(kind, Mapping):
            if inner:
                yield (key,)
            yield from ((key, *rest) for rest in leaves(kind, inner=inner))
        else:
            yield (key,)


def _parse(kind: Any, text: str, name: str) -> Any:
    """Read a variable's text: plain for text and paths, as YAML for numbers, switches and lists."""
    if kind in (str, Path) or typing.get_origin(kind) is typing.Literal:
        return text
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SettingsError(f"variable {name}: cannot be read: {' '.join(str(error).split())}") from error


@contextmanager
def explain(
    sources: Mapping[tuple[str, ...], str], *section: str, also: type[Exception] | tuple[()] = ()
) -> Iterator[None]:
    """Turn pydantic's errors into one line that names source and key; `also` is a room's own settings error."""
    try:
        yield
    except ValidationError as error:
        raise SettingsError("; ".join(_sentence(item, sources, section) for item in error.errors())) from error
    except also as error:
        set_here = {source for path, source in sources.items() if path[: len(section)] == section}
        raise SettingsError(f"{', '.join(sorted(set_here))}: {'.'.join(section)}: {error}") from error


def _sentence(item: Any, sources: Mapping[tuple[str, ...], str], section: tuple[str, ...]) -> str:
    path = (*section, *(str(part) for part in item["loc"]))
    known = next((sources[path[:end]] for end in range(len(path), 0, -1) if path[:end] in sources), None)
    message = str(item["msg"]).removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    where = f"{known}: " if known else ""
    return f"{where}{'.'.join(path)}: {message}"
