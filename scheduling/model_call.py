"""Calls a transformers model for one packed step, whatever its version names things."""

from __future__ import annotations

import inspect
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

import torch

from radixkv.mem_cache.errors import ConfigError

from .models import TransformersObject
from .step_cache import StepCache, under_way

_CACHE_KEYWORDS: Final = ("cache", "past_key_values")
"""What transformers calls the cache, the newest version first."""


class ModelCall:
    """A model's forward over packed tokens, with a cache of ours.

    Attributes:
        model: The model; its code stays untouched.
        attention: Name of the attention that is put in when it is called.
    """

    def __init__(self, model: TransformersObject, attention: str) -> None:
        """Look at what the forward takes; it is not called.

        Args:
            model: A transformers causal language model.
            attention: Name of a registered attention.

        Raises:
            ConfigError: It takes no cache.
        """
        self.model = model
        self.attention = attention
        takes = inspect.signature(model.forward).parameters
        takes_all = any(each.kind is each.VAR_KEYWORD for each in takes.values())
        self._takes_positions = takes_all or "position_ids" in takes
        self._takes_samples = "logits_to_keep" in takes
        keyword = next((name for name in _CACHE_KEYWORDS if name in takes), None)
        if keyword is None:
            raise ConfigError(
                f"the model must take its cache as one of {_CACHE_KEYWORDS}, got "
                f"{type(model).__name__} with {sorted(takes)}"
            )
        self._cache_keyword = keyword

    def logits(
        self,
        cache: StepCache,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        samples: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Compute a step.

        Args:
            cache: Takes K and V, and attends.
            tokens: int64 `[num_tokens]`.
            positions: Of the tokens in their requests, int64 `[num_tokens]`.
            samples: Places to return logits of, int64 `[num_samples]`; all if not
                given.

        Returns:
            `[num_samples, vocab_size]`.
        """
        model = self.model
        # With another attention in place, transformers would ignore the cache without a
        # word.
        if model.config._attn_implementation != self.attention:
            model.set_attn_implementation(self.attention)
        # Without `use_cache`, no model makes a cache of its own; this one is there.
        places = torch.arange(len(tokens), device=tokens.device)
        options: dict[str, object] = {self._cache_keyword: cache, "use_cache": False}
        if self._takes_positions:
            options["position_ids"] = positions[None]
        if self._takes_samples:
            # Never a number, by which some models cut more than their logits.
            options["logits_to_keep"] = places if samples is None else samples
        with under_way(cache), torch.inference_mode():
            logits: torch.Tensor = model(input_ids=tokens[None], **options).logits[0]
        if samples is not None and not self._takes_samples:
            return logits[samples]
        return logits


@contextmanager
def attention_kept(model: TransformersObject) -> Generator[None]:
    """Give a model the attention back that it has now.

    Args:
        model: A transformers model.
    """
    before = model.config._attn_implementation
    try:
        yield
    finally:
        model.set_attn_implementation(before)
