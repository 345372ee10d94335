"""What the cache of one layer holds: a value, and the formulas that follow from it.

Bytes here are those of one rank: heads are divided by the tensor-parallel size before.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec
from msgspec.structs import force_setattr

from ..sizes import as_size
from .page_part import PagePart, aligned_bytes

CHUNKED_PREFILL_SIZE = 2048
"""Prompt tokens of a request that a step computes at most, unless one says so."""


class Rewind(StrEnum):
    """How far back a request may be truncated.

    ANY: to any computed position. STEP: only within what the newest step computed, as
    for rejected drafts. NONE: not at all.
    """

    ANY = "any"
    STEP = "step"
    NONE = "none"


class KVCacheCapabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What a cache can do.

    Attributes:
        prefix_reuse: Whether a request may begin with the cached prefix of another.
        rewind: How far back a request may be truncated.
        hit_granularity: Tokens of which the length of a hit is a multiple; None without
            reuse.
    """

    prefix_reuse: bool
    rewind: Rewind
    hit_granularity: int | None


class KVCacheSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the specs; a subclass says what a page holds and how many it takes.

    Attributes:
        page_size: Tokens a page.
    """

    page_size: int

    def __post_init__(self) -> None:
        """Refuse what is out of range; fields become plain ints.

        Raises:
            ConfigError: A value is out of range.
        """
        self._check_size("page_size")

    @property
    def parts(self) -> tuple[PagePart, ...]:
        """The arrays that lie in one page of one layer, in order."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it holds")

    @property
    def capabilities(self) -> KVCacheCapabilities:
        """What a cache of this kind can do."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it can do")

    def max_num_pages(
        self, max_len: int, *, chunked_prefill_size: int = CHUNKED_PREFILL_SIZE
    ) -> int:
        """Return the most pages that one request has at a time.

        Args:
            max_len: Longest request, in tokens, at least 1.
            chunked_prefill_size: Tokens of a request that one step computes at most.

        Raises:
            ConfigError: A length is out of range.
        """
        raise NotImplementedError(f"{type(self).__name__} does not count its pages")

    @property
    def type_id(self) -> str:
        """A name that two specs share if, and only if, their caches are alike."""
        return repr(self)

    def is_same_type(self, other: KVCacheSpec) -> bool:
        """Tell whether the cache of another spec is laid out and kept like this one."""
        return self.type_id == other.type_id

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of one layer, a multiple of 16."""
        return max(aligned_bytes(part.offset + part.size_bytes) for part in self.parts)

    def max_memory_bytes(
        self, max_len: int, *, chunked_prefill_size: int = CHUNKED_PREFILL_SIZE
    ) -> int:
        """Return the most bytes of one layer that one request has at a time.

        Args:
            max_len: Longest request, in tokens, at least 1.
            chunked_prefill_size: Tokens of a request that one step computes at most.

        Raises:
            ConfigError: A length is out of range.
        """
        num_pages = self.max_num_pages(
            max_len, chunked_prefill_size=chunked_prefill_size
        )
        return num_pages * self.page_bytes

    def _check_size(self, name: str, minimum: int = 1) -> None:
        """Make a field a plain int, or refuse it."""
        force_setattr(self, name, as_size(name, getattr(self, name), minimum))


def check_lengths(max_len: int, chunked_prefill_size: int) -> None:
    """Refuse lengths of which no request or no step is.

    Raises:
        ConfigError: A length is out of range.
    """
    as_size("max_len", max_len)
    as_size("chunked_prefill_size", chunked_prefill_size)
