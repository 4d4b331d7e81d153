"""An evaluation on BFCL: the same entries for several versions through the proxy, compared pair by pair.

Guarantees: every version gets the same entries; an entry whose inference failed is a failure, never skipped; calls name
their version, so they are measurements and never trained. Only setting up the package's environment needs a package
index; measuring needs no network besides the proxy.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ratchet.trainer.errors import TrainerError
from ratchet.trainer.statistics import Compared, ComparisonVerdict, Marks, Missing, Ranking, rank
from ratchet.tuner.reports import TuningResult, task_set
from ratchet.tuner.rollouts.prices import Prices, RolloutCost

PACKAGE = "bfcl-eval"
VERSION = "2026.3.23"
_REQUIREMENTS = Path(__file__).with_name("requirements.txt")
PROGRAM = Path(__file__).with_name("program.py")
# Categories that need neither network access nor a second model.
CATEGORIES = (
    "simple_python", "simple_java", "simple_javascript", "multiple", "parallel", "parallel_multiple", "irrelevance",
    "live_simple", "live_multiple", "live_parallel", "live_parallel_multiple", "live_irrelevance", "live_relevance",
    "multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context",
)  # fmt: skip
_LOG_TAIL = 1500  # characters of the program's log in an error


def find(folder: Path) -> Path:
    """Return the environment's Python. Raises TrainerError if it is incomplete."""
    python = folder / "bin" / "python"
    if not _stamp(folder).is_file() or not python.exists():
        raise TrainerError(
            f"{PACKAGE} {VERSION} is not set up in {folder}: run `ratchet eval bfcl --setup` once (about 400 MB), or "
            "name its folder with --environment"
        )
    return python


def set_up(folder: Path) -> Path:
    """Create the environment with pip and its settings; return its Python. Raises TrainerError.

    An existing environment is replaced; any other non-empty folder is refused.
    """
    if folder.exists() and not (folder / "pyvenv.cfg").is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise TrainerError(
            f"{folder} is not empty and not a virtual environment: name another folder with --environment"
        )
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _run([sys.executable, "-m", "venv", str(folder)], "creating the environment")
    python = folder / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    _run([*install, "--requirement", str(_REQUIREMENTS)], "installing dependencies")
    _run([*install, "--no-deps", f"{PACKAGE}=={VERSION}"], f"installing {PACKAGE}")
    _stamp(folder).touch()
    return python


def _stamp(folder: Path) -> Path:
    return folder / f".{PACKAGE}-{VERSION}"


def _run(command: list[str], what: str) -> None:
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
        raise TrainerError(f"{what} failed: {' '.join(command)}; see its output above")


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one version on one BFCL entry."""

    id: str
    category: str
    valid: bool
    broken: str | None = None  # why there is no answer
    error: str | None = None  # the package's error class
    prompt_tokens: float = 0.0
    completion_tokens: float = 0.0
    seconds: float = 0.0


class _ProgramOutput(msgspec.Struct):
    entries: list[Entry]


class BfclRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Parameters of an evaluation."""

    categories: tuple[str, ...]
    limit: int | None = None  # entries of each category; None: all
    seed: int = 0  # of the sample
    threads: int = 8
    temperature: float = 0.0
    tools: bool = True  # tools in the API field; False: in the prompt


def run_package(
    python: Path, model: str, request: BfclRequest, *, base_url: str, key: str, folder: Path
) -> list[Entry]:
    """Run the package on one version; its files and log stay in the folder. Raises TrainerError."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log.txt"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RATCHET_", "PYTHON"))}
    environment = kept | {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": key, "BFCL_PROJECT_ROOT": str(folder)}
    program_input = json.dumps(msgspec.to_builtins(request) | {"model": model})
    with log.open("w") as errors:
        done = subprocess.run(
            [str(python), str(PROGRAM)], input=program_input, stdout=subprocess.PIPE, stderr=errors, text=True,
            env=environment, check=False,
        )  # fmt: skip
    if done.returncode:
        raise TrainerError(f"{PACKAGE} ended with {done.returncode} on {model}: {_log_tail(log)}")
    entries = msgspec.json.decode(done.stdout, type=_ProgramOutput).entries
    if entries and all(entry.broken for entry in entries):
        raise TrainerError(f"no entry of {model} could be run at {base_url}: {entries[0].broken}; log: {log}")
    return entries


def _log_tail(log: Path) -> str:
    return " ".join(log.read_text(errors="replace")[-_LOG_TAIL:].split())


def ranking(answers: Mapping[str, Sequence[Entry]]) -> Ranking:
    """Rank the versions by their share of correct entries, with all pairs."""
    return rank({name: _marks(entries) for name, entries in answers.items()})


def _marks(entries: Sequence[Entry]) -> Marks:
    return {one.id: (Missing.FAILED if one.broken else float(one.valid),) for one in entries}


def result(
    alias: str,
    request: BfclRequest,
    answers: Mapping[str, Sequence[Entry]],
    *,
    found: Ranking,
    wall_seconds: float,
    prices: Prices,
) -> TuningResult:
    """Return the tuning result: the last version against the first."""
    names = list(answers)
    gain: Compared | None = found.pair(names[-1], names[0]) if len(names) > 1 else None
    spent = sum((_spent(name, entries, prices) for name, entries in answers.items()), RolloutCost())
    return TuningResult(
        method="eval",
        technique=f"BFCL v4, {', '.join(request.categories)}",
        alias=alias,
        task_set=task_set(f"bfcl:{','.join(request.categories)}", "test", [one.id for one in answers[names[0]]]),
        judge=f"{PACKAGE} {VERSION}",
        workflow=f"{PACKAGE} ({'tools' if request.tools else 'prompt'})",
        baseline=names[0] if gain else None,
        best=names[-1] if gain and gain.verdict is ComparisonVerdict.BETTER else None,
        gain=gain,
        spent=spent,
        wall_seconds=wall_seconds,
        details={"scores": msgspec.to_builtins(found.scores), "by_category": list(by_category(answers))},
    )


def _spent(version: str, entries: Sequence[Entry], prices: Prices) -> RolloutCost:
    taken = round(sum(entry.prompt_tokens for entry in entries))
    given = round(sum(entry.completion_tokens for entry in entries))
    return RolloutCost(
        rollouts=len(entries), prompt_tokens=taken, completion_tokens=given,
        seconds=sum(entry.seconds for entry in entries), money=prices.money(version, taken, given),
    )  # fmt: skip


def by_category(answers: Mapping[str, Sequence[Entry]]) -> Iterator[dict[str, Any]]:
    """Yield correct and failed entries and the commonest errors by version and category."""
    for name, entries in answers.items():
        for category in dict.fromkeys(entry.category for entry in entries):
            own = [entry for entry in entries if entry.category == category]
            wrong = Counter(entry.error for entry in own if entry.error and not entry.broken)
            yield {
                "version": name, "category": category, "entries": len(own), "right": sum(one.valid for one in own),
                "broken": sum(one.broken is not None for one in own), "errors": dict(wrong.most_common(5)),
            }  # fmt: skip
