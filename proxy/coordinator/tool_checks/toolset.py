"""The tools that a request offers, and the outcome of a sampled tool call: valid, or the class of its fault.

An argument that the schema does not name is unexpected, even without `additionalProperties: false`: generators leave
that out, and a function fails on an argument that it does not have. If `additionalProperties` is `true` or a schema, or
if the schema combines others (`allOf`, `$ref`, ...), only the schema itself decides.

Details of a fault contain paths and keywords, never values.
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

_MAX_ARGUMENTS_BYTES = 64 * 1024  # bytes
_MAX_SCHEMA_BYTES = 64 * 1024
_MAX_LIST_BYTES = 2**20
_MAX_DETAIL = 200
_MAX_FAILURES = 3  # of checks with a schema before it is no longer used
_COMBINED = frozenset({"$ref", "$dynamicRef", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "patternProperties"})

_decode = msgspec.json.Decoder().decode
_encode = msgspec.json.Encoder().encode


class Toolset:
    """The tools of one list, by name; a schema is compiled when it is first needed.

    `body` is the list as canonical JSON, empty if the request has no tools, None if the list is unknown.
    """

    def __init__(self, body: bytes | None) -> None:
        self._fault = "the tool list is not known" if body is None else None
        if body is not None and len(body) > _MAX_LIST_BYTES:
            self._fault = "a large tool list"
        tools = _decode(body) if body and not self._fault else []
        listed = tools if isinstance(tools, list) else []  # an upstream may accept anything
        self._parameters: dict[str, Any] = dict(filter(None, map(_declared, listed)))
        self._schemas: dict[str, BoundedSchema | str] = {}  # compiled, or why not
        self._failures: Counter[str] = Counter()

    def check_call(self, name: str, arguments: Any) -> ToolCallVerdict:
        """Return the outcome of a call with the sampled arguments, and the fault."""
        if self._fault:
            return ToolOutcome.UNCHECKED, self._fault
        if name not in self._parameters:
            return ToolOutcome.UNKNOWN_TOOL, None
        if not isinstance(arguments, str):
            return ToolOutcome.INVALID_JSON, "the arguments are not text"
        if len(arguments) > _MAX_ARGUMENTS_BYTES:
            return ToolOutcome.UNCHECKED, "large arguments"
        try:
            value = _decode(arguments)
        except RecursionError:
            return ToolOutcome.UNCHECKED, "deep arguments"
        except msgspec.DecodeError as error:
            return ToolOutcome.INVALID_JSON, str(error)[:_MAX_DETAIL]
        if not isinstance(value, dict):
            return ToolOutcome.SCHEMA_VIOLATION, f"$: {type(value).__name__} instead of an object"
        return self._check_schema(name, value, len(arguments))

    def _check_schema(self, name: str, value: dict[str, Any], size: int) -> ToolCallVerdict:
        schema = self._schemas.get(name)
        if schema is None:
            schema = self._schemas[name] = _compile(self._parameters[name])
        if isinstance(schema, str):
            return ToolOutcome.UNCHECKED, schema
        try:
            return _outcome(schema.errors(value, size), _undeclared(self._parameters[name], value))
        except Exception as error:  # noqa: BLE001 -- the schema is a client's: what it makes a check raise is its own
            self._failures[name] += 1
            if self._failures[name] == _MAX_FAILURES:
                self._schemas[name] = _reason(error)
            return ToolOutcome.UNCHECKED, _reason(error)


def _declared(tool: Any) -> tuple[str, Any] | None:
    """Return (name, parameters); a function without parameters takes no argument. None for other tools."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        return None
    parameters = function.get("parameters")
    return function["name"], {"properties": {}} if parameters is None else parameters


def _compile(parameters: Any) -> BoundedSchema | str:
    try:
        if len(_encode(parameters)) > _MAX_SCHEMA_BYTES:
            return "a large schema"
        return BoundedSchema(parameters)
    except Exception as error:  # noqa: BLE001 -- as above
        return _reason(error)


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "a circular or too deep schema"
    if isinstance(error, ValidationTooCostly):
        return str(error)
    if isinstance(error, ValidationError):
        return f"not a JSON Schema: {error.json_path}: {error.validator}"[:_MAX_DETAIL]
    return f"not a usable schema: {type(error).__name__}"


def _undeclared(parameters: Any, value: Mapping[str, Any]) -> list[str]:
    """Return the arguments that a plain schema does not name, if it has no rule for them."""
    if not isinstance(parameters, dict) or "properties" not in parameters or "additionalProperties" in parameters:
        return []
    if not _COMBINED.isdisjoint(parameters) or not isinstance(parameters["properties"], dict):
        return []
    return [name for name in value if name not in parameters["properties"]]


def _outcome(errors: Sequence[ValidationError], undeclared: Sequence[str]) -> ToolCallVerdict:
    extra = [error for error in errors if error.validator == "additionalProperties"]
    others = [error for error in errors if error.validator != "additionalProperties"]
    if others:
        faults = "; ".join(f"{error.json_path}: {error.validator}{_expected(error)}" for error in others[:3])
        return ToolOutcome.SCHEMA_VIOLATION, faults[:_MAX_DETAIL]
    if extra or undeclared:
        names = [f"{error.json_path}.{error.message}" for error in extra] + [f"$.{name}" for name in undeclared]
        return ToolOutcome.UNEXPECTED_ARGUMENT, ", ".join(names[:5])[:_MAX_DETAIL]
    return ToolOutcome.VALID, None


def _expected(error: ValidationError) -> str:
    """Return the value of a `required` or `type` keyword, which comes from the schema."""
    if error.validator == "required":
        return " " + ", ".join(str(name) for name in error.validator_value if name not in error.instance)[:80]
    return f" {error.validator_value}"[:80] if error.validator == "type" else ""
