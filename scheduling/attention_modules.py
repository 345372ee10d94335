"""Asks a loaded transformers model what its layers have to keep."""

from __future__ import annotations

from typing import TypeAlias

from radixkv.mem_cache.errors import ConfigError
from radixkv.mem_cache.planning import (
    AnyKVCacheSpec,
    MambaSpec,
    MLASpec,
    SlidingWindowSpec,
    specs_from_model_config,
)

from .models import LoadedModel, TransformersObject

_STATE_WORDS = (
    "Mamba",
    "Mixer",
    "DeltaNet",
    "DeltaAttention",
    "ShortConv",
    "Lightning",
)
"""What transformers calls the classes of layers with a state."""

_Modules: TypeAlias = dict[tuple[int, bool], tuple[str, TransformersObject]]
"""Name and module by layer, and by whether it has a state."""


def get_kv_cache_spec(
    model: TransformersObject,
    *,
    page_size: int = 16,
    dtype: str | None = None,
    checkpoint_size: int | None = None,
) -> dict[str, AnyKVCacheSpec]:
    """Return the spec of each layer of a loaded model, by the name of its module.

    What the config says is checked against all modules that use a cache: each has one
    spec, and none is left over; heads, windows and channels are those that the modules
    really have.

    Args:
        model: A transformers causal language model, whole on this process.
        page_size: Tokens a page, at least 1.
        dtype: The torch name of the dtype of K and V; the model's if not given.
        checkpoint_size: Tokens between the states that are kept for reuse; None keeps
            none.

    Raises:
        ConfigError: The config and the modules contradict each other, the model is no
            decoder, or an argument is out of range.
    """
    if isinstance(model, LoadedModel):
        raise ConfigError("get_kv_cache_spec takes the `model` of a LoadedModel")
    config = model.config.get_text_config(decoder=True)
    specs = specs_from_model_config(
        {**config.to_dict(), "dtype": str(model.dtype)},
        page_size=page_size,
        dtype=dtype,
        checkpoint_size=checkpoint_size,
        assume_dense=True,  # what the fields say is checked against the modules
    )
    modules = _modules_with_cache(model)
    named: dict[str, AnyKVCacheSpec] = {}
    for generic, spec in specs.items():
        _, layer, kind = generic.split(".")
        key = int(layer), kind == "state"
        if key not in modules:
            raise ConfigError(f"the config names {generic}, the model has none")
        name, module = modules.pop(key)
        _check_agrees(name, module, spec)
        named[name] = spec
    # Layers that read K and V of others have a module as well, but keep nothing.
    unknown = [
        name
        for name, module in modules.values()
        if not getattr(module, "is_kv_shared_layer", False)
    ]
    if unknown:
        raise ConfigError(f"the config does not say what these keep: {unknown}")
    return named


def _modules_with_cache(model: TransformersObject) -> _Modules:
    """Return the attention and state modules of the decoder."""
    decoder = {id(module) for module in model.get_decoder().modules()}
    inside = [
        (name, module)
        for name, module in model.named_modules(remove_duplicate=False)
        if id(module) in decoder and isinstance(getattr(module, "layer_idx", None), int)
    ]
    found: _Modules = {}
    for name, module in inside:
        if any(other.startswith(f"{name}.") for other, _ in inside):
            continue  # a whole layer
        words = type(module).__name__
        has_state = any(word in words for word in _STATE_WORDS)
        if not has_state and "Attention" not in words:
            continue  # a layer without a cache
        # Not `layer_idx`, which is -1 where layers share a module.
        layers = [int(part) for part in name.split(".") if part.isdecimal()]
        if len(layers) != 1 or (layers[0], has_state) in found:
            raise ConfigError(f"the model has two modules for the layer of {name}")
        found[layers[0], has_state] = name, module
    return found


def _check_agrees(name: str, module: TransformersObject, spec: AnyKVCacheSpec) -> None:
    """Check a spec against the sizes that a module shows."""
    for what, expected, got in _sizes(module, spec):
        if got is not None and got != expected:
            raise ConfigError(
                f"{what} of {name} must be {expected}, as the config says, got {got}"
            )
    if getattr(module, "is_causal", True) is False:
        raise ConfigError(f"attention must be causal, got {name}")


def _sizes(
    module: TransformersObject, spec: AnyKVCacheSpec
) -> list[tuple[str, int, int | None]]:
    """Return what can be compared: its name, what the spec says, what is there."""
    if isinstance(spec, MambaSpec):
        conv = getattr(module, "conv1d", None) or getattr(module, "conv", None)
        channels = None if conv is None else int(conv.weight.shape[0])
        return [("the channels", spec.shapes[0][0], channels)]
    if isinstance(spec, MLASpec):
        width = spec.latent_dim + spec.rope_dim
        return [("kv_a_proj", width, _width(module, "kv_a_proj_with_mqa"))]
    sizes = [
        ("k_proj", spec.num_kv_heads * spec.head_dim, _width(module, "k_proj")),
        ("v_proj", spec.num_kv_heads * spec.v_head_dim, _width(module, "v_proj")),
    ]
    # Modules without a window may show the one that others have.
    if isinstance(spec, SlidingWindowSpec):
        window = getattr(module, "sliding_window", None)
        sizes.append(("sliding_window", spec.window_size, window))
    return sizes


def _width(module: TransformersObject, name: str) -> int | None:
    projection = getattr(module, name, None)
    return getattr(projection, "out_features", None)
