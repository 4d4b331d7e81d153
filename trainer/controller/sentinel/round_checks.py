"""Checks of the last rounds: trainer and engine agree, most tokens were trained, and few rows rejected. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ratchet.store.reasons import describe_untrained
from ratchet.store.records import Round
from ratchet.store.reports.learning_report import rejected_rows
from ratchet.store.states import RoundState
from ratchet.trainer.observability.finding import Finding
from ratchet.trainer.rows.roles import UNTRAINED_ROLE
from ratchet.trainer.settings.sentinel_settings import SentinelSettings

CHECKS = frozenset({"logprob_mismatch", "untrained_tokens", "rows_rejected"})
MAX_ROUNDS = 5  # committed ones


def check_rounds(rounds: Sequence[Round], settings: SentinelSettings) -> list[Finding]:
    """Return the findings of the newest committed rounds; none before the first commit. `rounds`: newest first."""
    committed = [one for one in rounds if one.state is RoundState.COMMITTED][:MAX_ROUNDS]
    if not committed:
        return []
    return [_check_mismatch(committed, settings), _check_untrained(committed, settings), _check_rejected(committed[0])]


def _check_mismatch(committed: Sequence[Round], settings: SentinelSettings) -> Finding:
    """Compare what the version sampled that a round starts from: the samples of older ones differ anyway."""
    tokens = [one.metrics.get("fresh_tokens_compared", 0) for one in committed]
    differences = [one.metrics.get("fresh_logprob_abs_diff_mean", 0.0) for one in committed]
    mean = sum(value * count for value, count in zip(differences, tokens, strict=True)) / max(1, sum(tokens))
    reason = None
    if mean >= settings.max_mismatch_nats:
        reason = (
            f"the trainer's logprobs differ from the engine's by {mean:.3f} nats (mean of {sum(tokens)} tokens of "
            f"the last {len(committed)} rounds, sampled by the versions that they started from): check that both run "
            "the same weights, dtype and --logprobs-mode processed_logprobs"
        )
    return Finding("logprob_mismatch", "ratchet_logprob_mismatch_nats", "", mean, reason)


def _check_untrained(committed: Sequence[Round], settings: SentinelSettings) -> Finding:
    untrained: Counter[str] = Counter()
    for one in committed:
        untrained.update(one.metrics.get("untrained_tokens") or {})
    del untrained[UNTRAINED_ROLE]  # by configuration
    trained = sum(one.metrics.get("tokens_trained", 0) for one in committed)
    share = untrained.total() / max(1, untrained.total() + trained)
    reason = None
    if share >= settings.max_untrained_ratio:
        reason = (
            f"{share:.0%} of the sampled tokens of the last {len(committed)} rounds were not trained; "
            f"{describe_untrained(untrained)}"
        )
    return Finding("untrained_tokens", "ratchet_untrained_token_ratio", "", share, reason)


def _check_rejected(newest: Round) -> Finding:
    found = rejected_rows(newest.metrics)
    share, reason = (found.share, found.alarm_reason()) if found is not None else (0.0, None)
    return Finding("rows_rejected", "ratchet_rejected_row_ratio", "", share, reason)
