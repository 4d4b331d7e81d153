"""LearnerHost: a base model loaded once, and the state of any number of agents, swapped in place.

Promises: a learner resumed from a checkpoint is bitwise the one that never stopped (same machine, same settings); a
checkpoint is complete or absent; an agent's weights and logprobs are bitwise what they would be without the others.
The host sees ids, masks, logprobs, advantages and temperatures; it does not group, judge, select rows or serve. It is
not thread-safe. In a launch of several processes each calls the same methods with the same arguments, and rank zero
alone reads and writes checkpoints. Torch is imported when a host is created.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ratchet.trainer.adapters import checkpoint
from ratchet.trainer.errors import LearnerServiceError, OutOfMemory, SettingError
from ratchet.trainer.learner_api import AgentHost, ModelLimits, RoundReport
from ratchet.trainer.rows.token_row import TokenRow
from ratchet.trainer.settings.learner_settings import AUTO, LearnerProcessSettings, LearnerSettings, with_shared

if TYPE_CHECKING:
    from ratchet.trainer.learner.agent_state import AgentState
    from ratchet.trainer.learner.loss import RecordedGRPOTrainer


# Settings that shape the adapters or the base model's numbers: an agent cannot have others than its learner.
_SHAPING = ("lora_r", "target_modules", "exclude_modules", "quantization", "dtype")


class LearnerHost(AgentHost):
    """`base_model` is a folder or a hub name.

    Raises ModelError or SettingError. If a method raises an error while an agent trains, that agent's
    state is undefined until it is opened again; the others are not affected.
    """

    def __init__(
        self,
        base_model: str,
        process: LearnerProcessSettings,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        # huggingface_hub reads the variable at its first import.
        os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
        # The learner often shares its cores with vLLM: waiting OpenMP threads must not spin.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

        import torch

        from ratchet.trainer.learner import gpu_memory, lora, process_group

        gpu_memory.extend_segments()
        if process.threads is not None:
            torch.set_num_threads(process.threads)
        process_group.join(alone=process.sharding != "none")
        gpu_memory.limit(process.gpu_memory_utilization)
        self._base_model = base_model
        self._process = process
        self._clock = clock
        self.trainer = lora.build(base_model, with_shared(LearnerSettings(), process), process.sharding)
        self.on_rows: Callable[[int], None] = lambda rows: None
        self._agents: dict[str, AgentState] = {}
        self._installed: str | None = None  # the agent whose state the trainer holds
        self.limits = _limits(self.trainer)

    def open(self, agent: str, settings: LearnerSettings, resume_from: Path | None) -> int:
        """Take the state of a checkpoint for the agent, or of a new adapter (None); return its optimizer steps.

        A new adapter has the weights of `settings.init_adapter`, if that is set. A checkpoint that is a copied adapter
        without a learner's state starts with a new optimizer.

        Replaces the agent's earlier state, if there is one, and leaves it as it is if an error is raised: SettingError
        for settings of another adapter than the learner's, CheckpointDamaged, CheckpointError.
        """
        from ratchet.trainer.learner import agent_state, checkpoint_state
        from ratchet.trainer.learner.initial_adapter import is_adapter_only, with_adapter

        settings = self._checked(settings)
        initial = None if settings.init_adapter is None else Path(settings.init_adapter)
        if resume_from is not None:
            initial = resume_from if is_adapter_only(resume_from) else None
        shapes = {name: parameter.shape for name, parameter in self.trainer.lora_parameters().items()}
        saved = (
            None
            if resume_from is None or initial is not None
            else checkpoint_state.shared(lambda: checkpoint_state.read(resume_from, settings, shapes))
        )
        if saved is None or self._installed != agent:
            self._park()
        if saved is not None:
            state = checkpoint_state.resumed(self.trainer, settings, saved)
            self._installed = None  # what the trainer holds of this agent is replaced
        else:
            state = agent_state.new_state(self.trainer, settings)
        if initial is not None:
            state = with_adapter(self.trainer, state, initial, self._base_model)
        self._agents[agent] = state
        self._install(agent)
        return state.step

    def train_round(self, agent: str, rows: Sequence[TokenRow], rate_scale: float = 1.0) -> RoundReport:
        """Train the agent on the rows once, with `rate_scale` times its learning rate.

        Raises NoLearningSignal if no row could
        change a weight and RowError if a row does not fit the model, both before any change; TrainingDiverged if a
        gradient is not finite; OutOfMemory.
        """
        from ratchet.trainer.learner import gpu_memory

        state = self._install(agent)
        self.trainer.on_rows = self.on_rows
        try:
            return self._train(state, rows, rate_scale)
        except (RuntimeError, MemoryError) as error:
            if not gpu_memory.is_out_of_memory(error):
                raise
            raise OutOfMemory(
                f"out of memory in a round of {len(rows)} rows of up to {max(len(row.ids) for row in rows)} tokens: "
                f"lower learner.token_budget (now {state.settings.token_budget}), "
                "set learner.gradient_checkpointing, or give the trainer more memory"
            ) from error
        finally:
            gpu_memory.give_back(self._process.gpu_memory_utilization)

    def _train(self, state: AgentState, rows: Sequence[TokenRow], rate_scale: float) -> RoundReport:
        from ratchet.trainer.learner.training_round import TrainingRound

        return TrainingRound(self.trainer, self.limits, state, self._clock).train(rows, rate_scale)

    def score(
        self, agent: str, rows: Sequence[TokenRow | Sequence[int]], *, adapter: bool | Path = True
    ) -> list[tuple[float, ...]]:
        """Return the logprobs at temperature 1 of all tokens of each sequence, (T,) each; the first token's is 0.0.

        `adapter`: True for the agent's, False for the base model, or a folder written by `save`. Raises RowError if a
        sequence does not fit the model, CheckpointDamaged, CheckpointError.
        """
        from ratchet.trainer.learner import training_round

        self._install(agent)
        return training_round.score(self.trainer, self.limits, rows, adapter=adapter)

    def save(self, agent: str, folder: Path) -> None:
        """Write a checkpoint of the agent to the new `folder`, for vLLM and for `open`.

        Raises CheckpointError; no partial checkpoint remains.
        """
        from ratchet.trainer.learner import checkpoint_state, process_group

        saved = checkpoint_state.gathered(self.trainer, self._install(agent))
        process_group.gather(None)  # nothing is written if a process is lost
        process_group.from_leader(
            lambda: checkpoint.write_atomically(
                folder, lambda target: checkpoint_state.write(self.trainer, saved, target)
            )
        )

    def close(self, agent: str) -> None:
        self._agents.pop(agent, None)
        if self._installed == agent:
            self._installed = None

    def end(self) -> None:
        """Leave the group of processes, if there is one."""

    def step(self, agent: str) -> int:
        """Return the agent's optimizer steps since its first round, over all restarts."""
        return self._state(agent).step

    def _install(self, agent: str) -> AgentState:
        """Make the trainer that of the agent, and keep the state of the agent before it; return the agent's state."""
        from ratchet.trainer.learner import agent_state

        state = self._state(agent)
        if self._installed != agent:
            self._park()
            agent_state.install(self.trainer, state)
            self._installed = agent
        return state

    def _park(self) -> None:
        """Keep the state of the agent that the trainer holds on the CPU."""
        from ratchet.trainer.learner import agent_state

        if self._installed is not None:
            agent_state.capture(self.trainer, self._agents[self._installed])
        self._installed = None

    def _state(self, agent: str) -> AgentState:
        if agent not in self._agents:
            raise LearnerServiceError(f"the learner has no agent {agent!r}: open it first")
        return self._agents[agent]

    def _checked(self, settings: LearnerSettings) -> LearnerSettings:
        """Return an agent's settings with the learner's. Raises SettingError if they do not belong together."""
        for field in _SHAPING:
            own, ours = (_comparable(getattr(one, field)) for one in (settings, self._process))
            if own not in (ours, AUTO):
                raise SettingError(
                    f"learner setting {field} cannot change while the learner runs, and all its agents share it: it "
                    f"has {ours!r}, the agent {own!r}; set it under learner, and restart the learner"
                )
        return with_shared(settings, self._process)


def _comparable(value: Any) -> Any:
    return value if isinstance(value, str | int) else tuple(value)


def _limits(trainer: RecordedGRPOTrainer) -> ModelLimits:
    config = trainer.model.config.get_text_config()
    return ModelLimits(
        vocabulary=trainer.model.get_input_embeddings().weight.shape[0],
        max_positions=getattr(config, "max_position_embeddings", None),
        caps_logits=bool(getattr(config, "final_logit_softcapping", None)),
    )
