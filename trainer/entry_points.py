"""Functions of the user's own, named as `module:function` or `path/file.py:function`: imported from the working folder
or the installed packages; what lies beside a file can be imported by it.

The user's code runs with this process's rights. Whatever its import raises is told in one sentence; what it prints goes
to the standard error.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import operator
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any


class NotImportable(Exception):
    """The function cannot be imported; the message says why."""


def load(entry_point: str) -> tuple[Callable[..., Any], ModuleType]:
    """Return the function, or anything that can be called, and its module. Raises NotImportable."""
    module_name, _, function_name = entry_point.rpartition(":")
    here = str(Path.cwd())
    try:
        with contextlib.redirect_stdout(sys.stderr):
            module = _of_file(Path(module_name)) if module_name.endswith(".py") else _named(module_name, here)
        function = operator.attrgetter(function_name)(module)
    except Exception as error:  # the user's module may fail in any way while it is imported
        problem = f"{type(error).__name__}: {error}"
        raise NotImportable(f"{problem}; give it as module:function, importable from {here}") from error
    if not callable(function):
        raise NotImportable("that is not a function")
    return function, module


def _named(name: str, here: str) -> ModuleType:
    if here not in sys.path:  # the `ratchet` script does not put the working folder on the path; `python -m` does
        sys.path.insert(0, here)
    return importlib.import_module(name)


def _of_file(file: Path) -> ModuleType:
    """Return the module in a file, the same one for the same file."""
    path = file.resolve()
    for name in (path.stem, str(path)):
        known = sys.modules.get(name)
        if known is not None and getattr(known, "__file__", None) == str(path):
            return known
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = importlib.util.module_from_spec(spec)
    name = path.stem if path.stem not in sys.modules else str(path)  # one called math.py takes nobody's place
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
