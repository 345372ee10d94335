"""Which models `TransformersRunner` computes right, and how it lays their cache out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch

from radixkv.mem_cache import (
    FullAttentionSpec,
    KVCacheConfig,
    group_layers,
    make_kv_cache_config,
)
from radixkv.mem_cache.errors import ConfigError

from .model_trial import ModelTrial, try_model
from .models import LoadedModel, TransformersObject


def plan_runner(
    model: TransformersObject,
    *,
    num_pages: int,
    page_size: int,
    max_num_tokens: int,
    dtype: torch.dtype | None = None,
) -> tuple[ModelTrial, KVCacheConfig]:
    """Plan the cache of a whole model with one page table.

    The engine has one page table for all layers, so those with a window keep all
    tokens too; the window is a matter of attention alone.

    Args:
        model: A transformers causal language model, in evaluation mode.
        num_pages: Usable pages, at least 1.
        page_size: Tokens a page, at least 1.
        max_num_tokens: Most tokens that all requests of a step have together.
        dtype: Dtype of K and V; the model's if not given.

    Returns:
        What the model was seen to do, and how the pool is laid out.

    Raises:
        ConfigError: The runner would compute other tokens than the model does alone, or
            a number is out of range.
    """
    reason = _unsupported(model, max_num_tokens)
    if reason:
        raise ConfigError(
            "TransformersRunner supports decoders with causal attention, all of it or "
            f"in windows, got {type(model).__name__} with {reason}"
        )
    trial = try_model(model)
    config = lay_out(trial, num_pages, page_size, dtype or model.dtype)
    return trial, config


def lay_out(
    trial: ModelTrial, num_pages: int, page_size: int, dtype: torch.dtype
) -> KVCacheConfig:
    """Lay out a pool for all that a model keeps.

    Args:
        trial: What it was seen to do.
        num_pages: Usable pages, at least 1.
        page_size: Tokens a page, at least 1.
        dtype: Dtype of K and V.

    Raises:
        ConfigError: A number is out of range.
    """
    specs = {
        use.name: FullAttentionSpec(
            page_size=page_size,
            num_kv_heads=use.num_kv_heads,
            head_dim=use.head_dim,
            v_head_dim=use.v_head_dim,
            dtype=str(dtype).removeprefix("torch."),
        )
        for use in trial.layers.values()
    }
    groups = group_layers([specs], max_len=1)  # one: all of them keep all tokens
    return make_kv_cache_config(groups, num_pages=num_pages)


def _unsupported(model: TransformersObject, max_num_tokens: int) -> str | None:
    """Name what would make the model's tokens wrong, soon or late.

    What a few tokens show is left to the trial and to the check that follows it. Of the
    rest, only the config tells.
    """
    if isinstance(model, LoadedModel):
        raise ConfigError("TransformersRunner takes the `model` of a LoadedModel")
    config = model.config.get_text_config()
    kept = getattr(config, "keep_window_size", None)
    checks = {
        "an encoder": config.is_encoder_decoder,
        "attention that is not causal": not all(
            getattr(part, "is_causal", True) for part in (config, *model.modules())
        ),
        "latent attention (MLA)": getattr(config, "kv_lora_rank", None),
        "attention sinks": any(hasattr(part, "sinks") for part in model.modules()),
        "dropout (model.eval() ends it)": model.training,
        "recurrent layers": model._is_stateful,
        # The longest request of a batch would change the positions of the others.
        "rope that depends on the batch": {"dynamic", "longrope"}.intersection(
            _rope_types(getattr(config, "rope_parameters", None))
        ),
        # Beyond it, the layer chooses among the tokens of all requests.
        f"keep_window_size {kept}, while the requests of a step may have "
        f"{max_num_tokens} tokens together (max_num_requests * max_context_len)": (
            kept is not None and kept < max_num_tokens
        ),
    }
    return next((reason for reason, found in checks.items() if found), None)


def _rope_types(parameters: TransformersObject) -> Iterator[str]:
    """Yield the kinds of rope, of which each type of layers may have its own.

    What is there may be nothing: rope by default, or none at all.
    """
    if isinstance(parameters, dict):
        named = cast("dict[str, object]", parameters)
        yield str(named.get("rope_type"))
        for of_layers in named.values():
            yield from _rope_types(of_layers)
