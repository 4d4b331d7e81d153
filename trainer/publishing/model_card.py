"""A model card from evidence: Markdown with the front matter that model hubs read. Pure.

Says what was trained on what, who judged it, what was decided on which numbers, and the gain with its interval; what is
not known stands there as not known. Texts of others are put on one line and cannot open a heading or a table cell.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

from trainer.learning_report import Gain
from trainer.publishing.evidence import Evidence
from trainer.reasons import LEFT_OUT

_MOST_ROWS = 30  # of one table


def model_card(found: Evidence, *, merged: bool) -> str:
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
        "## What was decided about it\n\n" + "\n".join(_decisions(found)),
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
            f"- {_one_line(family.family)}, real traffic: {before.mean:.3f} (@{before.first_version} to "
            f"@{before.last_version}, {before.count} scores) to {after.mean:.3f} (@{after.first_version} to "
            f"@{after.last_version}, {after.count} scores): {_interval(family.gain)}"
        )
        if family.same_tasks is not None:
            yield f"  - on the {family.same_tasks.count} tasks that came under both: {_interval(family.same_tasks)}"
    own = next((version for version in report.versions if version.version == found.policy.version), None)
    if own is None:
        yield "\nThis version itself has no scores of real traffic."
    else:
        yield f"\nThis version itself: mean score {own.mean:.3f} of {own.count} trajectories."
    yield "\nScores are those of the judges below, not an independent benchmark."


def _decisions(found: Evidence) -> Iterator[str]:
    if not found.decisions:
        yield f"Nothing yet: its state is {found.policy.state}."
        return
    for one in found.decisions:
        yield f"- {_when(one.decided_at)}: {one.action} by {_one_line(one.by)}: {_one_line(one.reason)}"
        for path, value in list(_leaves(one.evidence))[:_MOST_ROWS]:
            yield f"  - {_one_line(path)}: {_one_line(value)}"


def _data(found: Evidence) -> Iterator[str]:
    rounds = found.trained.rounds
    trajectories = sum(int(held.metrics.get("trajectories", 0)) for held in rounds)
    tokens = sum(int(held.metrics.get("tokens_trained", 0)) for held in rounds)
    groups = sum(int(held.metrics.get("groups", 0)) for held in rounds)
    kept = sum(found.trained.judges.values())
    yield (
        f"{trajectories} trajectories in {groups} groups, {tokens} trained tokens: sampled by earlier versions of this "
        "model while agents worked, with the ids and logprobs of the engine."
    )
    if kept != trajectories:
        yield f"\n{kept} of these trajectories are in the store today; the others were deleted since, or never judged."
    if found.trained.families:
        yield "\n| task family | trajectories |\n|---|---|"
        most = sorted(found.trained.families.items(), key=lambda item: -item[1])
        yield from (f"| {_one_line(name)} | {count} |" for name, count in most[:_MOST_ROWS])
    left_out: dict[str, int] = {}
    for held in rounds:
        for reason, count in (held.metrics.get("untrained_tokens") or {}).items():
            left_out[reason] = left_out.get(reason, 0) + count
    if left_out:
        yield "\n| sampled tokens that were left out | why |\n|---|---|"
        yield from (
            f"| {count} | {_one_line(reason)}: {LEFT_OUT.get(reason, '')} |" for reason, count in left_out.items()
        )


def _judges(found: Evidence) -> Iterator[str]:
    if not found.trained.judges:
        yield "Not known: no verdict on the training data is in the store."
        return
    yield "| judge | version (hash of code and rubric) | trajectories |\n|---|---|---|"
    for (name, version), count in sorted(found.trained.judges.items(), key=lambda item: -item[1]):
        yield f"| {_one_line(name)} | `{_one_line(version)}` | {count} |"


def _training(found: Evidence) -> Iterator[str]:
    lora = ", ".join(f"{key} {_one_line(value)}" for key, value in found.lora.items())
    yield f"LoRA: {lora or 'settings not known'}."
    yield "\n| version | round ended | trajectories | reward | loss | entropy | KL to base |\n" + "|---" * 7 + "|"
    for held in found.trained.rounds[-_MOST_ROWS:]:
        told = [_number(held.metrics.get(key)) for key in ("trajectories", "reward", "loss", "entropy", "kl")]
        yield f"| {held.to_version} | {_when(held.ended_at or held.started_at)} | {' | '.join(told)} |"
    if len(found.trained.rounds) > _MOST_ROWS:
        yield f"\nThe newest {_MOST_ROWS} of {len(found.trained.rounds)} rounds."
    yield "\nMade with: " + ", ".join(f"{name} {version}" for name, version in found.versions.items()) + "."


def _licences(found: Evidence) -> Iterator[str]:
    known = f"{_one_line(found.base_license)}, as its own card says" if found.base_license else "not known here"
    yield f"- Base model: {known}. What is made from it must keep to its terms."
    yield "- Training data: not known. It is the traffic of the agents that used this model; whoever runs them knows."


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
    """Return text that stays where it is put: one line, no cell border, no code or markup of its own."""
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    plain = "".join(char if char.isprintable() else " " for char in text)
    return plain.replace("|", "/").replace("`", "'").replace("<", "&lt;")[:300]
