"""Functions of the user's own, named as `module:function` or `path/file.py:function`: imported from the working folder
or the installed packages; what lies beside a file can be imported by it.

The user's code runs with this process's rights. Whatever its import raises, `sys.exit` too, is one sentence; what it
prints goes to the standard error. `wanted` says which of the values that are offered a function takes.
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

from ratchet.trainer.user_code.exit_guard import exited

ENTRY_POINT = re.compile(r"([A-Za-z_][\w.]*|.*\.py):[A-Za-z_][\w.]*")


class NotImportable(Exception):
    """The function cannot be imported; the message says why."""


class NotCallable(Exception):
    """The function cannot be called with what is offered; the message says why."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which of the values that are offered a function takes, by place and by name."""

    by_place: tuple[str, ...]
    by_name: tuple[str, ...]

    def call(self, function: Callable[..., Any], offered: Mapping[str, Any]) -> Any:
        """Call the function with what it takes."""
        places = [offered[name] for name in self.by_place]
        return function(*places, **{name: offered[name] for name in self.by_name})


def to_call(found: Callable[..., Any]) -> Callable[..., Any]:
    """Return what is called each time: of a class, one object of it. Raises NotCallable."""
    if isinstance(found, type):
        if not any("__call__" in vars(base) for base in found.__mro__):
            raise NotCallable(": its objects cannot be called; define __call__, or name a function")
        try:
            found = found()
        except (Exception, SystemExit) as error:  # the user's own code
            raise NotCallable(
                f": one object serves all, and cannot be made without arguments ({type(error).__name__}: {error}); "
                "name a function, or an object of the module"
            ) from error
    function = found if inspect.isroutine(found) else getattr(found, "__call__", found)  # noqa: B004  an object's own
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise NotCallable(" yields: have it return its answer, once")
    return found


def is_async(function: Callable[..., Any]) -> bool:
    """Whether calling it gives something to be awaited."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004  an object whose __call__ is async
    )


def wanted(function: Callable[..., Any], offered: Sequence[str]) -> Wanted:
    """Return which of the offered parameters a function takes; one with **kwargs takes all. Raises NotCallable.

    What a functools.partial has bound stays bound.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (ValueError, TypeError) as error:
        raise NotCallable(f": its parameters are unknown: {error}") from error
    kinds = {parameter.kind for parameter in parameters}
    named = {one.name for one in parameters if one.kind is not inspect.Parameter.VAR_POSITIONAL}
    by_name = set(offered) if inspect.Parameter.VAR_KEYWORD in kinds else named & set(offered)
    if isinstance(function, functools.partial):
        by_name -= set(function.keywords)
    by_place = []
    for parameter in parameters:
        known = parameter.name in offered
        if parameter.kind is inspect.Parameter.POSITIONAL_ONLY and known:
            by_place.append(parameter.name)
        elif not known and _must_be_given(parameter):
            raise NotCallable(
                f" takes {parameter.name!r}, which nobody gives it; it may take {', '.join(offered)}, and others that "
                "have a default"
            )
    return Wanted(tuple(by_place), tuple(name for name in offered if name in by_name and name not in by_place))


def _must_be_given(parameter: inspect.Parameter) -> bool:
    various = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and parameter.kind not in various


def load(entry_point: str) -> tuple[Callable[..., Any], ModuleType]:
    """Return the function, or anything that can be called, and its module. Raises NotImportable."""
    module_name, _, function_name = entry_point.rpartition(":")
    here = str(Path.cwd())
    try:
        with contextlib.redirect_stdout(sys.stderr):
            module = _of_file(Path(module_name)) if module_name.endswith(".py") else _named(module_name, here)
        function = operator.attrgetter(function_name)(module)
    except SystemExit as error:  # a script without `if __name__ == "__main__"`
        raise NotImportable(f"while it is imported {exited(error)}") from error
    except Exception as error:  # the user's module may fail in any way while it is imported
        problem = f"{type(error).__name__}: {error}"
        how = "module:function or path/file.py:function"
        raise NotImportable(f"{problem}; give it as {how}, importable from {here}") from error
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
