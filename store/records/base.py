"""The base class of the store's records, and the conversion of database rows."""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache
from typing import Any, TypeVar, get_args, get_type_hints

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A frozen record; `msgspec.structs.replace` makes changed copies."""


_R = TypeVar("_R", bound=Record)


def row_to(record: type[_R], row: Any, **values: Any) -> _R:
    """Return a row as a record. `values`: fields that are not columns of the same name."""
    for name, enum in _fields(record):
        if name not in values:
            value = getattr(row, name)
            values[name] = value if enum is None or value is None else enum(value)
    return record(**values)


@lru_cache(maxsize=64)
def _fields(record: type[Record]) -> tuple[tuple[str, type[StrEnum] | None], ...]:
    """Return each field with its enum, if it has one."""
    hints = get_type_hints(record)
    return tuple((name, _enum(hints[name])) for name in record.__struct_fields__)


def _enum(hint: Any) -> type[StrEnum] | None:
    kinds = (hint, *get_args(hint))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, StrEnum)), None)
