"""The errors of trainer and tuner, as one tree.

    TrainerError
    ├── SettingError              a setting is invalid; the message names the field
    ├── RowError                  a token row is inconsistent or does not fit the model
    ├── ScoreError                a score is not a finite number
    ├── UserCodeError             code of the user fails
    │   ├── NotImportable         the function cannot be imported
    │   ├── NotCallable           the function cannot be called with the available values
    │   └── UserCodeExited        the code called sys.exit
    ├── PluginError               a plug-in is missing, ambiguous or cannot be imported
    ├── ModelError
    │   ├── ModelNotFound         the base model is neither a folder nor a reachable hub name
    │   ├── OtherBaseModel        the alias's versions belong to another base model
    │   ├── ModelDoesNotFit       the model does not fit on the GPUs; the message has the figures and the remedy
    │   ├── ModelShapeUnknown     no memory formula for the model: its config.json is missing, incomplete or unknown
    │   └── NotAModel             the folder has no readable causal language model
    ├── LearningError
    │   ├── NoLearningSignal      no row of the round can change a weight
    │   ├── TrainingDiverged      the gradient is not finite; the step was not taken
    │   ├── OutOfMemory           a round does not fit into memory; the message names the settings that reduce it
    │   └── WarmStartRefused      too few examples, or the general loss would rise too much
    ├── LearnerServiceError       the learner service failed in a way that has no class of its own
    │   ├── LearnerUnreachable    it does not answer, is loading, or lost an agent's state: load the newest commit
    │   ├── LearnerRefused        its token, version or base model is another one, or the request is too large
    │   └── LearnerTaken          another learner trains the base model; the message has its address
    ├── JudgeError                the judge cannot be loaded
    │   ├── JudgeUnavailable      the judge model gave no valid answer
    │   │   ├── JudgeAway         its endpoint takes no request now; the message has the remedy
    │   │   └── QuestionTooLong   it does not fit into the judge model's context
    │   └── JudgeFailed           one judgement failed: an exception, no return, no finite score
    ├── EngineError
    │   ├── EngineUnreachable     vLLM does not respond; a retry may help
    │   ├── PromptLogprobsMissing the server does not score given token ids
    │   └── AdapterRefused        vLLM refused the adapter
    │       ├── AdapterNotFound   vLLM does not find the adapter's files; a retry may help
    │       └── AdapterNotServable  a limit of the server excludes the adapter: its --max-lora-rank
    ├── ProofFailed               no replica serves the candidate as trained, or it is unproven
    ├── EvaluationStopped         the trainer stopped during an evaluation
    ├── WorkerProcessLost         a training process exited, or had an error that the others did not have
    ├── LeaseLost                 another process has taken the lease
    ├── LeaseTaken                another process holds the lease; the message names it
    ├── TuningError
    │   ├── TaskSetError
    │   │   ├── TaskSetNotFound   neither a file, a folder, an imported set nor a reachable hub name
    │   │   ├── SplitNotFound     the task set has no such split; the message lists its splits
    │   │   ├── MalformedTaskRow  a row cannot be read; the message names file and line
    │   │   ├── TaskSetEmpty      the split has no rows
    │   │   └── TaskSetTooSmall   too few different tasks; the message has the required number
    │   ├── WorkflowError         the workflow cannot be loaded or called
    │   │   └── WorkflowFailed    one run failed: exit code, time-out, invalid output
    │   ├── TooManyFailures       more rollouts failed than max_failures allows
    │   └── PromptError
    │       ├── OptimizerMissing       the extra of an optimizer is not installed
    │       ├── BudgetTooSmall         the budget cannot give a result
    │       ├── BudgetExceeded         the next step exceeds the budget; results so far are kept
    │       ├── SeedPromptUnknown      there is no prompt to start from
    │       ├── ReflectionUnavailable  the reflection model gave no valid answer, several times in a row
    │       └── SetAside               one prompt is dropped; the search continues
    │           ├── Unjudged           the judge gave no score for some of its rollouts
    │           ├── Unanswered         the reflection model gave no valid answer this time
    │           └── PromptRefused      the prompt is empty or too long
    └── CheckpointError
        ├── CheckpointExists      a checkpoint is immutable and the folder exists
        ├── CheckpointUnwritable  the disk is full or fails; no partial checkpoint remains
        ├── CheckpointDamaged     the folder is not a complete checkpoint, or a checksum is wrong
        ├── CheckpointMismatch    the checkpoint belongs to another model or other LoRA settings
        ├── AdapterStoreUnreachable  the adapter store does not answer; a retry may help
        └── AdapterStoreRefused   credentials, bucket, permission or package are missing; a retry does not help

Messages name the setting, file or row, and the remedy. Errors of other libraries are translated where they are caught,
and kept as the cause.
"""

from __future__ import annotations

from ratchet.errors import RatchetError


class TrainerError(RatchetError):
    """The base of all errors of trainer and tuner."""


class SettingError(TrainerError):
    """A setting is invalid."""


class RowError(TrainerError):
    """A token row is inconsistent or does not fit the model."""


class ScoreError(TrainerError):
    """A score is not a finite number."""


class UserCodeError(TrainerError):
    """Code of the user fails; the message says why."""


class NotImportable(UserCodeError):
    """The function cannot be imported."""


class NotCallable(UserCodeError):
    """The function cannot be called with the available values."""


class UserCodeExited(UserCodeError):
    """User code called sys.exit or raised SystemExit."""


class PluginError(TrainerError):
    """A plug-in is missing, ambiguous or cannot be imported; the message names the remedy."""


class ModelError(TrainerError):
    """The base model cannot be used."""


class ModelNotFound(ModelError):
    """The base model is neither a folder nor a reachable hub name."""


class ModelDoesNotFit(ModelError):
    """The model does not fit on the GPUs. The message has the figures and the remedy."""


class ModelShapeUnknown(ModelError):
    """No memory formula for the model: its config.json is missing, incomplete or of an unknown family."""


class NotAModel(ModelError):
    """The folder has no readable causal language model."""


class OtherBaseModel(ModelError):
    """The alias's versions belong to another base model; the message names both."""


class LearningError(TrainerError):
    """A round could not be trained."""


class NoLearningSignal(LearningError):
    """No row of the round can change a weight."""


class TrainingDiverged(LearningError):
    """The gradient is not finite; the step was not taken."""


class OutOfMemory(LearningError):
    """A round does not fit into memory."""


class WarmStartRefused(LearningError):
    """Too few examples, or the general loss would rise more than allowed."""


class LearnerServiceError(TrainerError):
    """The learner service failed in a way that has no class of its own."""


class LearnerUnreachable(LearnerServiceError):
    """The learner service does not answer, is loading, or lost an agent's state; a retry after loading may help."""


class LearnerRefused(LearnerServiceError):
    """The learner service refuses this client; a retry does not help."""


class LearnerTaken(LearnerServiceError):
    """Another learner trains the base model."""


class CheckpointError(TrainerError):
    """A checkpoint could not be written or read."""


class CheckpointExists(CheckpointError):
    """A checkpoint is immutable and the folder exists."""


class CheckpointUnwritable(CheckpointError):
    """The disk is full or fails; no partial checkpoint remains."""


class CheckpointDamaged(CheckpointError):
    """The folder is not a complete checkpoint, or the checksum of one of its files is wrong."""


class CheckpointMismatch(CheckpointError):
    """The checkpoint belongs to another model or other LoRA settings."""


class AdapterStoreUnreachable(CheckpointError):
    """The adapter store does not answer; a retry may help."""


class AdapterStoreRefused(CheckpointError):
    """The adapter store lacks a bucket, a permission, credentials or its package; a retry does not help."""


class JudgeError(TrainerError):
    """The judge cannot be loaded, or fails."""


class JudgeUnavailable(JudgeError):
    """The judge model gave no valid answer in any attempt."""


class JudgeAway(JudgeUnavailable):
    """The judge model's endpoint cannot be reached, refuses the key or takes no request now. A later try may help."""


class QuestionTooLong(JudgeUnavailable):
    """The endpoint says that the question does not fit into the judge model's context."""


class JudgeFailed(JudgeError):
    """One judgement failed: the judge raised an exception, or returned no finite score."""


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


class LeaseLost(TrainerError):
    """Another process has taken the lease of this alias or tuning run."""


class LeaseTaken(TrainerError):
    """Another process holds the lease and renews it."""


class TuningError(TrainerError):
    """The tuner cannot execute a request."""


class TaskSetError(TuningError):
    """A task set cannot be used."""


class TaskSetNotFound(TaskSetError):
    """The source is neither a file, a folder, an imported set nor a reachable hub name."""


class SplitNotFound(TaskSetError):
    """The task set has no split of that name."""


class MalformedTaskRow(TaskSetError):
    """A row of the task set cannot be read."""


class TaskSetEmpty(TaskSetError):
    """The split has no rows."""


class TaskSetTooSmall(TaskSetError):
    """A method needs more different tasks."""


class WorkflowError(TuningError):
    """The workflow cannot be loaded or called, or fails."""


class WorkflowFailed(WorkflowError):
    """One run of the workflow failed."""


class EvaluationStopped(TrainerError):
    """The trainer stopped during an evaluation."""


class TooManyFailures(TuningError):
    """More rollouts failed than `max_failures` allows; finished rollouts are kept."""


class PromptError(TuningError):
    """The prompt cannot be tuned."""


class OptimizerMissing(PromptError):
    """The package of an optimizer is not installed."""


class BudgetTooSmall(PromptError):
    """The budget cannot give a result."""


class BudgetExceeded(PromptError):
    """The next step exceeds the budget; results so far are kept."""


class SeedPromptUnknown(PromptError):
    """There is no prompt to start from."""


class ReflectionUnavailable(PromptError):
    """The reflection model gave no valid answer, several times in a row."""


class SetAside(PromptError):
    """One prompt is dropped; the search continues."""


class Unjudged(SetAside):
    """The judge gave no score for some rollouts of a prompt."""


class Unanswered(SetAside):
    """The reflection model gave no valid answer this time."""


class PromptRefused(SetAside):
    """A proposed prompt is empty or too long."""
