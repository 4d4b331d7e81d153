"""Errors of settings: the known keys, the one nearest to a misspelt key, and pydantic's errors as one line each."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import BaseModel, ValidationError

from ratchet.errors import SettingsError

Path = tuple[str, ...]  # of a key: ("proxy", "port")
ANY_NAME = "NAME"  # the only key of a section whose keys are names that the user chooses
_MAX_LISTED = 20  # names in one message
_MAX_NAMED = 3  # keys of the same name that one message lists
_MIN_SIMILARITY = 0.6  # of a name that is suggested, as difflib's default
SKIPPED = "skipped"  # pydantic's type of an error about what cannot be checked before other errors are corrected
_REFERENCE = "docs/configuration.md lists the keys"
# What the user has to write, where pydantic's sentence is about Python: by pydantic's type of the error.
_REMEDIES = {
    "tuple_type": "must be a list: write it in brackets, such as `[VALUE]`",
    "list_type": "must be a list: write it in brackets, such as `[VALUE]`",
    "dict_type": "must hold keys and values, such as `{KEY: VALUE}`",
    "finite_number": "must be a finite number; for the default, leave the key out",
}


class Refused(str):
    """In a tree of keys: a key that is known and refused at this place, with the reason and the remedy."""

    __slots__ = ()


def key_tree(model: Any) -> dict[str, Any]:
    """Return the keys of a pydantic model or dataclass: name -> type, or a mapping for a section.

    Fields that are derived (`exclude`) are no keys.
    """
    if isinstance(model, type) and issubclass(model, BaseModel):
        types = {name: field.annotation for name, field in model.model_fields.items() if not field.exclude}
    else:
        types = typing.get_type_hints(model)
    return {name: key_tree(kind) if _is_section(kind) else kind for name, kind in types.items()}


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and (issubclass(kind, BaseModel) or dataclasses.is_dataclass(kind))


def leaves(known: Mapping[str, Any], *, inner: bool = False) -> Iterator[Path]:
    """Yield the path of every key; with `inner`, of every section too."""
    for key, kind in known.items():
        if isinstance(kind, Refused):
            continue
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
        found = kind.get(key, kind.get(ANY_NAME))
        if found is None:
            raise SettingsError(f"{source}: unknown key {'.'.join(path[: depth + 1])}; {nearest_key(path, known)}")
        if isinstance(found, Refused):
            raise SettingsError(f"{source}: {'.'.join(path[: depth + 1])} {found}")
        kind = found
    return kind


def nearest_key(path: Path, known: Mapping[str, Any]) -> str:
    """Return a clause that names the known key closest to `path`, or all keys of the same name.

    If none is similar, it names the list of the keys.
    """

    def similarity(candidate: Path) -> float:
        whole = difflib.SequenceMatcher(None, ".".join(path), ".".join(candidate)).ratio()
        last = difflib.SequenceMatcher(None, path[-1], candidate[-1]).ratio()
        return max(whole, 0.85 * last)  # the same word in another section counts less

    keys = list(_candidates(path, known, inner=True))
    same = [".".join(key) for key in keys if len(path) == 1 and key[-1] == path[0]]
    if 1 < len(same) <= _MAX_NAMED:
        return f"the nearest known keys are {', '.join(sorted(same))}"
    best = max(keys, key=similarity)
    if similarity(best) < _MIN_SIMILARITY:
        return _REFERENCE
    return f"the nearest known key is {'.'.join(best)}"


def _candidates(path: Path, known: Mapping[str, Any], *, inner: bool = False) -> Iterator[Path]:
    """Yield every key, with the name in `path` for `ANY_NAME`; keys below a name only if `path` has one there."""
    for key in leaves(known, inner=inner):
        if ANY_NAME not in key:
            yield key
            continue
        place = key.index(ANY_NAME)
        if path[:place] == key[:place] and len(path) > place:
            yield (*key[:place], path[place], *key[place + 1 :])


def nearest_variable(name: str, prefix: str, known: Mapping[str, Any]) -> str:
    """Return a clause that names the environment variable closest to `name`; empty if none is similar."""
    path = tuple(name.removeprefix(prefix).lower().split("__"))
    wanted = "_".join(path)

    def similarity(key: Path) -> float:
        return difflib.SequenceMatcher(None, wanted, "_".join(key)).ratio()

    nearest = max(_candidates(path, known), key=similarity)
    if similarity(nearest) < _MIN_SIMILARITY:
        return ""
    variable = f"{prefix}{'__'.join(nearest).upper()}"
    return f"; the nearest variable is {variable}, with two underscores between section and key"


def is_option(source: str) -> bool:
    """Return whether a value came from a command-line option (`--judge`) or a Python argument (`judge=`)."""
    return source.startswith("-") or source.endswith("=")


def listed(names: Iterable[str]) -> str:
    """Return names for a message, not too many."""
    known = list(names)
    shown, rest = known[:_MAX_LISTED], len(known) - _MAX_LISTED
    return ", ".join(shown) + (f" and {rest} more" if rest > 0 else "")


@contextmanager
def readable_errors(sources: Mapping[Path, str], model: Any, *section: str) -> Iterator[None]:
    """Turn pydantic's errors into a SettingsError of one line that names the source and the key.

    `sources` maps key paths to where their value came from; `model` is what checks the section, for the known keys
    beside an unknown one.
    """
    try:
        yield
    except ValidationError as error:
        found = [_sentence(item, sources, model, section) for item in error.errors() if item["type"] != SKIPPED]
        raise SettingsError("; ".join(found)) from error


def _sentence(item: Any, sources: Mapping[Path, str], model: Any, section: Path) -> str:
    path = (*section, *(str(part) for part in item["loc"]))
    if path[:2] == ("trainer", "learner"):  # an agent's part of the section `learner`
        path = path[1:]
    message = _REMEDIES.get(item["type"]) or str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "string_pattern_mismatch" and item["ctx"]["pattern"] == r"^[\w.-]+$":
        message = f"{str(item['input'])[:100]!r} may contain letters, digits, '_', '-' and '.' only"
    message = message[:1].lower() + message[1:]
    if path and message.startswith(f"{path[-1]}."):  # the message names the setting
        key, space, message = message.partition(" ")
        path = (*path[:-1], *key.split("."))
        message = f"{'.'.join(path)}{space}{message}"
    elif path and item["type"] != "extra_forbidden" and sources.get(path) != f"--{path[-1]}":
        message = f"{'.'.join(path)}: {message}"
    source = next((sources[path[:end]] for end in range(len(path), 0, -1) if path[:end] in sources), None)
    prefix = f"{source}: " if source else ""
    if item["type"] == "extra_forbidden":
        beside = _keys_beside(model, item["loc"])
        near = difflib.get_close_matches(path[-1], beside, n=1, cutoff=_MIN_SIMILARITY)
        known = f"the nearest known key is {'.'.join((*path[:-1], *near))}" if near else f"known are {listed(beside)}"
        return f"{prefix}unknown key {'.'.join(path)}; {known}"
    return f"{prefix}{message}"


def _keys_beside(model: Any, place: Sequence[int | str]) -> list[str]:
    """Return the keys that can be where pydantic's error says that one is not known."""
    kinds = [model]
    for part in place[:-1]:
        kinds = [inner for kind in _without_unions(kinds) for inner in _inner(kind, part)]
    return [key for kind in _without_unions(kinds) for key in getattr(kind, "model_fields", ())]


def _without_unions(kinds: Iterable[Any]) -> Iterator[Any]:
    for kind in kinds:
        origin = typing.get_origin(kind)
        if origin is typing.Annotated:
            yield from _without_unions(typing.get_args(kind)[:1])
        elif origin in (typing.Union, types.UnionType):
            yield from _without_unions(typing.get_args(kind))
        else:
            yield kind


def _inner(kind: Any, part: int | str) -> Iterator[Any]:
    """Yield the type of a field, of the values of a mapping or list, or of a union's member by its `kind`."""
    fields: Mapping[str, Any] = getattr(kind, "model_fields", {})
    if "kind" in fields and part in typing.get_args(fields["kind"].annotation):
        yield kind
    elif part in fields:
        yield fields[str(part)].annotation
    elif values := typing.get_args(kind):
        yield values[1 if issubclass(typing.get_origin(kind), Mapping) else 0]
