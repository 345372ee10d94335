"""The handle of a running request, as callers give it back."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol


class RequestHandle(Protocol):
    """What everybody may read of the `RequestKV` that `admit` returned.

    A cache asks its callers for no more, so that it is the one who refuses what is no
    request of its own: compiled code would do so before with an error that says less.
    """

    @property
    def req_pool_idx(self) -> int:
        """The request's row in the request table."""
        ...

    @property
    def namespace(self) -> Hashable:
        """What separates its prefix from others'."""
        ...

    @property
    def protected_len(self) -> int:
        """Positions in pages of the tree, in tokens."""
        ...

    @property
    def committed_len(self) -> int:
        """Positions with computed K and V, in tokens."""
        ...

    @property
    def allocated_len(self) -> int:
        """Positions with a slot, in tokens."""
        ...
