"""The kinds of caches that a layer can have."""

from __future__ import annotations

from typing import Literal, TypeAlias

LayerCache: TypeAlias = Literal["full", "sliding", "chunked", "state"]
"""What a layer keeps: all tokens, a window, a chunk, or a state."""

LayerCaches: TypeAlias = tuple[LayerCache, ...]
"""The caches of one layer, side by side."""
