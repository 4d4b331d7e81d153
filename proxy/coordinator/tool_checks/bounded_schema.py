"""JSON Schema validation that a hostile schema cannot stall.

Guarantees: nothing is ever fetched (a `$ref` resolves within the document or not at all). A check ends after a bounded
amount of work with `ValidationTooCostly`, whatever the schema contains: circular references, branches that double at
each level, patterns that backtrack without end. Not checked: `format`, `unevaluatedProperties`, `unevaluatedItems`.

The rules are those of `jsonschema`; every keyword spends from a budget before it runs. Patterns run in `regex`, which
supports a timeout. `jsonschema-rs` is faster (3 us a check instead of 300 us, 0.07 ms to compile a schema instead of
8 ms) and handles circular references, backtracking patterns and remote references, but it has no work limit: a schema
of 40 `anyOf` branches that double was still running after 10 s. So it does not replace this file, which runs off the
path of calls.
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
_KEYWORD = 20  # minimum cost of a keyword
_SECOND = 10_000_000  # cost of a second in a pattern
_PATTERN_SECONDS = 0.02
_MAX_PATTERN_LENGTH = 1_000
_MAX_UNIQUE_ITEMS = 500  # compared pairwise
_MAX_ERRORS = 20
_OLD_DRAFTS = ("draft-07", "draft-06", "draft-04")  # `$schema` of many generators

_Errors = Iterator[ValidationError]
_Keyword = Callable[[Any, Any, Any, Any], _Errors]


class ValidationTooCostly(Exception):
    """The check exceeded its budget."""


@dataclass(slots=True)
class _WorkBudget:
    left: int
    per_error: int  # an error message repeats the instance


_budget: ContextVar[_WorkBudget] = ContextVar("budget")


def _spend(units: int) -> None:
    budget = _budget.get()
    budget.left -= units
    if budget.left < 0:
        raise ValidationTooCostly("too much work")


def _size(value: Any) -> int:
    return 1 + len(value) if isinstance(value, (list, dict)) else 1


def _with_budget(keyword: _Keyword) -> _Keyword:
    def run(validator: Any, value: Any, instance: Any, schema: Any) -> _Errors:
        _spend(_KEYWORD + _size(value) * _size(instance))
        for error in keyword(validator, value, instance, schema) or ():
            _spend(_budget.get().per_error)
            yield error

    return run


def _matches(pattern: str, text: str) -> bool:
    if len(pattern) > _MAX_PATTERN_LENGTH:
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
    if value and isinstance(instance, list) and len(instance) > _MAX_UNIQUE_ITEMS:
        raise ValidationTooCostly("many unique items")
    yield from Draft202012Validator.VALIDATORS["uniqueItems"](validator, value, instance, schema)


def _ignored(validator: Any, value: Any, instance: Any, schema: Any) -> _Errors:
    yield from ()


_REPLACED_KEYWORDS: Mapping[str, _Keyword] = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "uniqueItems": _unique_items,
    "unevaluatedProperties": _ignored,
    "unevaluatedItems": _ignored,
}


def _bounded(kind: Any) -> Any:
    keywords = {**kind.VALIDATORS, **{name: run for name, run in _REPLACED_KEYWORDS.items() if name in kind.VALIDATORS}}
    return extend(kind, {name: _with_budget(run) for name, run in keywords.items()})


_NEW_RULES, _OLD_RULES = _bounded(Draft202012Validator), _bounded(Draft7Validator)


class BoundedSchema:
    """A compiled schema. Raises ValidationTooCostly, and the errors of `jsonschema` for an invalid schema."""

    def __init__(self, schema: Any) -> None:
        draft = schema.get("$schema") if isinstance(schema, dict) else None
        rules = _OLD_RULES if isinstance(draft, str) and any(name in draft for name in _OLD_DRAFTS) else _NEW_RULES
        _budget.set(_WorkBudget(_BUDGET, _KEYWORD))
        fault = next(rules(rules.META_SCHEMA, registry=REGISTRY).iter_errors(schema), None)
        if fault is not None:
            raise fault
        self._validator = rules(_without_drafts(schema), registry=REGISTRY)

    def errors(self, value: Any, size: int) -> list[ValidationError]:
        """Return the first errors of a value of `size` bytes of JSON."""
        _budget.set(_WorkBudget(_BUDGET, _KEYWORD + size // 10))
        return list(islice(self._validator.iter_errors(value), _MAX_ERRORS))


def _without_drafts(schema: Any) -> Any:
    """Return the schema without `$schema`: a nested one would bring back the keywords without a budget."""
    if isinstance(schema, dict):
        return {
            name: _without_drafts(inner)
            for name, inner in schema.items()
            if not (name == "$schema" and isinstance(inner, str))
        }
    return [_without_drafts(inner) for inner in schema] if isinstance(schema, list) else schema
