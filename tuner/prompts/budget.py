"""What a prompt tuning may cost: rollouts and tokens, the agent's and the reflection model's, both hard limits.

Promises: no rollout begins that the rollout limit does not allow; of the tokens, only what is under way when they end
may go over, by as much as it is larger than every rollout or reflection before it. What the held-out comparison needs
is kept back.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ratchet.trainer.errors import BudgetExceeded

_CHARACTERS_PER_TOKEN = 3  # of a question, when nothing was measured: on the safe side for English


@dataclass(slots=True)
class Budget:
    """The limits and what is spent. `tokens` None is no limit; `reserved_rollouts` rollouts are for the held-out tasks.

    `concurrency`: with a limit of tokens no more rollouts are allowed before it is known what the last ones took.
    """

    rollouts: int
    tokens: int | None = None
    reserved_rollouts: int = 0
    concurrency: int = 8
    begun: int = 0
    agent_tokens: int = 0
    reflection_tokens: int = 0
    reflections: int = 0
    cost: float | None = 0.0  # money of the reflections, None where a price is unknown
    _measured: int = field(default=0, init=False)
    _largest_rollout: int = field(default=0, init=False)
    _largest_reflection: int = field(default=0, init=False)

    @property
    def tokens_spent(self) -> int:
        """Tokens of both."""
        return self.agent_tokens + self.reflection_tokens

    def left(self, *, held_out: bool = False) -> int:
        """Return how many rollouts may still begin."""
        return max(0, self.rollouts - self.begun - (0 if held_out else self.reserved_rollouts))

    def allow(self, wanted: int, *, held_out: bool = False) -> int:
        """Return how many of the wanted rollouts may run at once. Raises BudgetExceeded where it is none of them.

        A set that the rollout limit does not allow as a whole is not begun.
        """
        if wanted > self.left(held_out=held_out):
            raise BudgetExceeded(
                f"{wanted} rollouts are more than the {self.left(held_out=held_out)} of --max-rollouts left"
            )
        if self.tokens is None:
            return wanted
        if not self._measured:
            return 1
        room = self._tokens_left(held_out) // max(1, self._largest_rollout)
        if room < 1:
            raise BudgetExceeded(
                f"{self.tokens_spent} tokens of --max-total-tokens {self.tokens} are spent or kept back"
            )
        return min(wanted, room, self.concurrency)

    def allow_reflection(self, characters: int) -> None:
        """Allow one question of so many characters. Raises BudgetExceeded."""
        needed = max(self._largest_reflection, characters // _CHARACTERS_PER_TOKEN)
        if self.tokens is not None and self._tokens_left(False) < needed:
            raise BudgetExceeded(
                f"{self.tokens_spent} tokens of --max-total-tokens {self.tokens} are spent or kept back"
            )

    def record_rollout(self, tokens: int) -> None:
        """Count a rollout that began."""
        self.begun += 1
        self.agent_tokens += tokens
        if tokens:
            self._measured += 1
            self._largest_rollout = max(self._largest_rollout, tokens)

    def record_reflection(self, tokens: int, cost: float | None) -> None:
        """Count one proposal or answer of the reflection model, with all its tries."""
        self.reflections += 1
        self.reflection_tokens += tokens
        self.cost = None if cost is None or self.cost is None else self.cost + cost
        self._largest_reflection = max(self._largest_reflection, tokens)

    def _tokens_left(self, held_out: bool) -> int:
        kept = 0 if held_out else self.reserved_rollouts * self.agent_tokens // max(1, self._measured)
        return (self.tokens or 0) - self.tokens_spent - kept
