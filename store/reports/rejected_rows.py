"""Rejected rows of a round: sampled by a policy too far from the one that is trained; how many, why, and what helps.

Rejected rows leave the loss and its denominator, so a round that loses many of them trains on few tokens, chosen by how
far the policy moved. `ratchet status`, the console and the sentinel's alarm show them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MAX_SHARE = 0.25  # of the rows of a round; more is an alarm


@dataclass(frozen=True, slots=True)
class RejectedRows:
    """The rejected rows of a round. The mismatches are means of |trainer - vLLM| logprobs, nats a token."""

    rejected: int
    rows: int
    mismatch: float
    fresh_mismatch: float | None  # of rows that the version sampled from which the round started; None without any

    @property
    def share(self) -> float:
        """Share of the round's rows."""
        return self.rejected / self.rows

    def describe(self) -> str:
        """Return it in one clause."""
        return f"{self.rejected} of {self.rows} rows rejected" + (f" ({self.share:.0%})" if self.rejected else "")

    def alarm_reason(self) -> str | None:
        """Return why it is an alarm, with the remedies; None if it is not."""
        if self.share <= MAX_SHARE:
            return None
        fresh = "there are none" if self.fresh_mismatch is None else f"{self.fresh_mismatch:.3f}"
        return (
            f"{self.describe()} in the newest round: the policy that sampled them is too far from the one that is "
            f"trained. Logprobs of all rows differ by {self.mismatch:.3f} nats a token, those of rows that the round's "
            f"own first version sampled by: {fresh}. If the two are alike, vLLM and the learner compute differently: "
            "check vllm.dtype, learner.dtype and the base model. Else rows are old or steps too large: release or "
            "discard the versions that wait (`ratchet status` names them), or lower learner.learning_rate. "
            "learner.sequence_mask_threshold is the limit"
        )


def rejected_rows(metrics: Mapping[str, Any]) -> RejectedRows | None:
    """Return the rejected rows of a round, from its metrics; None if they were not counted."""
    rows, rejected = metrics.get("rows"), metrics.get("rows_rejected")
    if not rows or rejected is None:
        return None
    fresh = metrics.get("fresh_logprob_abs_diff_mean") if metrics.get("fresh_tokens_compared") else None
    return RejectedRows(int(rejected), int(rows), float(metrics.get("logprob_abs_diff_mean", 0.0)), fresh)
