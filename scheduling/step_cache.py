"""The cache that a transformers model is handed: it stores, and says who is asking."""

from __future__ import annotations

import functools
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch

from radixkv.mem_cache import KVPool
from radixkv.mem_cache.device_step import DeviceStep
from radixkv.mem_cache.errors import ConfigError

from .attention_backends import AttentionBackend
from .gathered_attention import gather_kv, gathered_attention
from .mask_rules import MaskRule, Reach
from .models import TransformersObject, import_transformers


@dataclass(frozen=True, slots=True)
class LayerUse:
    """What a model was seen to do with one layer of its cache.

    Attributes:
        name: Name of the module that attends to it first, and of the pool's layer.
        num_kv_heads: Heads of K and of V.
        head_dim: Numbers a head of K.
        v_head_dim: Numbers a head of V.
        is_gathered: Whether what attends wants K and V of all positions in its hands,
            since it changes them, or sees chunks: no paged kernel can read for it.
    """

    name: str
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    is_gathered: bool


class StepCache:
    """A cache as a model's layers see it, for one forward.

    `update` is where a layer says which it is and gives its K and V away, each once. So
    it is believed, and neither the config nor what the attention is called with: some
    layers attend twice, share K and V with others, or have a wrong number.
    """

    layers: ClassVar[list[object]] = []
    """None of transformers' own, which some models count."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Take K and V of the step's tokens; see transformers' `Cache`.

        Args:
            key_states: `[1, num_kv_heads, num_tokens, head_dim]`.
            value_states: `[1, num_kv_heads, num_tokens, v_head_dim]`.
            layer_idx: Which layer's.
            *args: What old versions of transformers pass on.
            **kwargs: The same.

        Returns:
            What the layer attends to.
        """
        raise NotImplementedError

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
        """Attend to what `update` returned, or to what a layer has made of it.

        Args:
            module: The attention layer.
            query: `[1, num_q_heads, num_tokens, head_dim]`.
            key: K, heads first.
            value: V, heads first.
            mask: What the layer has in the place of a mask.
            scale: Factor on the scores.
            softcap: Bound of the scores; none if not given.

        Returns:
            `[1, num_tokens, num_q_heads, v_head_dim]`.
        """
        raise NotImplementedError

    def get_seq_length(self, layer_idx: int | None = None) -> torch.Tensor | int:
        """Return what a layer must add to the places in a batch to have positions.

        Models ask without a layer: they get their positions as an argument.

        Args:
            layer_idx: Who asks.
        """
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return the columns of a mask and the first of them; no mask is made of it.

        Args:
            query_length: Tokens of the step.
            layer_idx: Who asks.
        """
        return query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Return the place of the first query; no mask is made of it.

        Args:
            layer_idx: Who asks.
        """
        return 0

    def _refuse_state(self, *args: object, **kwargs: object) -> NoReturn:
        raise ConfigError(
            "TransformersRunner supports layers that keep K and V by head, and nothing "
            "else, got one with a state or an index"
        )

    get_conv_state = update_conv_state = _refuse_state
    get_recurrent_state = update_recurrent_state = _refuse_state
    get_linear_cache = update_indexer = has_previous_state = _refuse_state

    @property
    def is_compileable(self) -> bool:
        """Whether a model may prepare for `torch.compile`: there is no need."""
        return False

    @property
    def is_sliding(self) -> list[bool]:
        """Which layers have windows: nobody need know."""
        return []


class PagedStepCache(StepCache):
    """Stores to a pool, and attends to its pages."""

    def __init__(
        self,
        pool: KVPool,
        step: DeviceStep,
        attention: AttentionBackend,
        layers: Mapping[int, LayerUse],
        reaches: Mapping[int | None, Reach],
        positions: torch.Tensor,
    ) -> None:
        """Begin a step.

        Args:
            pool: Where K and V live.
            step: Its numbers; the attention has taken them.
            attention: Who attends to pages.
            layers: What the model does with each layer.
            reaches: What the sizes in its mask rules mean.
            positions: Position of each token, int64 `[num_tokens]`.
        """
        self._pool = pool
        self._step = step
        self._attention = attention
        self._layers = layers
        self._reaches = reaches
        self._positions = positions
        self._slots = step.slot_mapping(page_size=pool.page_size)
        # What a layer attends to is known by its K, and K is kept, so that no other
        # tensor can have its id.
        self._returned: dict[int, tuple[LayerUse, torch.Tensor, torch.Tensor]] = {}

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store K and V; see `StepCache`."""
        use = self._layers.get(layer_idx)
        if use is None:
            raise ConfigError(
                f"the model must keep what it kept when it was tried, layers "
                f"{list(self._layers)}, got {layer_idx}"
            )
        layer = self._pool.layers[use.name]
        layer.store(_unpack(key_states), _unpack(value_states), self._slots)
        if use.is_gathered:
            dtype = key_states.dtype
            return gather_kv(layer, self._step, self._pool.page_size, dtype)
        self._returned[id(key_states)] = use, key_states, value_states
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
        """Attend to pages where it can be, else to what was gathered."""
        use, _, kept = self._returned.get(id(key), (None, None, None))
        if use is None or kept is not value:
            self._check_gathered(module, key)
            return gathered_attention(
                query,
                key,
                value,
                self._step.info,
                scale=scale,
                mask=mask,
                softcap=softcap,
            )
        attended = self._attention.attend(
            _unpack(query),
            self._pool.layers[use.name],
            scale=scale,
            window=self._window(module, mask),
            softcap=softcap,
        )
        return attended[None]

    def get_seq_length(self, layer_idx: int | None = None) -> torch.Tensor | int:
        """Return how far positions are from places; see `StepCache`."""
        if layer_idx is None:
            return 0
        places = torch.arange(len(self._positions), device=self._positions.device)
        return self._positions - places

    def _check_gathered(self, module: TransformersObject, key: torch.Tensor) -> None:
        columns = int(self._step.info.stops.sum())
        is_known = any(use.is_gathered for use in self._layers.values())
        if not is_known or key.shape[2] != columns:
            raise ConfigError(
                "a layer must attend to what it attended to when the model was tried, "
                f"got {type(module).__name__} with {key.shape[2]} positions of its own"
            )

    def _window(
        self, module: TransformersObject, mask: MaskRule | torch.Tensor | None
    ) -> int | None:
        if mask is None:
            return None
        size = mask.local_size if isinstance(mask, MaskRule) else -1
        reach = self._reaches.get(size)
        if reach is None or reach.chunk is not None:
            raise ConfigError(
                "a layer must have the mask that it had when the model was tried, got "
                f"{type(module).__name__} with another one"
            )
        return reach.window


_step: ContextVar[StepCache] = ContextVar("step")
"""Some layers drop the keywords that they do not know, so the step goes by here."""


def current_step() -> StepCache | None:
    """Return the cache of the forward that is under way in this thread, if any."""
    return _step.get(None)


@contextmanager
def under_way(cache: StepCache) -> Generator[None]:
    """Make a cache the one of the forward that follows."""
    token = _step.set(cache)
    try:
        yield
    finally:
        _step.reset(token)


@functools.cache
def as_transformers_cache(kind: type[Any]) -> Any:  # noqa: ANN401
    """Return a class of caches as one of transformers', for models that ask for it.

    Args:
        kind: A `StepCache`, whose methods go first.
    """
    return type(kind.__name__, (kind, import_transformers().Cache), {})


def _unpack(states: torch.Tensor) -> torch.Tensor:
    """View `[1, num_heads, num_tokens, dim]` as `[num_tokens, num_heads, dim]`."""
    return states[0].transpose(0, 1)
