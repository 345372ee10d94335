"""Which models `TransformersRunner` computes right, and how it lays their cache out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from radixkv.mem_cache import (
    FullAttentionSpec,
    KVCacheConfig,
    SlidingWindowSpec,
    group_layers,
    make_kv_cache_config,
)
from radixkv.mem_cache.errors import ConfigError
from radixkv.mem_cache.planning import AnyKVCacheSpec

from .attention_modules import get_kv_cache_spec
from .models import LoadedModel, TransformersObject

_LAYER_TYPES: Final = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True, slots=True)
class RunnerPlan:
    """What a runner makes for a model.

    Attributes:
        config: How its pool is laid out.
        windows: Positions that a query sees, by layer; layers without a window are not
            in it.
    """

    config: KVCacheConfig
    windows: Mapping[str, int]


def plan_runner(
    model: TransformersObject,
    *,
    num_pages: int,
    page_size: int,
    max_context_len: int,
    dtype: torch.dtype | None = None,
) -> RunnerPlan:
    """Plan the cache of a whole model with one page table.

    The engine has one page table for all layers, so those with a window keep all
    tokens too; the window is a matter of attention alone.

    Args:
        model: A transformers causal language model, in evaluation mode.
        num_pages: Usable pages, at least 1.
        page_size: Tokens a page, at least 1.
        max_context_len: Longest request, in tokens.
        dtype: Dtype of K and V; the model's if not given.

    Raises:
        ConfigError: The runner would compute other tokens than the model does alone, or
            a number is out of range.
    """
    reason = _unsupported(model)
    if reason:
        raise ConfigError(
            "TransformersRunner supports decoders with causal attention, all of it or "
            f"in windows, got {type(model).__name__} with {reason}"
        )
    specs = get_kv_cache_spec(
        model,
        page_size=page_size,
        dtype=str(dtype or model.dtype).removeprefix("torch."),
    )
    kept = {name: _keeping_all(name, spec) for name, spec in specs.items()}
    groups = group_layers([kept], max_len=max_context_len)
    return RunnerPlan(
        config=make_kv_cache_config(groups, num_pages=num_pages),
        windows={
            name: spec.window_size
            for name, spec in specs.items()
            if isinstance(spec, SlidingWindowSpec)
        },
    )


def _keeping_all(name: str, spec: AnyKVCacheSpec) -> FullAttentionSpec:
    if not isinstance(spec, (FullAttentionSpec, SlidingWindowSpec)):
        raise ConfigError(
            "TransformersRunner supports layers that keep K and V by head, got "
            f"{type(spec).__name__} for {name}"
        )
    return FullAttentionSpec(
        page_size=spec.page_size,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        v_head_dim=spec.v_head_dim,
        dtype=spec.dtype,
    )


def _unsupported(model: TransformersObject) -> str | None:
    """Name what would make the model's tokens wrong in a paged, packed batch."""
    if isinstance(model, LoadedModel):
        raise ConfigError("TransformersRunner takes the `model` of a LoadedModel")
    config = model.config.get_text_config()
    others = set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES
    checks = {
        "an encoder": config.is_encoder_decoder,
        "attention that is not causal": not all(
            getattr(part, "is_causal", True) for part in (config, *model.modules())
        ),
        f"{sorted(others)} layers": others,
        "latent attention (MLA)": getattr(config, "kv_lora_rank", None),
        "layers that read K and V of others": getattr(
            config, "num_kv_shared_layers", None
        ),
        "attention sinks": any(hasattr(part, "sinks") for part in model.modules()),
        "dropout (model.eval() ends it)": model.training,
        "recurrent layers": model._is_stateful,
        # The longest request of a batch would change the positions of the others.
        "rope that depends on the batch": {"dynamic", "longrope"}.intersection(
            _rope_types(getattr(config, "rope_parameters", None) or {})
        ),
        "an attention of its own": not (
            model._supports_attention_backend and model._can_set_attn_implementation()
        ),
    }
    return next((reason for reason, found in checks.items() if found), None)


def _rope_types(parameters: TransformersObject) -> Iterator[str]:
    """Yield the kinds of rope, of which each type of layers may have its own."""
    for name, value in parameters.items():
        if name == "rope_type":
            yield value
        elif name in _LAYER_TYPES:
            yield value.get("rope_type", "default")
