"""One evaluation: versions of a model on the same entries of BFCL, through the proxy, compared pair by pair.

Promises: every version is asked the same entries; an entry whose inference broke is a failure, never skipped; calls
name their version, so that they are measurements and never trained. Needs no network beyond the proxy.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ratchet.trainer.statistics.paired_comparison import Compared, Marks, Missing, Ranking, Verdict, rank
from ratchet.tuner.environments.bfcl import PACKAGE, VERSION
from ratchet.tuner.environments.bfcl.virtual_env import EvaluationUnready
from ratchet.tuner.reports.tuning_result import TuningResult, task_set
from ratchet.tuner.rollouts.prices import Prices, RolloutCost

PROGRAM = Path(__file__).with_name("program.py")
# What is in the package and needs neither network nor a second model.
CATEGORIES = (
    "simple_python", "simple_java", "simple_javascript", "multiple", "parallel", "parallel_multiple", "irrelevance",
    "live_simple", "live_multiple", "live_parallel", "live_parallel_multiple", "live_irrelevance", "live_relevance",
    "multi_turn_base", "multi_turn_miss_func", "multi_turn_miss_param", "multi_turn_long_context",
)  # fmt: skip
_LAST_WORDS = 1500  # characters of the program's log that are told where it fails


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of BFCL as one version answered it."""

    id: str
    category: str
    valid: bool
    broken: str | None = None  # why there was no answer
    error: str | None = None  # the package's own class of what was wrong
    prompt_tokens: float = 0.0
    completion_tokens: float = 0.0
    seconds: float = 0.0


class _Found(msgspec.Struct):
    entries: list[Entry]


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """What each version is asked."""

    categories: tuple[str, ...]
    limit: int | None = None  # entries of each category; None: all
    seed: int = 0  # of the sample
    threads: int = 8
    temperature: float = 0.0
    tools: bool = True  # tools in the API's own field; False: in the prompt


def ask(python: Path, model: str, asked: Asked, *, base_url: str, key: str, folder: Path) -> list[Entry]:
    """Run the package on one version; its files and its log stay in the folder. Raises EvaluationUnready."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "log.txt"
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RATCHET_", "PYTHON"))}
    environment = kept | {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": key, "BFCL_PROJECT_ROOT": str(folder)}
    said = json.dumps(msgspec.to_builtins(asked) | {"model": model})
    with log.open("w") as errors:
        done = subprocess.run(
            [str(python), str(PROGRAM)], input=said, stdout=subprocess.PIPE, stderr=errors, text=True,
            env=environment, check=False,
        )  # fmt: skip
    if done.returncode:
        raise EvaluationUnready(f"{PACKAGE} ended with {done.returncode} on {model}: {_last_words(log)}")
    entries = msgspec.json.decode(done.stdout, type=_Found).entries
    if entries and all(entry.broken for entry in entries):
        raise EvaluationUnready(f"no entry could be asked of {model} at {base_url}: {entries[0].broken}; log: {log}")
    return entries


def _last_words(log: Path) -> str:
    return " ".join(log.read_text(errors="replace")[-_LAST_WORDS:].split())


def ranking(answers: Mapping[str, Sequence[Entry]]) -> Ranking:
    """Return the versions by the share of entries that they got right, and every pair of them."""
    return rank({name: _marks(entries) for name, entries in answers.items()})


def _marks(entries: Sequence[Entry]) -> Marks:
    return {one.id: (Missing.FAILED if one.broken else float(one.valid),) for one in entries}


def result(
    alias: str,
    asked: Asked,
    answers: Mapping[str, Sequence[Entry]],
    *,
    found: Ranking,
    wall_seconds: float,
    prices: Prices,
) -> TuningResult:
    """Return the evaluation as the tuner's report reads it: the last version against the first."""
    names = list(answers)
    gain: Compared | None = found.pair(names[-1], names[0]) if len(names) > 1 else None
    spent = sum((_spent(name, entries, prices) for name, entries in answers.items()), RolloutCost())
    return TuningResult(
        method="eval",
        technique=f"BFCL v4, {', '.join(asked.categories)}",
        alias=alias,
        task_set=task_set(f"bfcl:{','.join(asked.categories)}", "test", [one.id for one in answers[names[0]]]),
        judge=f"{PACKAGE} {VERSION}",
        workflow=f"{PACKAGE} ({'tools' if asked.tools else 'prompt'})",
        baseline=names[0] if gain else None,
        best=names[-1] if gain and gain.verdict is Verdict.BETTER else None,
        gain=gain,
        spent=spent,
        wall_seconds=wall_seconds,
        details={"standings": msgspec.to_builtins(found.standings), "by_category": list(by_category(answers))},
    )


def _spent(version: str, entries: Sequence[Entry], prices: Prices) -> RolloutCost:
    taken = round(sum(entry.prompt_tokens for entry in entries))
    given = round(sum(entry.completion_tokens for entry in entries))
    return RolloutCost(
        rollouts=len(entries), prompt_tokens=taken, completion_tokens=given,
        seconds=sum(entry.seconds for entry in entries), money=prices.money(version, taken, given),
    )  # fmt: skip


def by_category(answers: Mapping[str, Sequence[Entry]]) -> Iterator[dict[str, Any]]:
    """Yield, for each version and category, how many entries were right, how many broke and what was wrong most."""
    for name, entries in answers.items():
        for category in dict.fromkeys(entry.category for entry in entries):
            own = [entry for entry in entries if entry.category == category]
            wrong = Counter(entry.error for entry in own if entry.error and not entry.broken)
            yield {
                "version": name, "category": category, "entries": len(own), "right": sum(one.valid for one in own),
                "broken": sum(one.broken is not None for one in own), "errors": dict(wrong.most_common(5)),
            }  # fmt: skip
