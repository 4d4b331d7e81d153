"""The base class of the store's records, and the conversion of database rows."""

from __future__ import annotations

from enum import StrEnum
from functools import lru_cache
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A frozen record; `msgspec.structs.replace` makes changed copies."""


_R = TypeVar("_R", bound=Record)


def row_to(record: type[_R], row: Any, **values: Any) -> _R:
    """Return a row as a record. `values`: fields that are not columns of the same name."""
    for name, kind in _fields(record):
        if name not in values:
            value = getattr(row, name)
            values[name] = value if kind is None or value is None else _convert(value, kind)
    return record(**values)


def _convert(value: Any, kind: type[StrEnum | Record]) -> Any:
    return kind(value) if issubclass(kind, StrEnum) else msgspec.convert(value, kind, strict=False, str_keys=True)


@lru_cache(maxsize=64)
def _fields(record: type[Record]) -> tuple[tuple[str, type[StrEnum | Record] | None], ...]:
    """Return each field with its enum or record, if it has one."""
    hints = get_type_hints(record)
    return tuple((name, _kind(hints[name])) for name in record.__struct_fields__)


def _kind(hint: Any) -> type[StrEnum | Record] | None:
    kinds = get_args(hint) if get_origin(hint) in (UnionType, Union) else (hint,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, StrEnum | Record)), None)
