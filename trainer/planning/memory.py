"""Memory of one GPU under the learner, and under vLLM, by arithmetic from the sizes of the model's layers.

Learner: the base model in bf16 or NF4, the adapter in fp32 with its gradient and AdamW's two moments, and activations.
With FSDP2 each process holds its share of weights and adapter, two whole layers while they compute, and the embeddings
and LM head, which its root unit does not shard again. NF4 takes 4 + 8/64 + 32/(64 x 256) bits a weight of a linear
layer (Dettmers et al. 2023, arXiv:2305.14314, section 3); stacked experts and embeddings stay in bf16.

vLLM: weights by tensor parallelism, one slot per adapter of a batch, the activations of its largest batch, and the KV
cache: 2 x layers x KV heads x head size x 2 bytes a token, of which a layer with a window keeps the window's.

RUNTIME, GRAPHS and the share that stays free are allowances, not formulas: CUDA's context and cuBLAS's workspaces, and
vLLM's CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ratchet.trainer.planning.model_shape import (
    Experts,
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
MAX_LORAS = 4
MAX_TREE_TOKENS = 8192  # of ratchet.trainer.learner.forward_pass
TOKEN_TILE, VOCAB_TILE = 2048, 16384  # of ratchet.trainer.learner.lm_head: logits are never whole
RUNTIME = round(0.75 * GIB)  # CUDA's context, cuBLAS's workspaces and unused parts of torch's blocks, per process
GRAPHS = GIB  # vLLM's CUDA graphs
_BF16, _FP32 = 2, 4
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
        return self.weights + self.adapters + self.activations + self.runtime

    @property
    def least(self) -> int:
        """Bytes with the cache of one sequence, without which vLLM does not start."""
        return self.fixed + self.kv_cache_per_sequence


class Activations(NamedTuple):
    """Bytes of activations of a training step over one micro-batch, at their peaks."""

    kept: int  # for the backward pass; with checkpointing: inputs of the layers, and their attention's outputs
    one_layer: int  # with checkpointing: the layer that is computed again
    gradients: int  # of activations, during the backward pass of a layer
    logits: int  # tiles of them, and the gradient of the last hidden states; freed before a layer's backward pass
    offloaded: int  # in the memory of the host

    @property
    def peak(self) -> int:
        return self.kept + max(self.logits, self.one_layer + self.gradients)


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
    adapter = _FP32 * count_lora_parameters(adapted, rank)
    count = count_parameters(shape)
    weights = _learner_weights(count, option.quantization)
    if option.sharding == "fsdp2":
        layer = _BF16 * (count.linear + count.experts) // shape.layers
        weights = weights // gpus + 2 * layer + _BF16 * count.embeddings
        adapter //= gpus
    step = step_activations(shape, option, tokens, adapted, rank)
    return LearnerMemory(weights, adapter, adapter, 2 * adapter, step.peak, RUNTIME, host=step.offloaded)


def step_activations(
    shape: ModelShape, option: LearnerOption, tokens: int, adapted: Sequence[Linear], rank: int
) -> Activations:
    """Return the activations of a forward and backward pass over `tokens` tokens, with LoRA over frozen bf16 weights.

    With gradient checkpointing a layer keeps its input and its attention's output, and one layer at a time is computed
    again; with off-loading the inputs wait in the host's memory, and attention is computed again too.
    """
    dense = _layer_activations(shape, tokens, adapted, rank, None) if shape.dense_layers else 0
    sparse = _layer_activations(shape, tokens, adapted, rank, shape.experts) if shape.experts else 0
    inputs = shape.layers * tokens * _BF16 * shape.hidden
    outputs = tokens * (_BF16 * shape.query + _FP32 * shape.heads)  # of one layer's attention
    one_layer = offloaded = 0
    if option.gradient_checkpointing and option.activation_offload:
        kept, one_layer, offloaded = 2 * inputs // shape.layers, max(dense, sparse), inputs
    elif option.gradient_checkpointing:
        kept, one_layer = inputs + shape.layers * outputs, max(dense, sparse) - outputs
    else:
        kept = shape.dense_layers * dense + (shape.layers - shape.dense_layers) * sparse
    # Once: the last norm, sines and cosines of the positions, and the LM head's input.
    kept += tokens * (_FP32 * shape.hidden + _BF16 * (shape.hidden + 2 * shape.head_dim))
    if option.share_prefixes and not shape.sliding_layers and not shape.sinks:  # these take no trees
        kept += _BF16 * tokens * min(tokens, MAX_TREE_TOKENS)  # the mask of a tree of rows, for all layers
    # The widest point of a backward pass: gradients of the MLP's product and of one factor, and of two hidden states.
    experts = shape.experts
    inner = max(
        shape.intermediate if dense else 0, experts.per_token * experts.intermediate if experts else 0, shape.query
    )
    tile = min(TOKEN_TILE, tokens) * min(VOCAB_TILE, shape.vocab) * (2 * _FP32 + _BF16)
    return Activations(
        kept=kept,
        one_layer=one_layer,
        gradients=2 * _BF16 * tokens * (inner + shape.hidden),
        logits=tile + (_FP32 + _BF16) * shape.hidden * tokens,
        offloaded=offloaded,
    )


def _layer_activations(
    shape: ModelShape, tokens: int, adapted: Sequence[Linear], rank: int, experts: Experts | None
) -> int:
    """Return what one layer keeps for its backward pass; with `experts`, each token has a row per expert it goes to.

    A frozen linear layer keeps nothing. A LoRA layer keeps its input, once for layers that read the same tensor, and
    the outputs of its first matrix; a norm its input in fp32; attention (FlashAttention, or fused SDPA) queries, keys,
    values, its output and one number per query; a gated MLP the three factors of its products. PEFT adds an expert's
    LoRA product to its weights and keeps the sum. (Korthikanti et al. 2022, arXiv:2205.05198, section 4.)
    """
    names = {layer.name for layer in adapted}
    fp32 = shape.norms_per_layer * shape.hidden + shape.heads
    fp32 += shape.query + shape.key_value if shape.qk_norm else 0
    bf16 = 2 * (shape.query + shape.key_value) + rank * sum(not layer.stacked for layer in adapted)
    bf16 += shape.hidden if names & {"q_proj", "k_proj", "v_proj"} else 0
    fixed = 0
    if experts is None:
        bf16 += 3 * shape.intermediate
        bf16 += shape.hidden if names & {"gate_proj", "up_proj"} else 0
        bf16 += shape.intermediate if "down_proj" in names else 0
    else:
        stacked = [layer for layer in adapted if layer.stacked]
        bf16 += experts.per_token * (3 * experts.intermediate + shape.hidden + sum(layer.inputs for layer in stacked))
        fixed = _BF16 * sum(layer.weights for layer in stacked) // experts.sparse_layers
    return tokens * (_FP32 * fp32 + _BF16 * bf16) + fixed


def _learner_weights(count: ParameterCount, quantization: str) -> int:
    if quantization != "nf4":
        return _BF16 * count.total
    return round(count.linear * _NF4_BITS / 8) + _BF16 * (count.total - count.linear)


def serving_memory(
    shape: ModelShape,
    context: int,
    *,
    tensor_parallel: int = 1,
    gpu_bytes: int = 80 * GIB,
    max_loras: int = MAX_LORAS,
    rank: int = 16,
    max_num_seqs: int = MAX_NUM_SEQS,
    target_modules: str | Sequence[str] = "all-linear",
) -> ServingMemory:
    """Return vLLM's memory on each of its GPUs. vLLM takes what is left of its share for the KV cache."""
    batch = 8192 if gpu_bytes >= _LARGE_GPU else 2048  # vLLM's default of max_num_batched_tokens for a server
    slots = sum(_slot(layer, rank, tensor_parallel) for layer in adapted_layers(shape, target_modules))
    # The widest point of a forward pass: gate, up and their product beside two hidden states.
    inner = shape.experts.per_token * shape.experts.intermediate if shape.experts else shape.intermediate
    widest = _BF16 * (3 * max(inner, shape.query) // tensor_parallel + 2 * shape.hidden)
    return ServingMemory(
        weights=_served_weights(shape) // tensor_parallel,
        adapters=_BF16 * max_loras * slots,
        activations=batch * widest + _SAMPLER_COPIES * _FP32 * max_num_seqs * shape.vocab,
        runtime=RUNTIME + GRAPHS,
        kv_cache_per_sequence=-(-kv_cache_bytes(shape, context) // min(tensor_parallel, shape.kv_heads)),
    )


def kv_cache_bytes(shape: ModelShape, tokens: int) -> int:
    """Return the bytes of KV cache of one sequence of so many tokens, over all GPUs."""
    full = (shape.layers - shape.sliding_layers) * tokens
    return 2 * shape.key_value * _BF16 * (full + shape.sliding_layers * min(tokens, shape.window))


def _served_weights(shape: ModelShape) -> int:
    count = count_parameters(shape)
    saved = {"mxfp4": round(count.experts * (_BF16 - _MXFP4_BITS / 8)), "fp8": count.linear + count.experts}
    return _BF16 * count.total - saved.get(shape.weight_format or "", 0)


def _slot(layer: Linear, rank: int, tensor_parallel: int) -> int:
    """Return the elements of one adapter's matrices on one GPU: vLLM shards one of a pair and repeats the other."""
    sharded, whole = layer.outputs, layer.inputs
    if layer.name.rpartition(".")[2] in _ROW_PARALLEL:
        sharded, whole = whole, sharded
    return rank * layer.adapters * (whole + -(-sharded // tensor_parallel)) * layer.copies
