"""What the layers of a tiny model attend to and keep, seen while it reads a text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import transformers
from transformers.cache_utils import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

NUM_TOKENS = 12

TINY: Mapping[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "vocab_size_per_layer_input": 64,
    "hidden_size_per_layer_input": 8,
}
"""Sizes by all their names; a family takes those that it has."""


class Seen(NamedTuple):
    """What one layer kept of the text, and saw from its last token.

    Attributes:
        num_kv_heads: Heads of K and V.
        head_dim: Numbers a head of K.
        v_head_dim: Numbers a head of V.
        reach: Tokens that the last one attends to, itself included; None, if the model
            does not show it.
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    reach: int | None


def build(config: transformers.PreTrainedConfig) -> Any:  # noqa: ANN401
    """Make a model with random weights whose attention can be watched."""
    torch.manual_seed(0)
    try:
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="probe"
        )
    except (KeyError, ValueError):  # its attention cannot be replaced
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager"
        )
    return model.eval()


def watch(model: Any) -> dict[int, Seen]:  # noqa: ANN401
    """Return what each layer with attention keeps and sees of a text of 12 tokens."""
    with torch.no_grad(), _watched() as (kept, reaches):
        eager = model.config._attn_implementation == "eager"
        output = model(
            torch.arange(1, NUM_TOKENS + 1)[None],
            use_cache=True,
            **({"output_attentions": True} if eager else {}),
        )
    for layer, weights in enumerate(getattr(output, "attentions", None) or ()):
        if weights is not None:
            reaches[layer] = int((weights[0, 0, -1] > 0).sum())
    return {layer: Seen(*sizes, reaches.get(layer)) for layer, sizes in kept.items()}


_Kept = dict[int, tuple[int, int, int]]
_REACHES: dict[int, int] = {}


@contextmanager
def _watched() -> Iterator[tuple[_Kept, dict[int, int]]]:
    """Record what is stored in caches and which tokens attention sees."""
    kept: _Kept = {}
    update = Cache.update

    def recording(  # noqa: ANN202
        self: Cache,
        keys: torch.Tensor,
        values: torch.Tensor,
        layer: int,
        *args: object,
        **options: object,
    ):
        kept[layer] = (keys.shape[1], keys.shape[-1], values.shape[-1])
        return update(self, keys, values, layer, *args, **options)

    _REACHES.clear()
    Cache.update = recording  # type: ignore[method-assign]
    try:
        yield kept, _REACHES
    finally:
        Cache.update = update  # type: ignore[method-assign]


def _probe(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    **options: object,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend as the mask says, and note how many tokens the last query sees."""
    mask = attention_mask[..., : key.shape[-2]]
    layer: Any = module.layer_idx
    _REACHES[layer] = int((mask[0, 0, -1] > -1e4).sum())
    ratio = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(ratio, 1) for part in (key, value))
    scores = query @ key.transpose(-1, -2) * (scaling or 1) + mask
    weights = scores.softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights


ALL_ATTENTION_FUNCTIONS.register("probe", _probe)
ALL_MASK_ATTENTION_FUNCTIONS.register("probe", eager_mask)
