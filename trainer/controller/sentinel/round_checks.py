"""What the last rounds tell of themselves: trainer and engine agree, and most sampled tokens were trained. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ratchet.store.reasons import describe_untrained
from ratchet.store.records import Round
from ratchet.store.states import RoundState
from ratchet.trainer.observability.finding import Finding
from ratchet.trainer.rows.roles import UNTRAINED_ROLE
from ratchet.trainer.settings.sentinel_settings import SentinelSettings

CHECKS = frozenset({"mismatch", "untrained_tokens"})
LOOKED_AT = 5  # committed rounds


def last_rounds(rounds: Sequence[Round], settings: SentinelSettings) -> list[Finding]:
    """Return the findings of the newest committed rounds, newest first; none before the first one."""
    held = [one for one in rounds if one.state is RoundState.COMMITTED][:LOOKED_AT]
    return [_mismatch(held, settings), _left_out(held, settings)] if held else []


def _mismatch(held: Sequence[Round], settings: SentinelSettings) -> Finding:
    tokens = [one.metrics.get("tokens_compared", 0) for one in held]
    gaps = [one.metrics.get("logprob_abs_diff_mean", 0.0) for one in held]
    mean = sum(gap * count for gap, count in zip(gaps, tokens, strict=True)) / max(1, sum(tokens))
    reason = None
    if mean >= settings.max_mismatch_nats:
        reason = (
            f"the trainer's logprobs differ from the engine's by {mean:.3f} nats (mean of {sum(tokens)} tokens of "
            f"the last {len(held)} rounds): check that both run the same weights, dtype and "
            "--logprobs-mode processed_logprobs"
        )
    return Finding("mismatch", "ratchet_logprob_mismatch_nats", "", mean, reason)


def _left_out(held: Sequence[Round], settings: SentinelSettings) -> Finding:
    untrained: Counter[str] = Counter()
    for one in held:
        untrained.update(one.metrics.get("untrained_tokens") or {})
    del untrained[UNTRAINED_ROLE]  # somebody chose that
    trained = sum(one.metrics.get("tokens_trained", 0) for one in held)
    share = untrained.total() / max(1, untrained.total() + trained)
    reason = None
    if share >= settings.max_untrained_ratio:
        reason = (
            f"{share:.0%} of the sampled tokens of the last {len(held)} rounds were not trained; "
            f"{describe_untrained(untrained)}"
        )
    return Finding("untrained_tokens", "ratchet_untrained_token_ratio", "", share, reason)
