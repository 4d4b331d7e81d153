"""Imports user functions, named as `module:function` or `path/file.py:function`.

Modules are imported from the working folder or the installed packages; a file can import its neighbors. User code runs
with the rights of this process. Errors of its import, including `sys.exit`, become one sentence; its output goes to
standard error.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import operator
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from ratchet.errors import RatchetError
from ratchet.trainer.errors import NotCallable, NotImportable
from ratchet.trainer.user_code.exit_guard import exit_failure

ENTRY_POINT = re.compile(r"([A-Za-z_][\w.]*|.*\.py):[A-Za-z_][\w.]*")


@dataclass(frozen=True, slots=True)
class AcceptedParameters:
    """The available values that a function accepts, by position and by name."""

    positional: tuple[str, ...]
    by_name: tuple[str, ...]

    def call(self, function: Callable[..., Any], values: Mapping[str, Any]) -> Any:
        """Call the function with the values that it accepts."""
        positional = [values[name] for name in self.positional]
        return function(*positional, **{name: values[name] for name in self.by_name})


def to_callable(target: Callable[..., Any]) -> Callable[..., Any]:
    """Return the callable; for a class, one instance of it. Raises NotCallable."""
    if not callable(target):
        raise NotCallable(" is no function: give a function, or name one as module:function")
    if isinstance(target, type):
        if not any("__call__" in vars(base) for base in target.__mro__):
            raise NotCallable(": its instances are not callable; define __call__, or name a function")
        try:
            target = target()
        except (Exception, SystemExit) as error:  # the user's own code
            raise NotCallable(
                f": it cannot be instantiated without arguments ({type(error).__name__}: {error}); "
                "name a function, or an object of the module"
            ) from error
    function = target if inspect.isroutine(target) else getattr(target, "__call__", target)  # noqa: B004  of an object
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise NotCallable(" is a generator function: return one result instead of yielding")
    return target


def is_async(function: Callable[..., Any]) -> bool:
    """Return whether calls of the function must be awaited."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  an object whose __call__ is async
    )


def accepted_parameters(function: Callable[..., Any], available: Sequence[str]) -> AcceptedParameters:
    """Return the available parameters that a function accepts; **kwargs accepts all. Raises NotCallable.

    Arguments bound by functools.partial stay bound.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError) as error:
        raise NotCallable(f": its parameters are unknown: {error}") from error
    kinds = {parameter.kind for parameter in parameters}
    named = {one.name for one in parameters if one.kind is not inspect.Parameter.VAR_POSITIONAL}
    by_name = set(available) if inspect.Parameter.VAR_KEYWORD in kinds else named & set(available)
    if isinstance(function, functools.partial):
        by_name -= set(function.keywords)
    positional = []
    for parameter in parameters:
        is_available = parameter.name in available
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY and is_available:
            positional.append(parameter.name)
        elif not is_available and _is_required(parameter):
            raise NotCallable(
                f" requires the parameter {parameter.name!r}; it can use {', '.join(available)}, and parameters with a "
                "default"
            )
    return AcceptedParameters(
        tuple(positional), tuple(name for name in available if name in by_name and name not in positional)
    )


def _is_required(parameter: inspect.Parameter) -> bool:
    various = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and parameter.kind not in various


def name_of(function: Callable[..., Any]) -> str:
    """Return the name of a function that was given as an object: `module:function`."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}:{named.__qualname__}" if callable(function) else f"{function!r:.100}"


def load(entry_point: str) -> tuple[Callable[..., Any], ModuleType]:
    """Return the function or other callable, and its module. Raises NotImportable."""
    module_name, _, function_name = entry_point.rpartition(":")
    here = str(Path.cwd())
    try:
        with contextlib.redirect_stdout(sys.stderr):
            module = _of_file(Path(module_name)) if module_name.endswith(".py") else _named(module_name, here)
        function = operator.attrgetter(function_name)(module)
    except SystemExit as error:  # a script without `if __name__ == "__main__"`
        raise NotImportable(f"while it is imported {exit_failure(error)}") from error
    except RatchetError as error:  # its message names the remedy
        raise NotImportable(str(error)) from error
    except Exception as error:  # the import of user code may raise any exception
        problem = f"{type(error).__name__}: {error}"
        how = "module:function or path/file.py:function"
        raise NotImportable(f"{problem}; give it as {how}, importable from {here}") from error
    if not callable(function):
        raise NotImportable("that is not callable")
    return function, module


def _named(name: str, here: str) -> ModuleType:
    if here not in sys.path:  # the `ratchet` script does not put the working folder on the path; `python -m` does
        sys.path.insert(0, here)
    return importlib.import_module(name)


def _of_file(file: Path) -> ModuleType:
    """Return the module of a file; each file is imported once."""
    path = file.resolve()
    for name in (path.stem, str(path)):
        loaded = sys.modules.get(name)
        if loaded is not None and getattr(loaded, "__file__", None) == str(path):
            return loaded
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"there is no file {file}")
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    module = importlib.util.module_from_spec(spec)
    name = path.stem if path.stem not in sys.modules else str(path)  # math.py must not replace the module `math`
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
