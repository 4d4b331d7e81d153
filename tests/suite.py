"""The whole suite: `make test`. Most tests side by side, then those that measure time and the real vLLM's one by one.

Where a part ends with few failures, those tests run once more with nothing beside them. One that fails again fails
the run. If all pass the run passes, and its last lines name the unsteady tests with their first failures: an
unsteady test is a defect, in the test or in what it tests. More failures than that are never looked at twice.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
FEW = 3
_TESTS_FAILED = 1  # pytest's exit code
_RULE = "=" * 100


class Failed(Exception):
    """A part of the suite failed, and a second look did not help or was not due."""


def main() -> None:
    at_once = os.environ.get("TESTS_AT_ONCE", "4")
    parts = (
        ["-m", "not (e2e or alone)", "-n", at_once, "--dist", "loadfile", "--no-loadscope-reorder"],
        ["-m", "e2e or alone"],
    )
    sys.exit(run(parts))


def run(parts: Sequence[Sequence[str]], folder: Path = ROOT) -> int:
    """Run each part by pytest's arguments, also after one that failed; return the exit code of the whole."""
    unsteady: dict[str, str] = {}
    failed = False
    for part in parts:
        try:
            unsteady |= _look(part, folder)
        except Failed as failure:
            failed = True
            print(f"\n{failure}", flush=True)
    if unsteady:
        print(_told(unsteady), flush=True)
    return int(failed)


def _look(part: Sequence[str], folder: Path) -> dict[str, str]:
    """Run a part, its few failures twice; return the unsteady tests with their first failures, or raise `Failed`."""
    code, failures = _pytest(part, folder)
    if code == 0:
        return {}
    if code != _TESTS_FAILED or not 0 < len(failures) <= FEW:
        raise Failed(f"FAILED ({len(failures)} tests, exit code {code}); a second look is for {FEW} at most")
    print(f"\n{_RULE}\nA SECOND LOOK, with nothing beside them: {', '.join(failures)}", flush=True)
    code, again = _pytest(["-p", "no:cacheprovider", *failures], folder)
    if code != 0:
        raise Failed(f"FAILED twice: {', '.join(again) or 'the second look itself'}")
    return failures


def _told(unsteady: dict[str, str]) -> str:
    """Return the last words of a run with unsteady tests."""
    firsts = "\n".join(f"\nUNSTEADY {name}: its first failure was\n\n{failure}" for name, failure in unsteady.items())
    names = "".join(f"\n  {name}" for name in unsteady)
    return (
        f"\n{_RULE}{firsts}\n\n{_RULE}\nUNSTEADY TESTS ({len(unsteady)}): failed once, passed alone. "
        f"Each is a defect to mend; its first failure is above.{names}\n{_RULE}"
    )


def _pytest(arguments: Sequence[str], folder: Path) -> tuple[int, dict[str, str]]:
    """Run pytest; return its exit code and what failed in it, nothing where it ended before it could tell."""
    # The programs that tests start are started often: once compiled is enough.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "failures.json"
        command = [sys.executable, "-m", "pytest", "-p", "tests.first_failures", "--first-failures", str(file)]
        code = subprocess.run([*command, *arguments], cwd=folder, env=environment).returncode
        return code, json.loads(file.read_text()) if file.exists() else {}


if __name__ == "__main__":
    main()
