"""Bytes that a training step keeps for its backward pass, tensor by tensor.

The method is that of Korthikanti et al. 2022, "Reducing Activation Recomputation in Large Transformer Models"
(arXiv:2205.05198), section 4, applied to transformers' modelling code with frozen weights and PEFT's LoRA layers:

- A frozen linear layer keeps nothing: the gradient of its input needs the weight alone.
- A LoRA layer keeps its input, which layers that read the same tensor share, and the r outputs of its first matrix
  (`ratchet.trainer.learner.lora_linear`).
- RMSNorm keeps its input in fp32 and one fp32 number per row.
- Attention (FlashAttention, or torch's fused SDPA without padding: Dao 2023, arXiv:2307.08691) keeps queries, keys,
  values, its output and one fp32 number per query, and no scores.
- The gated MLP keeps what its three products multiply.
- PEFT adds the product of an expert's LoRA matrices to its weights, and both the sum and its layer's rows are kept.
- With gradient checkpointing (Chen et al. 2016, arXiv:1604.06174) a layer keeps its input and its attention's output,
  and one layer at a time is computed again; with off-loading the inputs wait in the host's memory, and attention is
  computed again too (`ratchet.trainer.learner.activations`).

Trees of rows with a common prefix attend through a mask of their tokens squared, which all layers read; a micro-batch
of trees has at most so many of them as fit its tokens (`ratchet.trainer.learner.forward_pass`).

Logits are never whole: the learner's LM head (`ratchet.trainer.learner.lm_head`) computes tiles of TOKEN_TILE tokens
x VOCAB_TILE words, forward and backward, with two of them in fp32 at a time.
`tests/trainer/test_plan_activations.py` compares this with the bytes that autograd saves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ratchet.trainer.planning.model_shape import Linear, ModelShape, count_lora_parameters

MAX_TREE_TOKENS = 8192  # of ratchet.trainer.learner.forward_pass
TOKEN_TILE = 2048  # of ratchet.trainer.learner.lm_head
VOCAB_TILE = 16384
_FP32, _BF16, _INT64 = 4, 2, 8  # bytes


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A tensor kept for backward: bytes per token of a sequence, and bytes that do not grow with it."""

    name: str
    per_token: float = 0.0
    fixed: int = 0


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Peak bytes of activations during a training step over one micro-batch, by what they are."""

    kept: int  # saved for backward over all layers; with checkpointing: inputs of the layers
    one_layer: int  # with checkpointing: the layer that is computed again
    gradients: int  # of activations, during backward
    logits: int  # the tiles, and the gradient of the last hidden states
    offloaded: int  # in the memory of the host

    @property
    def total(self) -> int:
        """Bytes on the GPU at the peak; the LM head's backward is over before a layer's begins."""
        return self.kept + max(self.logits, self.one_layer + self.gradients)


def step_memory(
    shape: ModelShape,
    adapted: Sequence[Linear],
    rank: int,
    tokens: int,
    *,
    checkpointing: bool,
    offload: bool = False,
    trees: bool = False,
    bf16: bool = True,
) -> StepMemory:
    """Return the activation memory of a forward and backward pass over `tokens` tokens of a micro-batch.

    `trees`: rows share their common prefixes.
    """
    element = _BF16 if bf16 else _FP32
    attention = _sum(attention_tensors(shape, adapted, rank, bf16=bf16), tokens)
    dense = attention + _sum(mlp_tensors(shape, adapted, rank, bf16=bf16), tokens)
    sparse = attention + _sum(expert_tensors(shape, adapted, rank, bf16=bf16), tokens) if shape.experts else 0
    sparse_layers = shape.layers - shape.dense_layers
    inputs = shape.layers * shape.hidden * element * tokens
    last = _sum(head_tensors(shape, bf16=bf16), tokens)
    outputs = shape.layers * _sum(_attention_outputs(shape, element), tokens)
    per_layer = max(dense if shape.dense_layers else 0, sparse)
    whole = shape.dense_layers * dense + sparse_layers * sparse
    kept = whole
    if checkpointing:
        kept = 2 * shape.hidden * element * tokens if offload else inputs + outputs
        per_layer -= 0 if offload else outputs // shape.layers
    return StepMemory(
        kept=kept + last + (element * tokens * min(tokens, MAX_TREE_TOKENS) if trees else 0),
        one_layer=per_layer if checkpointing else 0,
        gradients=_gradients(shape, tokens, element),
        logits=_logits(shape, tokens, element),
        offloaded=inputs if checkpointing and offload else 0,
    )


def attention_tensors(
    shape: ModelShape, adapted: Sequence[Linear], rank: int, *, bf16: bool = True
) -> tuple[SavedTensor, ...]:
    """Return what the attention half of one layer keeps, with its norms."""
    element = _BF16 if bf16 else _FP32
    names = {layer.name for layer in adapted}
    inputs = [name for name in ("q_proj", "k_proj", "v_proj") if name in names]
    found = [
        *_norms(shape, "attention"),
        *_lora(inputs, shape.hidden, rank, element),
        SavedTensor("queries", element * shape.query),
        SavedTensor("keys", element * shape.key_value),
        SavedTensor("values", element * shape.key_value),
        *_attention_outputs(shape, element),
    ]
    if "o_proj" in names:
        found += _lora(["o_proj"], 0, rank, element)  # its input is the attention's output
    if shape.qk_norm:
        width = shape.query + shape.key_value
        found.append(SavedTensor("queries and keys before their norms", _FP32 * (width + shape.heads + shape.kv_heads)))
    return tuple(found)


def mlp_tensors(
    shape: ModelShape, adapted: Sequence[Linear], rank: int, *, bf16: bool = True
) -> tuple[SavedTensor, ...]:
    """Return what a dense MLP keeps, with its norms: down(act(gate(x)) * up(x))."""
    element = _BF16 if bf16 else _FP32
    names = {layer.name for layer in adapted}
    inner = element * shape.intermediate
    return (
        *_norms(shape, "MLP"),
        *_lora([name for name in ("gate_proj", "up_proj") if name in names], shape.hidden, rank, element),
        SavedTensor("gate", inner),
        SavedTensor("act(gate)", inner),
        SavedTensor("up", inner),
        *_lora([name for name in ("down_proj",) if name in names], shape.intermediate, rank, element),
    )


def expert_tensors(
    shape: ModelShape, adapted: Sequence[Linear], rank: int, *, bf16: bool = True
) -> tuple[SavedTensor, ...]:
    """Return what a layer of experts keeps, with its norms; each token has a row per expert that it is routed to."""
    experts = shape.experts
    if experts is None:
        return ()
    element = _BF16 if bf16 else _FP32
    rows, hidden, inner = experts.per_token, element * shape.hidden, element * experts.intermediate
    stacked = [layer for layer in adapted if layer.stacked]
    found = [
        *_norms(shape, "experts"),
        SavedTensor("router's probabilities and choices", _FP32 * experts.count + _INT64 * rows),
        SavedTensor("rows' order, forth and back, and their tokens", 3 * _INT64 * rows),
        SavedTensor("gate and up", rows * 2 * inner),
        SavedTensor("act(gate)", rows * inner),
        SavedTensor("weights of the experts' outputs", rows * element),
        SavedTensor("experts' outputs", rows * hidden),
    ]
    for layer in stacked:
        width = layer.inputs
        found += [
            SavedTensor(f"inputs of {layer.name}", rows * element * width),
            SavedTensor(f"{layer.name} with its adapter", fixed=element * layer.weights // experts.sparse_layers),
            SavedTensor(
                f"lora_A and lora_B of {layer.name}, cast",
                fixed=_BF16 * count_lora_parameters([layer], rank) // experts.sparse_layers if bf16 else 0,
            ),
        ]
    return tuple(found)


def head_tensors(shape: ModelShape, *, bf16: bool = True) -> tuple[SavedTensor, ...]:
    """Return what is kept once: the last norm, the positions' sines, and the LM head's input."""
    element = _BF16 if bf16 else _FP32
    return (
        _norm("last", shape.hidden),
        SavedTensor("cosines and sines", 2 * element * shape.head_dim),
        SavedTensor("hidden states at the LM head", element * shape.hidden),
    )


def _norms(shape: ModelShape, before: str) -> list[SavedTensor]:
    found = [_norm(before, shape.hidden)]
    return [*found, _norm(f"after {before}", shape.hidden)] if shape.norms_per_layer == 4 else found


def _norm(name: str, width: int) -> SavedTensor:
    return SavedTensor(f"{name} norm's input, and its scale", _FP32 * (width + 1))


def _attention_outputs(shape: ModelShape, element: int) -> tuple[SavedTensor, ...]:
    return (
        SavedTensor("attention output", element * shape.query),
        SavedTensor("log-sum-exp of the scores", _FP32 * shape.heads),
    )


def _lora(names: Sequence[str], width: int, rank: int, element: int) -> list[SavedTensor]:
    """Return what LoRA layers keep that read the same tensor, of this width."""
    inputs = [SavedTensor(f"input of {', '.join(names)}", element * width)] if names and width else []
    return inputs + [SavedTensor(f"{name}'s lora_A output", element * rank) for name in names]


def _gradients(shape: ModelShape, tokens: int, element: int) -> int:
    """Return the gradients of activations alive at once in a layer's backward.

    The widest point is the MLP's product: its gradient and that of one factor, beside two of the residual stream.
    """
    widths = [shape.intermediate] if shape.dense_layers else []
    widths += [shape.experts.per_token * shape.experts.intermediate] if shape.experts else []
    return (2 * max(shape.query, *widths) + 2 * shape.hidden) * element * tokens


def _logits(shape: ModelShape, tokens: int, element: int) -> int:
    tile = min(TOKEN_TILE, tokens) * min(VOCAB_TILE, shape.vocab) * (2 * _FP32 + element)  # the product rounds one
    return tile + (_FP32 + element) * shape.hidden * tokens


def _sum(tensors: Sequence[SavedTensor], tokens: int) -> int:
    return round(sum(tensor.per_token * tokens + tensor.fixed for tensor in tensors))
