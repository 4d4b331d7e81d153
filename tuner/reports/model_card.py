"""A model card from evidence: Markdown with the front matter that model hubs read. Pure.

Says what was trained on what, who judged it, what was decided on which numbers, and the gain with its interval; what is
not known stands there as not known. Texts of others are put on one line and cannot open a heading or a table cell.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from ratchet.store.reasons import UNTRAINED
from ratchet.store.records import Round
from ratchet.store.records.tuning import Prompt
from ratchet.store.reports.learning_comparison import Gain
from ratchet.tuner.reports.version_evidence import Evidence

_MOST_ROWS = 30  # of one table
_WARM_START = "warm_start"  # key of a round's metrics


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
        *(["## System prompt\n\n" + "\n".join(_prompt(found.prompt))] if found.prompt else []),
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
    for one in found.evaluations[:_MOST_ROWS]:
        if one.gain is not None:
            tasks = f"{one.task_set.tasks} tasks of {_one_line(one.task_set.source)}, judged by {_one_line(one.judge)}"
            sides = f"{_one_line(one.gain.candidate)} against {_one_line(one.gain.against)}"
            yield f"- {_one_line(one.technique)} ({tasks}): {sides}: {one.gain.describe()}: {one.gain.verdict}"


def _prompt(prompt: Prompt) -> Iterator[str]:
    yield (
        f"What was measured is this model with a system prompt ({prompt.mode}), which the proxy swaps in. It is not in "
        "the weights: whoever serves the model elsewhere must send it."
    )
    for family, text in {"": prompt.text, **prompt.families}.items():
        if text:
            yield (f"\nFor tasks of {_one_line(family)}:" if family else "") + "\n" + _indented(text)


def _indented(text: str) -> str:
    """Return a text as it is, as Markdown's code: indented, so that nothing in it can end it."""
    return "\n".join(f"    {line}" for line in text.splitlines())


def _decisions(found: Evidence) -> Iterator[str]:
    if not found.decisions:
        yield f"Nothing yet: its state is {found.policy.state}."
        return
    for one in found.decisions:
        yield f"- {_when(one.decided_at)}: {one.action} by {_one_line(one.decided_by)}: {_one_line(one.reason)}"
        for path, value in list(_leaves(one.evidence))[:_MOST_ROWS]:
            yield f"  - {_one_line(path)}: {_one_line(value)}"


def _data(found: Evidence) -> Iterator[str]:
    rewarded = [held for held in found.trained.rounds if _WARM_START not in held.metrics]
    imitated = [held.metrics[_WARM_START] for held in found.trained.rounds if _WARM_START in held.metrics]
    for told in imitated:
        sources = ", ".join(f"{count} {_one_line(name)}" for name, count in told["by_source"].items())
        yield (
            f"{told['trajectories']} trajectories ({sources}) were imitated in a warm start, beside "
            f"{told['general_rows']} rows of general chat data.\n"
        )
    trajectories, groups, tokens = (_sum(rewarded, key) for key in ("trajectories", "groups", "tokens_trained"))
    yield (
        f"{trajectories} trajectories in {groups} groups, {tokens} trained tokens: sampled by earlier versions of this "
        "model while agents worked, with the ids and logprobs of the engine."
    )
    judged, learnt = sum(found.trained.judges.values()), trajectories + sum(told["trajectories"] for told in imitated)
    if judged != learnt:
        yield f"\n{judged} of these are in the store with a verdict; the others were deleted, or have none."
    if found.trained.families:
        yield "\n| task family | trajectories |\n|---|---|"
        most = sorted(found.trained.families.items(), key=lambda item: -item[1])
        yield from (f"| {_one_line(name)} | {count} |" for name, count in most[:_MOST_ROWS])
    yield from _left_out(found)


def _sum(rounds: Sequence[Round], key: str) -> int:
    return sum(int(held.metrics.get(key, 0)) for held in rounds)


def _left_out(found: Evidence) -> Iterator[str]:
    counts: Counter[str] = Counter()
    for held in found.trained.rounds:
        counts.update(held.metrics.get("untrained_tokens") or {})
    if counts:
        yield "\n| sampled tokens that were left out | why |\n|---|---|"
        yield from (f"| {count} | {_one_line(name)}: {UNTRAINED.get(name, '')} |" for name, count in counts.items())


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
