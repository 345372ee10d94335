"""The specs of attention that keeps K and V of each head."""

from __future__ import annotations

from msgspec.structs import force_setattr

from ..sizes import num_pages_for
from .kv_cache_spec import (
    CHUNKED_PREFILL_SIZE,
    KVCacheCapabilities,
    KVCacheSpec,
    Rewind,
    check_lengths,
)
from .page_part import PagePart, check_dtype, lay_out


class _HeadsSpec(KVCacheSpec, frozen=True, kw_only=True):
    """Base of the specs that keep K and V by head."""

    num_kv_heads: int
    head_dim: int
    v_head_dim: int = 0
    dtype: str

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_size("num_kv_heads")
        self._check_size("head_dim")
        self._check_size("v_head_dim", 0)
        if self.v_head_dim == 0:
            force_setattr(self, "v_head_dim", self.head_dim)
        check_dtype("dtype", self.dtype)

    @property
    def parts(self) -> tuple[PagePart, ...]:
        """K, then V: `[page_size, num_kv_heads, head_dim]` and with `v_head_dim`."""
        heads = (self.page_size, self.num_kv_heads)
        return lay_out(
            [
                ("k", (*heads, self.head_dim), self.dtype),
                ("v", (*heads, self.v_head_dim), self.dtype),
            ]
        )


class FullAttentionSpec(_HeadsSpec, frozen=True, tag="full_attention"):
    """K and V of every token, for as long as the request lives.

    Attributes:
        page_size: Tokens a page.
        num_kv_heads: Heads of K and of V on one rank.
        head_dim: Numbers a head of K.
        v_head_dim: Numbers a head of V; 0, as `head_dim`.
        dtype: The torch name of the dtype of K and V.

    Example:
        >>> spec = FullAttentionSpec(
        ...     page_size=16, num_kv_heads=8, head_dim=128, dtype="bfloat16"
        ... )
        >>> spec.page_bytes, spec.max_memory_bytes(max_len=100)
        (65536, 458752)
    """

    @property
    def capabilities(self) -> KVCacheCapabilities:
        """Reuse page by page; truncated to any position."""
        return KVCacheCapabilities(
            prefix_reuse=True, rewind=Rewind.ANY, hit_granularity=self.page_size
        )

    def max_num_pages(
        self, max_len: int, *, chunked_prefill_size: int = CHUNKED_PREFILL_SIZE
    ) -> int:
        """Return the pages of `max_len` tokens, however they are computed.

        Raises:
            ConfigError: `max_len` or `chunked_prefill_size` is out of range.
        """
        check_lengths(max_len, chunked_prefill_size)
        return num_pages_for(max_len, self.page_size)


class SlidingWindowSpec(_HeadsSpec, frozen=True, tag="sliding_window"):
    """K and V of the newest tokens only; pages that a window has left are free again.

    Attributes:
        page_size: Tokens a page.
        num_kv_heads: Heads of K and of V on one rank.
        head_dim: Numbers a head of K.
        v_head_dim: Numbers a head of V; 0, as `head_dim`.
        dtype: The torch name of the dtype of K and V.
        window_size: Tokens that a token attends to, itself included.
    """

    window_size: int

    def __post_init__(self) -> None:
        """Refuse what is out of range.

        Raises:
            ConfigError: A value is out of range.
        """
        super().__post_init__()
        self._check_size("window_size")

    @property
    def capabilities(self) -> KVCacheCapabilities:
        """Reuse page by page; what a window has left cannot come back."""
        return _forgets(self.page_size)

    def max_num_pages(
        self, max_len: int, *, chunked_prefill_size: int = CHUNKED_PREFILL_SIZE
    ) -> int:
        """Return the pages of a step and of the window before it, at any offset.

        Args:
            max_len: Longest request, in tokens, at least 1.
            chunked_prefill_size: Tokens of a request that one step computes at most.

        Raises:
            ConfigError: A length is out of range.
        """
        check_lengths(max_len, chunked_prefill_size)
        num_tokens = min(self.window_size - 1 + chunked_prefill_size, max_len)
        # The first of them may be the last of its page.
        num_pages = num_pages_for(num_tokens - 1, self.page_size) + 1
        return min(num_pages, num_pages_for(max_len, self.page_size))


class ChunkedLocalAttentionSpec(_HeadsSpec, frozen=True, tag="chunked_local_attention"):
    """K and V of the newest chunk only: a token attends to its chunk up to itself.

    Attributes:
        page_size: Tokens a page.
        num_kv_heads: Heads of K and of V on one rank.
        head_dim: Numbers a head of K.
        v_head_dim: Numbers a head of V; 0, as `head_dim`.
        dtype: The torch name of the dtype of K and V.
        chunk_size: Tokens a chunk.
    """

    chunk_size: int

    def __post_init__(self) -> None:
        """Refuse what is out of range.

        Raises:
            ConfigError: A value is out of range.
        """
        super().__post_init__()
        self._check_size("chunk_size")

    @property
    def capabilities(self) -> KVCacheCapabilities:
        """Reuse page by page; chunks before the newest cannot come back."""
        return _forgets(self.page_size)

    def max_num_pages(
        self, max_len: int, *, chunked_prefill_size: int = CHUNKED_PREFILL_SIZE
    ) -> int:
        """Return the pages of a step and of the chunk that it continues.

        Args:
            max_len: Longest request, in tokens, at least 1.
            chunked_prefill_size: Tokens of a request that one step computes at most.

        Raises:
            ConfigError: A length is out of range.
        """
        check_lengths(max_len, chunked_prefill_size)
        num_tokens = min(self.chunk_size - 1 + chunked_prefill_size, max_len)
        num_pages = num_pages_for(num_tokens, self.page_size)
        if self.chunk_size % self.page_size:  # a chunk may begin inside of a page
            num_pages = num_pages_for(num_tokens - 1, self.page_size) + 1
        return min(num_pages, num_pages_for(max_len, self.page_size))


def _forgets(page_size: int) -> KVCacheCapabilities:
    return KVCacheCapabilities(
        prefix_reuse=True, rewind=Rewind.STEP, hit_granularity=page_size
    )
