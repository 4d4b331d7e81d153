"""Agreement: does a second judge, asked about a sample of groups, order their members as the first one does? Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ratchet.trainer.controller.judges.audit.calibration import differences, kendall
from ratchet.trainer.observability.finding import Finding
from ratchet.trainer.settings.sentinel_settings import SentinelSettings

CHECK = "second_judge"
_METRIC = "ratchet_second_judge_tau"
_LEAST_GROUPS = 20


@dataclass(frozen=True, slots=True)
class PairedJudgements:
    """What both judges said of one group, scores by trajectory; `second` is None where the second judge failed."""

    group_id: str
    first: Mapping[str, float]
    second: Mapping[str, float] | None


def agreement(heard: Sequence[PairedJudgements], judge: str, settings: SentinelSettings) -> list[Finding]:
    """Return Kendall's tau-b between the two judges over the newest groups; nothing before there is one."""
    told = [(one.first, one.second) for one in heard if one.second is not None]
    if len(heard) >= _LEAST_GROUPS and 2 * len(told) < len(heard):
        failed = f"second judge {judge} failed on {len(heard) - len(told)} of the last {len(heard)} groups"
        return [Finding(CHECK, "", "", 0.0, failed)]
    tau = kendall([pair for first, second in told for pair in differences(first, second)])
    if tau is None:
        return []
    reason = None
    if len(told) >= _LEAST_GROUPS and tau < settings.min_agreement:
        reason = (
            f"second judge {judge} orders the members of the last {len(told)} groups otherwise (Kendall's tau "
            f"{tau:+.2f}, at least {settings.min_agreement:g} is wanted; newest group {heard[-1].group_id}): one of "
            "the two is fooled; compare them with `ratchet judge calibrate`"
        )
    return [Finding(CHECK, _METRIC, "", tau, reason, doubts=reason is not None)]
