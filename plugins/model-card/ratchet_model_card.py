"""Model cards: Markdown with the front matter of model hubs, from what the store knows of a version.

The card lists training data, judges, decisions with their figures, and the gain with its interval; unknown facts are
marked as not known. Text from other sources is put on one line and cannot open a heading or a table cell.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from ratchet.store.operation_records import Tuning
from ratchet.store.reasons import UNTRAINED
from ratchet.store.records import Decision, Policy, Prompt, Round
from ratchet.store.reports.learning_report import (
    Gain,
    LearningReport,
    is_relative,
    learning_report,
    relative_report,
    tallies,
)
from ratchet.store.states import TuningState
from ratchet.store.store import Store
from ratchet.store.training.rounds import TrainingData
from ratchet.tuner.reports import TuningResult, read

_MAX_ROWS = 30  # per table
_WARM_START = "warm_start"  # key of a round's metrics
_SCORES = 100_000  # newest scores used for the gain
_TUNINGS = 1000  # newest runs that are searched


def model_card(
    store: Store, policy: Policy, base_model: str, versions: Mapping[str, str], adapter: Path | None, *, merged: bool
) -> str:
    """Return the card of a version as a merged model, or as the adapter alone.

    versions  package versions of the exporting program
    adapter   a local folder with the version's files, if they are in object storage
    """
    return card_of(gather(store, policy, base_model, versions, adapter), merged=merged)


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


def card_of(found: Evidence, *, merged: bool) -> str:
    """Return the card of a merged model, or of the adapter alone."""
    name = f"{found.policy.alias}@{found.policy.version}"
    form = (
        "The adapter is merged into the base model: it loads like any model."
        if merged
        else "This is the LoRA adapter alone: it is loaded on top of the base model."
    )
    sections = [
        _front_matter(found, merged),
        f"# {_one_line(name)}\n\nA LoRA adapter of `{_one_line(found.base_model)}`, trained by reinforcement learning "
        f"on recorded traffic by Ratchet. {form}",
        "## Gain\n\n" + "\n".join(_gain(found)),
        *(["## System prompt\n\n" + "\n".join(_prompt(found.prompt))] if found.prompt else []),
        "## Release decisions\n\n" + "\n".join(_decisions(found)),
        "## Training data\n\n" + "\n".join(_data(found)),
        "## Judges\n\n" + "\n".join(_judges(found)),
        "## Training\n\n" + "\n".join(_training(found)),
        "## Licences\n\n" + "\n".join(_licences(found)),
    ]
    return "\n\n".join(sections) + "\n"


def _front_matter(found: Evidence, merged: bool) -> str:
    license_name = json.dumps(found.base_license or "unknown")
    library = "transformers" if merged else "peft"
    return (
        f"---\nlicense: {license_name}\nbase_model: {json.dumps(found.base_model)}\nlibrary_name: {library}\n"
        "pipeline_tag: text-generation\ntags:\n- lora\n- reinforcement-learning\n- ratchet\n---"
    )


def _gain(found: Evidence) -> Iterator[str]:
    report = found.gain
    if not report.families:
        yield f"Not known: {report.missing}."
    for family in report.families:
        before, after = family.before, family.after
        yield (
            f"- {_one_line(family.family)}, live traffic: {before.mean:.3f} (@{before.first_version} to "
            f"@{before.last_version}, {before.count} scores) to {after.mean:.3f} (@{after.first_version} to "
            f"@{after.last_version}, {after.count} scores): {_interval(family.gain)}"
        )
        if family.same_tasks is not None:
            yield f"  - on the {family.same_tasks.count} tasks that were run under both: {_interval(family.same_tasks)}"
    own = next((version for version in report.versions if version.version == found.policy.version), None)
    if own is None:
        yield "\nThis version itself has no scores of live traffic."
    else:
        yield f"\nThis version itself: mean score {own.mean:.3f} of {own.count} trajectories."
    yield "\nScores are those of the judges below, not an independent benchmark."
    for one in found.evaluations[:_MAX_ROWS]:
        if one.gain is not None:
            tasks = f"{one.task_set.tasks} tasks of {_one_line(one.task_set.source)}, judged by {_one_line(one.judge)}"
            sides = f"{_one_line(one.gain.candidate)} against {_one_line(one.gain.against)}"
            yield f"- {_one_line(one.technique)} ({tasks}): {sides}: {one.gain.describe()}: {one.gain.verdict}"


def _prompt(prompt: Prompt) -> Iterator[str]:
    yield (
        f"The measurements used this model with a system prompt ({prompt.mode}) that the proxy applies. It is not part "
        "of the weights: send it if you serve the model elsewhere."
    )
    for family, text in {"": prompt.text, **prompt.families}.items():
        if text:
            yield (f"\nFor tasks of {_one_line(family)}:" if family else "") + "\n" + _indented(text)


def _indented(text: str) -> str:
    """Return a text as indented Markdown code, which its content cannot end."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def _decisions(found: Evidence) -> Iterator[str]:
    if not found.decisions:
        yield f"None yet; the state is {found.policy.state}."
        return
    for one in found.decisions:
        yield f"- {_when(one.decided_at)}: {one.action} by {_one_line(one.decided_by)}: {_one_line(one.reason)}"
        for path, value in list(_leaves(one.evidence))[:_MAX_ROWS]:
            yield f"  - {_one_line(path)}: {_one_line(value)}"


def _data(found: Evidence) -> Iterator[str]:
    rewarded = [one for one in found.trained.rounds if _WARM_START not in one.metrics]
    imitated = [one.metrics[_WARM_START] for one in found.trained.rounds if _WARM_START in one.metrics]
    for adapter in (one.metrics["init_adapter"] for one in found.trained.rounds if "init_adapter" in one.metrics):
        yield f"Training started from the adapter {_one_line(adapter)}, whose data is not in this store.\n"
    for metrics in imitated:
        sources = ", ".join(f"{count} {_one_line(name)}" for name, count in metrics["by_source"].items())
        yield (
            f"{metrics['trajectories']} trajectories ({sources}) were used for an SFT warm start, with "
            f"{metrics['general_rows']} rows of general chat data.\n"
        )
    trajectories, groups, tokens = (_sum(rewarded, key) for key in ("trajectories", "groups", "tokens_trained"))
    yield (
        f"{trajectories} trajectories in {groups} groups, {tokens} trained tokens: sampled by earlier versions of this "
        "model in production, with token ids and logprobs of the inference engine."
    )
    judged, learnt = (
        sum(found.trained.judges.values()),
        trajectories + sum(metrics["trajectories"] for metrics in imitated),
    )
    if judged != learnt:
        yield f"\n{judged} of these are in the store with a verdict; the others were deleted or have none."
    if found.trained.families:
        yield "\n| task family | trajectories |\n|---|---|"
        most = sorted(found.trained.families.items(), key=lambda item: -item[1])
        yield from (f"| {_one_line(name)} | {count} |" for name, count in most[:_MAX_ROWS])
    yield from _untrained(found)


def _sum(rounds: Sequence[Round], key: str) -> int:
    return sum(int(one.metrics.get(key, 0)) for one in rounds)


def _untrained(found: Evidence) -> Iterator[str]:
    counts: Counter[str] = Counter()
    for one in found.trained.rounds:
        counts.update(one.metrics.get("untrained_tokens") or {})
    if counts:
        yield "\n| untrained sampled tokens | reason |\n|---|---|"
        yield from (f"| {count} | {_one_line(name)}: {UNTRAINED.get(name, '')} |" for name, count in counts.items())


def _judges(found: Evidence) -> Iterator[str]:
    if not found.trained.judges:
        yield "Not known: the store has no verdict on the training data."
        return
    yield "| judge | version (hash of code and rubric) | trajectories |\n|---|---|---|"
    for (name, version), count in sorted(found.trained.judges.items(), key=lambda item: -item[1]):
        yield f"| {_one_line(name)} | `{_one_line(version)}` | {count} |"


def _training(found: Evidence) -> Iterator[str]:
    lora = ", ".join(f"{key} {_one_line(value)}" for key, value in found.lora.items())
    yield f"LoRA: {lora or 'settings not known'}."
    yield "\n| version | round ended | trajectories | reward | loss | entropy | KL to base |\n" + "|---" * 7 + "|"
    for one in found.trained.rounds[-_MAX_ROWS:]:
        cells = [_number(one.metrics.get(key)) for key in ("trajectories", "reward", "loss", "entropy", "kl")]
        yield f"| {one.to_version} | {_when(one.ended_at or one.started_at)} | {' | '.join(cells)} |"
    if len(found.trained.rounds) > _MAX_ROWS:
        yield f"\nThe newest {_MAX_ROWS} of {len(found.trained.rounds)} rounds."
    yield "\nMade with: " + ", ".join(f"{name} {version}" for name, version in found.versions.items()) + "."


def _licences(found: Evidence) -> Iterator[str]:
    known = f"{_one_line(found.base_license)}, as stated by its card" if found.base_license else "not known here"
    yield f"- Base model: {known}. Derived models must comply with its terms."
    yield "- Training data: not known. It is the traffic of the agents that used this model."


def _interval(gain: Gain) -> str:
    return f"{gain.value:+.3f} (95% {gain.low:+.3f} to {gain.high:+.3f}): {gain.verdict}"


def _leaves(content: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in content.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", value


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "not known"


def _when(moment: float) -> str:
    return datetime.fromtimestamp(moment, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _one_line(value: Any) -> str:
    """Return text on one line without table borders, code or markup."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    plain = "".join(char if char.isprintable() else " " for char in text)
    return plain.replace("|", "/").replace("`", "'").replace("<", "&lt;")[:300]


def gather(
    store: Store, policy: Policy, base_model: str, versions: Mapping[str, str], adapter: Path | None = None
) -> Evidence:
    """Return the evidence for a version; unknown facts are None. The parameters are those of `model_card`."""
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
