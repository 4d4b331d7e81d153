"""JSON Schema validation that a hostile schema cannot abuse.

Promises: nothing is ever fetched (a `$ref` leads into the same document or nowhere); a check ends after a bounded
amount of work, whatever the schema does (references in circles, branches that double at each step, patterns that
backtrack without end), with `ValidationTooCostly`. Not judged: `format`, `unevaluatedProperties`, `unevaluatedItems`.

The rules are `jsonschema`'s; every keyword pays from a budget before it runs. Patterns run in `regex`, which can be
told to give up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import islice
from typing import Any

import regex
from jsonschema import Draft7Validator, Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.validators import extend
from jsonschema_specifications import REGISTRY

_BUDGET = 300_000  # of work; some 30 ms
_KEYWORD = 20  # what a keyword costs at least
_SECOND = 10_000_000  # what a second in a pattern costs
_PATTERN_SECONDS = 0.02
_LONGEST_PATTERN = 1_000
_MOST_UNIQUE = 500  # items that are compared each with each
_MOST_ERRORS = 20
_OLD = ("draft-07", "draft-06", "draft-04")  # `$schema` of what many generators write

_Errors = Iterator[ValidationError]
_Keyword = Callable[[Any, Any, Any, Any], _Errors]


class ValidationTooCostly(Exception):
    """The check was given up."""


@dataclass(slots=True)
class _WorkBudget:
    left: int
    per_error: int  # an error's text repeats the instance


_purse: ContextVar[_WorkBudget] = ContextVar("purse")


def _spend(units: int) -> None:
    purse = _purse.get()
    purse.left -= units
    if purse.left < 0:
        raise ValidationTooCostly("too much work")


def _size(value: Any) -> int:
    return 1 + len(value) if isinstance(value, (list, dict)) else 1


def _paid(keyword: _Keyword) -> _Keyword:
    def run(validator: Any, value: Any, instance: Any, schema: Any) -> _Errors:
        _spend(_KEYWORD + _size(value) * _size(instance))
        for error in keyword(validator, value, instance, schema) or ():
            _spend(_purse.get().per_error)
            yield error

    return run


def _matches(pattern: str, text: str) -> bool:
    if len(pattern) > _LONGEST_PATTERN:
        raise ValidationTooCostly("a long pattern")
    began = time.perf_counter()
    try:
        return regex.search(pattern, text, timeout=_PATTERN_SECONDS) is not None
    except TimeoutError:
        raise ValidationTooCostly("a slow pattern") from None
    finally:
        _spend(int((time.perf_counter() - began) * _SECOND))


def _pattern(validator: Any, value: Any, instance: Any, schema: Any) -> _Errors:
    if isinstance(instance, str) and not _matches(value, instance):
        yield ValidationError("does not match")


def _pattern_properties(validator: Any, value: Any, instance: Any, schema: Any) -> _Errors:
    if isinstance(instance, dict):
        for pattern, inner in value.items():
            for name in instance:
                if _matches(pattern, name):
                    yield from validator.descend(instance[name], inner, path=name, schema_path=pattern)


def _additional_properties(validator: Any, value: Any, instance: Any, schema: Any) -> _Errors:
    if not isinstance(instance, dict):
        return
    patterns = schema.get("patternProperties", {})
    for name in instance:
        if name in schema.get("properties", {}) or any(_matches(pattern, name) for pattern in patterns):
            continue
        if value is False:
            yield ValidationError(name)
        else:
            yield from validator.descend(instance[name], value, path=name)


def _unique_items(validator: Any, value: Any, instance: Any, schema: Any) -> _Errors:
    if value and isinstance(instance, list) and len(instance) > _MOST_UNIQUE:
        raise ValidationTooCostly("many items that have to differ")
    yield from Draft202012Validator.VALIDATORS["uniqueItems"](validator, value, instance, schema)


def _ignored(validator: Any, value: Any, instance: Any, schema: Any) -> _Errors:
    yield from ()


_OURS: Mapping[str, _Keyword] = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "uniqueItems": _unique_items,
    "unevaluatedProperties": _ignored,
    "unevaluatedItems": _ignored,
}


def _bounded(kind: Any) -> Any:
    keywords = {**kind.VALIDATORS, **{name: run for name, run in _OURS.items() if name in kind.VALIDATORS}}
    return extend(kind, {name: _paid(run) for name, run in keywords.items()})


_NEW_RULES, _OLD_RULES = _bounded(Draft202012Validator), _bounded(Draft7Validator)


class BoundedSchema:
    """One schema, ready to check values. Raises ValidationTooCostly, and what `jsonschema` raises for what is no
    schema."""

    def __init__(self, schema: Any) -> None:
        said = schema.get("$schema") if isinstance(schema, dict) else None
        rules = _OLD_RULES if isinstance(said, str) and any(name in said for name in _OLD) else _NEW_RULES
        _purse.set(_WorkBudget(_BUDGET, _KEYWORD))
        fault = next(rules(rules.META_SCHEMA, registry=REGISTRY).iter_errors(schema), None)
        if fault is not None:
            raise fault
        self._validator = rules(_without_dialects(schema), registry=REGISTRY)

    def errors(self, value: Any, size: int) -> list[ValidationError]:
        """Return the first errors of a value that was `size` bytes of JSON."""
        _purse.set(_WorkBudget(_BUDGET, _KEYWORD + size // 10))
        return list(islice(self._validator.iter_errors(value), _MOST_ERRORS))


def _without_dialects(schema: Any) -> Any:
    """Return the schema without `$schema`: within, it would bring back the rules without a budget."""
    if isinstance(schema, dict):
        return {
            name: _without_dialects(inner)
            for name, inner in schema.items()
            if not (name == "$schema" and isinstance(inner, str))
        }
    return [_without_dialects(inner) for inner in schema] if isinstance(schema, list) else schema
