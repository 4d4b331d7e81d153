"""Ratchet: reinforcement learning from an agent's production traffic. Importing this package costs next to nothing.

The Python API (docs/python.md) is what `__init__.pyi` names, with its types; each name is loaded on first use.
"""

__version__ = "0.1.0"

with open(f"{__file__}i") as _stub:  # `from MODULE import NAME as NAME`
    _MODULES = {line.split()[-1]: line.split()[1] for line in _stub if line.startswith("from ")}


def __getattr__(name: str) -> object:
    from importlib import import_module

    if name not in _MODULES:
        raise AttributeError(f"module 'ratchet' has no attribute {name!r}; it has {', '.join(_MODULES)}")
    value: object = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*_MODULES, *(name for name in globals() if name.startswith("__"))])
