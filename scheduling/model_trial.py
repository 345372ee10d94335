"""Tries a transformers model: which layers keep what, and what its queries see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from radixkv.mem_cache import KVCacheInfo
from radixkv.mem_cache.errors import ConfigError

from .gathered_attention import gathered_attention
from .mask_rules import MaskRule, Reach, reach_of
from .model_call import ModelCall, attention_kept
from .models import TransformersObject
from .step_cache import LayerUse, StepCache, as_transformers_cache
from .transformers_attention import ATTENTION, UNMASKED, register_attention

_NUM_TOKENS: Final = 5
"""Tokens of the trial, at most."""


@dataclass(frozen=True, slots=True)
class ModelTrial:
    """What a model was seen to do.

    Attributes:
        attention: Name of the attention under which it works.
        layers: What it does with each layer of its cache, by the number it gives.
        reaches: What the sizes in its mask rules mean.
        modules: Names of the modules that attend, in their order.
    """

    attention: str
    layers: Mapping[int, LayerUse]
    reaches: Mapping[int | None, Reach]
    modules: tuple[str, ...]


def try_model(model: TransformersObject) -> ModelTrial:
    """Run a few tokens through a model, and watch what it does with its cache.

    No config is read: layers say themselves which they are, what they keep, and, by
    their mask, what they see.

    Args:
        model: A transformers causal language model, in evaluation mode.

    Raises:
        ConfigError: It keeps or sees what is not supported; or it failed.
    """
    register_attention()
    with attention_kept(model):
        try:
            return _try(model, ATTENTION)
        except ConfigError:
            raise
        except Exception as error:  # whatever the code of a model may raise
            masked = error
        try:
            # Some compute with their mask, which a rule is not. They do with none.
            trial = _try(model, UNMASKED)
        except ConfigError:
            raise
        except Exception:
            raise ConfigError(
                f"the model must run with a cache that it did not make, got "
                f"{type(model).__name__}, which raises {masked!r}"
            ) from masked
    if getattr(model.config.get_text_config(), "sliding_window", None):
        raise ConfigError(
            f"windows must come from masks, got {type(model).__name__}, which makes "
            "masks of its own"
        )
    return trial


class TrialCache(StepCache):
    """Keeps nothing but notes, of one request that begins."""

    def __init__(self, num_tokens: int) -> None:
        """Begin.

        Args:
            num_tokens: Tokens of the request, all of which are computed.
        """
        self.info = KVCacheInfo.pack([1], [0], [num_tokens], [0], [0, 0], b"")
        self.shapes: dict[int, tuple[torch.Size, torch.Size]] = {}
        self.modules: dict[int, TransformersObject] = {}
        self.attending: list[TransformersObject] = []
        self.gathered: set[int] = set()
        self.reaches: dict[int | None, Reach] = {}
        # K is kept, so that no other tensor can have its id.
        self._returned: dict[int, tuple[int, torch.Tensor, torch.Tensor]] = {}
        self._newest: int | None = None

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Note what a layer keeps; see `StepCache`."""
        if layer_idx in self.shapes:
            raise ConfigError(
                f"a layer must keep K and V once a step, got number {layer_idx} twice"
            )
        self.shapes[layer_idx] = key_states.shape, value_states.shape
        self._returned[id(key_states)] = layer_idx, key_states, value_states
        self._newest = layer_idx
        return key_states, value_states

    def attend(
        self,
        module: TransformersObject,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: MaskRule | torch.Tensor | None,
        *,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """Note who attends to what, and attend; see `StepCache`."""
        source, _, kept = self._returned.get(id(key), (None, None, None))
        is_same = source is not None and kept is value
        layer = source if is_same else self._newest
        if layer is None:
            raise ConfigError(
                "layers must keep their K and V in the cache that the model is given, "
                f"got {type(module).__name__}, which does not"
            )
        reach = self._reach(mask, query.device)
        if not is_same or isinstance(mask, torch.Tensor) or reach.chunk is not None:
            self.gathered.add(layer)
        self.modules.setdefault(layer, module)
        self.attending.append(module)
        return gathered_attention(
            query, key, value, self.info, scale=scale, mask=mask, softcap=softcap
        )

    def get_seq_length(self, layer_idx: int | None = None) -> torch.Tensor | int:
        """Return 0: positions are places here."""
        return 0

    def _reach(
        self, mask: MaskRule | torch.Tensor | None, device: torch.device
    ) -> Reach:
        if not isinstance(mask, MaskRule):
            return Reach()
        size = mask.local_size
        reach = reach_of(mask, device)
        if self.reaches.setdefault(size, reach) != reach:
            raise ConfigError(
                f"a size must mean one kind of mask, got {size} for "
                f"{self.reaches[size]} and {reach}"
            )
        return reach


def _try(model: TransformersObject, attention: str) -> ModelTrial:
    config = model.config.get_text_config()
    longest = getattr(config, "max_position_embeddings", None) or _NUM_TOKENS
    num_tokens = min(_NUM_TOKENS, longest)
    cache = as_transformers_cache(TrialCache)(num_tokens)
    places = torch.arange(num_tokens, device=model.device)
    ModelCall(model, attention).logits(cache, places % config.vocab_size, places)
    return _told_by(cache, model, attention)


def _told_by(
    cache: TrialCache, model: TransformersObject, attention: str
) -> ModelTrial:
    names = {id(module): name for name, module in model.named_modules()}
    if not cache.shapes or cache.shapes.keys() != cache.modules.keys():
        raise ConfigError(
            "each layer that keeps K and V must attend to them, got "
            f"{type(model).__name__} with {sorted(cache.shapes)} kept and "
            f"{sorted(cache.modules)} attended to"
        )
    layers = {
        layer: LayerUse(
            name=_layer_name(cache, layer, names),
            num_kv_heads=k[1],
            head_dim=k[3],
            v_head_dim=v[3],
            is_gathered=layer in cache.gathered,
        )
        for layer, (k, v) in cache.shapes.items()
    }
    for use, (k, v) in zip(layers.values(), cache.shapes.values(), strict=True):
        if k[1] != v[1]:
            raise ConfigError(
                f"K and V must have as many heads, got {k[1]} and {v[1]} for {use.name}"
            )
    modules = dict.fromkeys(names[id(module)] for module in cache.attending)
    return ModelTrial(attention, layers, cache.reaches, tuple(modules))


def _layer_name(cache: TrialCache, layer: int, names: Mapping[int, str]) -> str:
    """Return the name of a layer: its module's, unless other layers have that, too."""
    module = cache.modules[layer]
    is_shared = sum(other is module for other in cache.modules.values()) > 1
    return f"{names[id(module)]}.{layer}" if is_shared else names[id(module)]
