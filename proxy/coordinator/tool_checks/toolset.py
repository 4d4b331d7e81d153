"""The tools that a request offers, and what a sampled call of one is worth: valid, or the class of its fault.

An argument that the schema does not name is unexpected, also where `additionalProperties` is not said: generators
leave it out, and a function fails on an argument that it does not have. Where it is `true` or a schema, and where the
schema combines others (`allOf`, `$ref`, ...), only what the schema itself forbids is.

What is told of a fault names places and keywords, never values.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from jsonschema.exceptions import ValidationError

from ratchet.proxy.coordinator.tool_checks.bounded_schema import BoundedSchema, ValidationTooCostly
from ratchet.store.states import ToolOutcome

ToolCallVerdict = tuple[ToolOutcome, str | None]

_LARGEST_ARGUMENTS = 64 * 1024  # bytes
_LARGEST_SCHEMA = 64 * 1024
_LARGEST_LIST = 2**20
_LONGEST_DETAIL = 200
_MOST_STRIKES = 3  # checks that a schema may break off before it is left alone
_COMBINED = frozenset({"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "patternProperties"})

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


class Toolset:
    """The tools of one list, by name; a schema is made ready when it is first needed.

    `body` is the list as canonical JSON, empty where the request had none, None where nobody knows it any more.
    """

    def __init__(self, body: bytes | None) -> None:
        self._fault = "the tool list is not known" if body is None else None
        if body is not None and len(body) > _LARGEST_LIST:
            self._fault = "a large tool list"
        tools = _decode(body) if body and not self._fault else []
        listed = tools if isinstance(tools, list) else []  # what an upstream lets pass may be anything
        self._parameters: dict[str, Any] = dict(filter(None, map(_declared, listed)))
        self._ready: dict[str, BoundedSchema | str] = {}  # or why it cannot be checked
        self._timeouts: Counter[str] = Counter()

    def check_call(self, name: str, arguments: Any) -> ToolCallVerdict:
        """Return the outcome of a call with the arguments as they were sampled, and what is wrong."""
        if self._fault:
            return ToolOutcome.UNCHECKED, self._fault
        if name not in self._parameters:
            return ToolOutcome.UNKNOWN_TOOL, None
        if not isinstance(arguments, str):
            return ToolOutcome.INVALID_JSON, "the arguments are not text"
        if len(arguments) > _LARGEST_ARGUMENTS:
            return ToolOutcome.UNCHECKED, "large arguments"
        try:
            value = _decode(arguments)
        except RecursionError:
            return ToolOutcome.UNCHECKED, "deep arguments"
        except msgspec.DecodeError as error:
            return ToolOutcome.INVALID_JSON, str(error)[:_LONGEST_DETAIL]
        if not isinstance(value, dict):
            return ToolOutcome.SCHEMA_VIOLATION, f"$: {type(value).__name__} instead of an object"
        return self._held_against_schema(name, value, len(arguments))

    def _held_against_schema(self, name: str, value: dict[str, Any], size: int) -> ToolCallVerdict:
        schema = self._ready.get(name)
        if schema is None:
            schema = self._ready[name] = _made_ready(self._parameters[name])
        if isinstance(schema, str):
            return ToolOutcome.UNCHECKED, schema
        try:
            return _judged(schema.errors(value, size), _undeclared(self._parameters[name], value))
        except Exception as error:  # noqa: BLE001 -- the schema is a client's: what it makes a check raise is its own
            self._timeouts[name] += 1
            if self._timeouts[name] == _MOST_STRIKES:
                self._ready[name] = _reason(error)
            return ToolOutcome.UNCHECKED, _reason(error)


def _declared(tool: Any) -> tuple[str, Any] | None:
    """Return (name, parameters); a function without parameters takes no argument. None for what is no function."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    parameters = function.get("parameters")
    return function["name"], {"properties": {}} if parameters is None else parameters


def _made_ready(parameters: Any) -> BoundedSchema | str:
    try:
        if len(_encode(parameters)) > _LARGEST_SCHEMA:
            return "a large schema"
        return BoundedSchema(parameters)
    except Exception as error:  # noqa: BLE001 -- as above
        return _reason(error)


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "a schema in circles, or too deep"
    if isinstance(error, ValidationTooCostly):
        return str(error)
    if isinstance(error, ValidationError):
        return f"no JSON Schema: {error.json_path}: {error.validator}"[:_LONGEST_DETAIL]
    return f"no schema that can be checked: {type(error).__name__}"


def _undeclared(parameters: Any, value: Mapping[str, Any]) -> list[str]:
    """Return the arguments that a plain schema does not name, where it says nothing of others."""
    if not isinstance(parameters, dict) or "properties" not in parameters or "additionalProperties" in parameters:
        return []
    if not _COMBINED.isdisjoint(parameters) or not isinstance(parameters["properties"], dict):
        return []
    return [name for name in value if name not in parameters["properties"]]


def _judged(errors: Sequence[ValidationError], undeclared: Sequence[str]) -> ToolCallVerdict:
    extra = [error for error in errors if error.validator == "additionalProperties"]
    others = [error for error in errors if error.validator != "additionalProperties"]
    if others:
        told = "; ".join(f"{error.json_path}: {error.validator}{_needed(error)}" for error in others[:3])
        return ToolOutcome.SCHEMA_VIOLATION, told[:_LONGEST_DETAIL]
    if extra or undeclared:
        names = [f"{error.json_path}.{error.message}" for error in extra] + [f"$.{name}" for name in undeclared]
        return ToolOutcome.UNEXPECTED_ARGUMENT, ", ".join(names[:5])[:_LONGEST_DETAIL]
    return ToolOutcome.VALID, None


def _needed(error: ValidationError) -> str:
    """Return what a keyword asks for, where that is short and the schema's own."""
    if error.validator == "required":
        return " " + ", ".join(str(name) for name in error.validator_value if name not in error.instance)[:80]
    return f" {error.validator_value}"[:80] if error.validator == "type" else ""
