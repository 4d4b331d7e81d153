"""Memory of one GPU under the learner, and under vLLM, by formula.

Learner: base model in bf16 or NF4, the adapter in fp32 with its gradient and AdamW's two moments (Loshchilov and Hutter
2019, arXiv:1711.05101: 4 + 4 + 8 bytes a parameter), and the activations of `activations.py`. With FSDP2 each process
holds its share of weights and adapter, two whole layers while they compute, and the embeddings and LM head, which its
root unit does not shard again (torch's `fully_shard`; ZeRO stage 3: Rajbhandari et al. 2020, arXiv:1910.02054).
NF4 takes 4 + 8/64 + 32/(64 x 256) bits a weight of a linear layer (Dettmers et al. 2023, arXiv:2305.14314, section 3);
stacked experts and embeddings stay in bf16.

vLLM: weights by tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053), one slot per adapter of a batch, the
activations of its largest batch, and the KV cache: 2 x layers x KV heads x head size x 2 bytes a token (Kwon et al.
2023, arXiv:2309.06180, section 3), of which a layer with a window keeps the window's.

RUNTIME, GRAPHS and the share that stays free are allowances, not formulas: CUDA's context and cuBLAS's workspaces, and
vLLM's CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ratchet.trainer.planning.activations import StepMemory, step_memory
from ratchet.trainer.planning.model_shape import (
    Linear,
    ModelShape,
    ParameterCount,
    adapted_layers,
    count_lora_parameters,
    count_parameters,
)

GIB = 2**30
# Sequences that vLLM computes at once unless the settings say otherwise. Its own default depends on the GPU (1,024 on
# an H100), and its sampler's memory grows with it.
MAX_NUM_SEQS = 256
RUNTIME = round(0.75 * GIB)  # CUDA's context, cuBLAS's workspaces and unused parts of torch's blocks, per process
GRAPHS = GIB  # vLLM's CUDA graphs
_BF16, _FP32 = 2, 4
_STATE = 16  # bytes per parameter of the adapter: itself, its gradient, AdamW's moments
_NF4_BITS = 4 + 8 / 64 + 32 / (64 * 256)
_MXFP4_BITS = 4 + 8 / 32
# Rows of a linear layer whose output stays whole under tensor parallelism.
_ROW_PARALLEL = ("o_proj", "down_proj")
_LARGE_GPU = 70 * GIB  # vLLM's batches of tokens are larger from here on
_SAMPLER_COPIES = 3  # of the logits, in fp32


@dataclass(frozen=True, slots=True)
class LearnerOption:
    """Settings of the learner that decide its memory, under their names in ratchet.yaml."""

    sharding: str = "none"
    gradient_checkpointing: bool = False
    activation_offload: bool = False
    quantization: str = "none"
    share_prefixes: bool = True

    def __str__(self) -> str:
        parts = [f"sharding {self.sharding}"] if self.sharding != "none" else []
        parts += ["gradient_checkpointing"] if self.gradient_checkpointing else []
        parts += ["activation_offload"] if self.activation_offload else []
        parts += [f"quantization {self.quantization}"] if self.quantization != "none" else []
        return ", ".join(parts) or "no setting"


@dataclass(frozen=True, slots=True)
class LearnerMemory:
    """Bytes on each of the learner's GPUs."""

    weights: int
    adapter: int
    gradients: int
    optimizer: int
    activations: int
    runtime: int
    host: int  # off-loaded activations, in the memory of the host

    @property
    def total(self) -> int:
        """Bytes on the GPU."""
        return self.weights + self.adapter + self.gradients + self.optimizer + self.activations + self.runtime


@dataclass(frozen=True, slots=True)
class ServingMemory:
    """Bytes on each of vLLM's GPUs, without the KV cache, and bytes of cache that one sequence of the context takes."""

    weights: int
    adapters: int
    activations: int
    runtime: int
    kv_cache_per_sequence: int

    @property
    def fixed(self) -> int:
        """Bytes on the GPU before any cache."""
        return self.weights + self.adapters + self.activations + self.runtime

    @property
    def least(self) -> int:
        """Bytes with the cache of one sequence, without which vLLM does not start."""
        return self.fixed + self.kv_cache_per_sequence


def learner_memory(
    shape: ModelShape,
    option: LearnerOption,
    tokens: int,
    *,
    gpus: int = 1,
    rank: int = 16,
    target_modules: str | Sequence[str] = "all-linear",
) -> LearnerMemory:
    """Return the learner's memory on each of its GPUs while it trains a micro-batch of `tokens` tokens."""
    adapted = adapted_layers(shape, target_modules)
    adapter = count_lora_parameters(adapted, rank)
    count = count_parameters(shape)
    weights = _learner_weights(count, option.quantization)
    if option.sharding == "fsdp2":
        layer = _BF16 * (count.linear + count.experts) // shape.layers
        weights = weights // gpus + 2 * layer + _BF16 * count.embeddings
        adapter //= gpus
    step: StepMemory = step_memory(
        shape, adapted, rank, tokens,
        checkpointing=option.gradient_checkpointing, offload=option.activation_offload,
        # Attention with windows or sinks takes no trees.
        trees=option.share_prefixes and not shape.sliding_layers and not shape.sinks,
    )  # fmt: skip
    return LearnerMemory(
        weights=weights,
        adapter=_FP32 * adapter,
        gradients=_FP32 * adapter,
        optimizer=(_STATE - 2 * _FP32) * adapter,
        activations=step.total,
        runtime=RUNTIME,
        host=step.offloaded,
    )


def serving_memory(
    shape: ModelShape,
    context: int,
    *,
    tensor_parallel: int = 1,
    gpu_bytes: int = 80 * GIB,
    max_loras: int = 4,
    rank: int = 16,
    max_num_seqs: int = MAX_NUM_SEQS,
    target_modules: str | Sequence[str] = "all-linear",
) -> ServingMemory:
    """Return vLLM's memory on each of its GPUs. vLLM takes what is left of its share for the KV cache."""
    batch = 8192 if gpu_bytes >= _LARGE_GPU else 2048  # vLLM's default of max_num_batched_tokens for a server
    adapted = adapted_layers(shape, target_modules)
    slots = sum(_slot(layer, rank, tensor_parallel) for layer in adapted)
    return ServingMemory(
        weights=_served_weights(shape) // tensor_parallel,
        adapters=_BF16 * max_loras * slots,
        activations=_serving_activations(shape, batch, max_num_seqs, tensor_parallel),
        runtime=RUNTIME + GRAPHS,
        kv_cache_per_sequence=-(-kv_cache_bytes(shape, context) // min(tensor_parallel, shape.kv_heads)),
    )


def kv_cache_bytes(shape: ModelShape, tokens: int) -> int:
    """Return the bytes of KV cache of one sequence of so many tokens, over all GPUs."""
    per_layer = 2 * shape.key_value * _BF16
    full = (shape.layers - shape.sliding_layers) * tokens
    return per_layer * (full + shape.sliding_layers * min(tokens, shape.window))


def _learner_weights(count: ParameterCount, quantization: str) -> int:
    if quantization != "nf4":
        return _BF16 * count.total
    return round(count.linear * _NF4_BITS / 8) + _BF16 * (count.total - count.linear)


def _served_weights(shape: ModelShape) -> int:
    count = count_parameters(shape)
    whole = _BF16 * count.total
    if shape.weight_format == "mxfp4":
        return whole - round(count.experts * (_BF16 - _MXFP4_BITS / 8))
    if shape.weight_format == "fp8":
        return whole - (count.linear + count.experts)
    return whole


def _slot(layer: Linear, rank: int, tensor_parallel: int) -> int:
    """Return the elements of one adapter's matrices on one GPU: vLLM shards one of a pair and repeats the other."""
    sharded, whole = layer.outputs, layer.inputs
    if layer.name.rpartition(".")[2] in _ROW_PARALLEL:
        sharded, whole = whole, sharded
    return rank * layer.adapters * (whole + -(-sharded // tensor_parallel)) * layer.copies


def _serving_activations(shape: ModelShape, batch: int, sequences: int, tensor_parallel: int) -> int:
    """Return the widest point of a forward pass (gate, up and their product beside two hidden states) and sampling."""
    experts = shape.experts
    inner = experts.per_token * experts.intermediate if experts else shape.intermediate
    widest = _BF16 * (3 * max(inner, shape.query) // tensor_parallel + 2 * shape.hidden)
    return batch * widest + _SAMPLER_COPIES * _FP32 * sequences * shape.vocab
