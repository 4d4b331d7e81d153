"""Evidence for a version from the store: its training data, judges, decisions and gain. Unknown facts are None."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ratchet.store.policies.decisions import Decision
from ratchet.store.records import Policy
from ratchet.store.records.tuning import Prompt, Tuning
from ratchet.store.reports.learning_report import LearningReport, learning_report, relative_report, tallies
from ratchet.store.reports.relative_judges import is_relative
from ratchet.store.states import TuningState
from ratchet.store.store import Store
from ratchet.store.training.lineage import TrainingData
from ratchet.tuner.reports.tuning_result import TuningResult, read

_SCORES = 100_000  # newest scores used for the gain
_TUNINGS = 1000  # newest runs that are searched


@dataclass(frozen=True, slots=True)
class Evidence:
    """The content of a model card.

    base_model       its hub name, or its folder's name
    trained          the rounds behind the version, and their trajectories by family and by judge
    prompt           the system prompt of this version, which the proxy applies
    evaluations      comparisons of this version with others, newest first
    decisions        about this version, oldest first
    gain             scores of live traffic before and after, up to this version
    base_license     from the base model's card; None: unknown
    lora             the adapter's settings, such as r and lora_alpha
    """

    policy: Policy
    base_model: str
    base_license: str | None
    trained: TrainingData
    prompt: Prompt | None
    evaluations: Sequence[TuningResult]
    decisions: Sequence[Decision]
    gain: LearningReport
    lora: Mapping[str, Any]
    versions: Mapping[str, str]


def gather(
    store: Store, policy: Policy, base_model: str, versions: Mapping[str, str], adapter: Path | None = None
) -> Evidence:
    """Return the evidence for a version; `versions`: package versions of the exporting program.

    `adapter` is a local folder with the version's files, if they are in object storage.
    """
    folder = adapter or (Path(policy.adapter) if policy.adapter else None)
    judge = store.groups.newest_judge_version(policy.alias)
    scores = store.groups.past_scores(policy.alias, judge, limit=_SCORES) if judge else []
    return Evidence(
        policy=policy,
        base_model=Path(base_model).name if Path(base_model).is_absolute() else base_model,
        base_license=_license(Path(base_model)),
        trained=store.lineage.training_data_of(policy),
        prompt=store.prompts.get(policy.prompt_id) if policy.prompt_id else None,
        evaluations=_evaluations(store, f"{policy.alias}@{policy.version}"),
        decisions=store.decisions.decisions_of(policy.alias, policy.version)[::-1],
        gain=(
            relative_report()
            if is_relative(store, policy.alias, judge)
            else learning_report(tallies([one for one in scores if one.version <= policy.version]))
        ),
        lora=_lora(folder) if folder else {},
        versions=versions,
    )


def _evaluations(store: Store, name: str) -> list[TuningResult]:
    done = (one for one in store.tunings.page(limit=_TUNINGS) if one.state is TuningState.DONE)
    found = [result for one in done if (result := _result(one)) is not None]
    return [one for one in found if one.gain is not None and name in (one.gain.candidate, one.gain.against)]


def _result(done: Tuning) -> TuningResult | None:
    """Return the result of a run; None for runs without one, such as the doctor's."""
    try:
        return read(done.result or {})
    except msgspec.ValidationError:
        return None


def _lora(adapter: Path) -> Mapping[str, Any]:
    try:
        content = json.loads((adapter / "adapter_config.json").read_text())
    except (OSError, ValueError):
        return {}
    return {key: content.get(key) for key in ("r", "lora_alpha", "target_modules") if content.get(key)}


def _license(folder: Path) -> str | None:
    """Return the license in the front matter of a model folder's README.md."""
    try:
        head, _, rest = (folder / "README.md").read_text().removeprefix("---\n").partition("\n---")
    except (OSError, ValueError):
        return None
    named = [line.partition(":")[2].strip() for line in head.splitlines() if line.startswith("license:")]
    return named[0] if named and rest else None
