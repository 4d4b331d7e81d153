"""The errors of trainer and tuner: a class for each that is caught by name; others are their parent, with a message.

Messages name the setting, file or row, and the remedy. Errors of other libraries are translated where they are caught,
and kept as the cause. The learner's service sends an error by its class's name.
"""

from __future__ import annotations

from ratchet.errors import RatchetError


class TrainerError(RatchetError):
    """The base of all errors of trainer and tuner."""


class SettingError(TrainerError):
    """A setting is invalid."""


class RowError(TrainerError):
    """A token row is inconsistent or does not fit the model."""


class NotImportable(TrainerError):
    """The function cannot be imported."""


class NotCallable(TrainerError):
    """The function cannot be called with the available values."""


class PluginError(TrainerError):
    """A plug-in is missing, ambiguous or cannot be imported; the message names the remedy."""


class ModelError(TrainerError):
    """The base model cannot be used: no model's folder, no reachable hub name, or another than before."""


class ModelDoesNotFit(ModelError):
    """The model does not fit on the GPUs. The message has the figures and the remedy."""


class ModelShapeUnknown(ModelError):
    """No memory formula for the model: its config.json is missing, incomplete or of an unknown family."""


class LearningError(TrainerError):
    """A round or a warm start could not be trained."""


class NoLearningSignal(LearningError):
    """No row of the round can change a weight."""


class TrainingDiverged(LearningError):
    """The gradient is not finite; the step was not taken."""


class OutOfMemory(LearningError):
    """A round does not fit into memory; the message names the settings that reduce it."""


class LearnerServiceError(TrainerError):
    """The learner service refuses this client, or failed in a way that has no class of its own."""


class LearnerUnreachable(LearnerServiceError):
    """The learner service does not answer, is loading, or lost an agent's state; a retry after loading may help."""


class CheckpointError(TrainerError):
    """A checkpoint could not be written or read."""


class CheckpointDamaged(CheckpointError):
    """The folder is not a complete checkpoint, or the checksum of one of its files is wrong."""


class AdapterStoreUnreachable(CheckpointError):
    """The adapter store does not answer; a retry may help."""


class JudgeError(TrainerError):
    """The judge cannot be loaded, or fails."""


class JudgeUnavailable(JudgeError):
    """The judge model gave no valid answer in any attempt."""


class JudgeAway(JudgeUnavailable):
    """The judge model's endpoint cannot be reached, refuses the key or takes no request now. A later try may help."""


class QuestionTooLong(JudgeUnavailable):
    """The endpoint says that the question does not fit into the judge model's context."""


class EngineError(TrainerError):
    """vLLM did not execute a request."""


class EngineUnreachable(EngineError):
    """vLLM does not respond, or fails; a retry may help."""


class PromptLogprobsMissing(EngineError):
    """The server answers without the logprobs of the prompt's token ids; another server may have them."""


class AdapterRefused(EngineError):
    """vLLM refused the adapter; a retry does not help."""


class AdapterNotFound(AdapterRefused):
    """vLLM does not find the adapter's files yet; a retry may help."""


class AdapterNotServable(AdapterRefused):
    """A limit of the server excludes the adapter, such as its --max-lora-rank; it helps to start it with another."""


class WorkerProcessLost(TrainerError):
    """A training process exited, or had an error that the others did not have."""


class TuningError(TrainerError):
    """The tuner cannot execute a request."""


class TaskSetError(TuningError):
    """A task set cannot be used."""


class TaskSetNotFound(TaskSetError):
    """The source is neither a file, a folder, an imported set nor a reachable hub name."""


class WorkflowError(TuningError):
    """The workflow cannot be loaded or called, or fails."""


class WorkflowFailed(WorkflowError):
    """One run of the workflow failed."""


class TooManyFailures(TuningError):
    """More rollouts failed than `max_failures` allows; finished rollouts are kept."""


class BudgetExceeded(TuningError):
    """The next step exceeds the budget; results so far are kept."""


class SetAside(TuningError):
    """One prompt is dropped; the search continues."""


class Unjudged(SetAside):
    """The judge gave no score for some rollouts of a prompt."""


class Unanswered(SetAside):
    """The reflection model gave no valid answer this time."""
