"""Budget of a prompt tuning: hard limits of rollouts, and of tokens of the agent and the reflection model together.

Guarantees: no rollout starts beyond the rollout limit; the token limit can be exceeded only by requests in progress, by
the amount that they are larger than every earlier one. The rollouts of the held-out comparison are reserved.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ratchet.trainer.errors import BudgetExceeded

_CHARACTERS_PER_TOKEN = 3  # of a request, before any was measured; a low estimate for English


@dataclass(slots=True)
class Budget:
    """Limits and spending. `tokens` None: no limit; `reserved_rollouts`: for the held-out tasks.

    `concurrency`: with a token limit, at most this many rollouts start before the tokens of earlier ones are known.
    """

    rollouts: int
    tokens: int | None = None
    reserved_rollouts: int = 0
    concurrency: int = 8
    started_rollouts: int = 0
    agent_tokens: int = 0
    reflection_tokens: int = 0
    reflections: int = 0
    cost: float | None = 0.0  # money of the reflections; None: unknown price
    _measured: int = field(default=0, init=False)
    _largest_rollout: int = field(default=0, init=False)
    _largest_reflection: int = field(default=0, init=False)

    @property
    def tokens_spent(self) -> int:
        """Tokens of the agent and the reflection model."""
        return self.agent_tokens + self.reflection_tokens

    def left(self, *, held_out: bool = False) -> int:
        """Return how many more rollouts may start."""
        return max(0, self.rollouts - self.started_rollouts - (0 if held_out else self.reserved_rollouts))

    def allow(self, wanted: int, *, held_out: bool = False) -> int:
        """Return how many of the wanted rollouts may start now. Raises BudgetExceeded if none may.

        A set that exceeds the rollout limit is not started at all.
        """
        if wanted > self.left(held_out=held_out):
            raise BudgetExceeded(
                f"{wanted} rollouts exceed the {self.left(held_out=held_out)} that are left of --max-rollouts"
            )
        if self.tokens is None:
            return wanted
        if not self._measured:
            return 1
        affordable = self._tokens_left(held_out) // max(1, self._largest_rollout)
        if affordable < 1:
            raise BudgetExceeded(
                f"{self.tokens_spent} tokens of --max-total-tokens {self.tokens} are spent or reserved"
            )
        return min(wanted, affordable, self.concurrency)

    def allow_reflection(self, characters: int) -> None:
        """Check that a request of this length is allowed. Raises BudgetExceeded."""
        needed = max(self._largest_reflection, characters // _CHARACTERS_PER_TOKEN)
        if self.tokens is not None and self._tokens_left(False) < needed:
            raise BudgetExceeded(
                f"{self.tokens_spent} tokens of --max-total-tokens {self.tokens} are spent or reserved"
            )

    def record_rollout(self, tokens: int) -> None:
        """Count a started rollout."""
        self.started_rollouts += 1
        self.agent_tokens += tokens
        if tokens:
            self._measured += 1
            self._largest_rollout = max(self._largest_rollout, tokens)

    def record_reflection(self, tokens: int, cost: float | None) -> None:
        """Count one proposal or answer of the reflection model, including its retries."""
        self.reflections += 1
        self.reflection_tokens += tokens
        self.cost = None if cost is None or self.cost is None else self.cost + cost
        self._largest_reflection = max(self._largest_reflection, tokens)

    def _tokens_left(self, held_out: bool) -> int:
        kept = 0 if held_out else self.reserved_rollouts * self.agent_tokens // max(1, self._measured)
        return (self.tokens or 0) - self.tokens_spent - kept
