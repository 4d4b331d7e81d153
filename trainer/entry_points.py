"""Functions of the user's own, named as `module:function`: imported from the working folder or the installed packages.

The user's code runs with this process's rights. Whatever its import raises is told in one sentence.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


class NotImportable(Exception):
    """The function cannot be imported; the message says why."""


def load(entry_point: str) -> tuple[Callable[..., Any], ModuleType]:
    """Return the function, or anything that can be called, and its module. Raises NotImportable."""
    module_name, _, function_name = entry_point.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:  # the `ratchet` script does not put the working folder on the path; `python -m` does
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
        function = getattr(module, function_name)
    except Exception as error:  # the user's module may fail in any way while it is imported
        problem = f"{type(error).__name__}: {error}"
        raise NotImportable(f"{problem}; give it as module:function, importable from {here}") from error
    if not callable(function):
        raise NotImportable("that is not a function")
    return function, module
