"""Runs a notebook's code cells as a kernel does: in `__main__` and in a running event loop, with `await` in cells.

`python -m tests.harness.examples.notebook FILE` exits with the exception of the first cell that fails. Nothing is
displayed but what the cells print.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import linecache
import sys
from pathlib import Path
from typing import Any


def code_cells(file: Path) -> list[str]:
    """Return the source of each code cell."""
    cells = json.loads(file.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


async def run(file: Path) -> None:
    """Run the cells one after another."""
    namespace: dict[str, Any] = vars(sys.modules["__main__"])
    for number, source in enumerate(code_cells(file), 1):
        name = f"<cell {number}>"
        linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
        cell = compile(source, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        ended = eval(cell, namespace)
        if inspect.iscoroutine(ended):
            await ended


if __name__ == "__main__":
    sys.modules["__main__"].__dict__.pop("__annotations__", None)
    asyncio.run(run(Path(sys.argv[1])))
