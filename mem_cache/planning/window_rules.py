"""Which layers attend to a window only, by how the code of each family reads a config.

Many families carry `sliding_window` in their configs and ignore it. So a window counts
only in a family whose code is known to use it, and in the layers in which it does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, TypeAlias

from ..errors import ConfigError
from .model_config import ModelConfig
from .model_families import is_known

_HasWindow: TypeAlias = Callable[[ModelConfig, int], bool]
"""Tells whether a layer has a window, given the config and the number of the layer."""


class WindowRule(NamedTuple):
    """How a family reads the fields about windows.

    Attributes:
        has_window: Tells whether a layer has one, where `layer_types` does not.
        by_layer_types: Whether `layer_types` tells it, if it is given.
        last_is_full: Whether the last layer has none, whatever else is said.
        reads_chunks: Whether `attention_chunk_size` counts where `layer_types` does not
            say so.
    """

    has_window: _HasWindow
    by_layer_types: bool = True
    last_is_full: bool = False
    reads_chunks: bool = False


def window_rule(model_type: str) -> WindowRule:
    """Return how a family reads the fields about windows.

    Of a family that is not known, only `layer_types` is believed: to keep all tokens
    is never wrong. A config that names no family is taken at its word.

    Args:
        model_type: What the config calls the family; empty, if it names none.
    """
    if not model_type:
        return _AT_ITS_WORD
    return _RULES.get(model_type, _IGNORED if is_known(model_type) else _LISTED)


def _never(config: ModelConfig, layer: int) -> bool:
    return False


def _always(config: ModelConfig, layer: int) -> bool:
    return True


def _but_each(period: int, offset: int = -1) -> _HasWindow:
    """Let one layer of each period attend to everything: the last, or another."""
    return lambda config, layer: layer % period != offset % period


def _from_third_but_each_fourth(config: ModelConfig, layer: int) -> bool:
    last = config.num_hidden_layers - 1
    return layer >= 2 and layer % 4 != 1 and layer != last


def _by_pattern(config: ModelConfig, layer: int) -> bool:
    pattern = config.sliding_window_pattern
    if isinstance(pattern, str):  # such as "LLLG": local, local, local, global
        return not pattern or pattern[layer % len(pattern)] != "G"
    if pattern == 0:
        raise ConfigError("sliding_window_pattern must be >= 1, got 0")
    return pattern is None or (layer + 1) % pattern != 0


def _above(config: ModelConfig, layer: int) -> bool:
    return layer >= config.max_window_layers


def _above_if_on(config: ModelConfig, layer: int) -> bool:
    return config.use_sliding_window and layer >= config.max_window_layers


def _even_below_if_on(config: ModelConfig, layer: int) -> bool:
    below = layer < config.max_window_layers
    return config.use_sliding_window and below and layer % 2 == 0


def _always_if_on(config: ModelConfig, layer: int) -> bool:
    return config.use_sliding_window


def _without_rope_if_on(config: ModelConfig, layer: int) -> bool:
    return config.use_sliding_window and not config.has_rope(layer)


def _fields_say(config: ModelConfig, layer: int) -> bool:
    if config.sliding_window_pattern is not None:
        return config.use_sliding_window and _by_pattern(config, layer)
    return _above_if_on(config, layer)


_AT_ITS_WORD: Final = WindowRule(_fields_say, reads_chunks=True)
_IGNORED: Final = WindowRule(_never, by_layer_types=False)
_LISTED: Final = WindowRule(_never)
_EVERYWHERE: Final = WindowRule(_always, by_layer_types=False)
_QWEN2: Final = WindowRule(_above_if_on)
_PATTERN: Final = WindowRule(_by_pattern)
_GEMMA2: Final = WindowRule(_but_each(2))
_GEMMA4: Final = WindowRule(_but_each(6), last_is_full=True)
_OLMO3: Final = WindowRule(_but_each(4))
_GRANITE: Final = WindowRule(_but_each(4, 0))

_RULES: Final[Mapping[str, WindowRule]] = MappingProxyType(
    {
        "afmoe": _OLMO3,
        "cohere2": _PATTERN,
        "cohere2_moe": _PATTERN,
        "cwm": _GRANITE,
        "doge": _EVERYWHERE,
        "dots1": WindowRule(_above),
        "exaone4": _PATTERN,
        "exaone_moe": _PATTERN,
        "flint": WindowRule(_from_third_but_each_fourth),
        "gemma2": _GEMMA2,
        "gemma3_text": _PATTERN,
        "gemma3n_text": WindowRule(_but_each(5)),
        "gemma4_text": _GEMMA4,
        "gemma4_unified_text": _GEMMA4,
        "gpt_oss": _GEMMA2,
        "granite_swa": _GRANITE,
        "granitemoe_swa": _GRANITE,
        "kolibri1": WindowRule(_but_each(5)),
        "laguna": _LISTED,
        "llama4_text": WindowRule(_never, reads_chunks=True),
        "mellum": _LISTED,
        "minimax": _EVERYWHERE,
        "ministral": WindowRule(_always),
        "ministral3": _EVERYWHERE,
        "mistral": _EVERYWHERE,
        "mixtral": _EVERYWHERE,
        "olmo3": _OLMO3,
        "phi3": _EVERYWHERE,
        "phimoe": _EVERYWHERE,
        "qwen2": _QWEN2,
        "qwen2_5_vl": _QWEN2,
        "qwen2_5_vl_text": _QWEN2,
        "qwen2_moe": WindowRule(_even_below_if_on),
        "qwen2_vl": _QWEN2,
        "qwen2_vl_text": _QWEN2,
        "qwen3": _QWEN2,
        "qwen3_moe": WindowRule(_always_if_on, by_layer_types=False),
        "smollm3": WindowRule(_without_rope_if_on),
        "starcoder2": _EVERYWHERE,
        "vaultgemma": _GEMMA2,
    }
)
"""The families whose code uses a window; the other known ones ignore it."""
