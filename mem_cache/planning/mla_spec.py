"""The spec of multi-head latent attention (DeepSeek-AI, 2024, arXiv:2405.04434)."""

from __future__ import annotations

from ..sizes import num_pages_for
from .kv_cache_spec import (
    CHUNKED_PREFILL_SIZE,
    KVCacheCapabilities,
    KVCacheSpec,
    Rewind,
    check_lengths,
)
from .page_part import PagePart, check_dtype, lay_out


class MLASpec(KVCacheSpec, frozen=True, kw_only=True, tag="mla"):
    """One latent vector a token, from which all heads make K and V (MLA).

    Every rank of a tensor-parallel group holds all of it. The values are the first
    `latent_dim` numbers of the same vector, so there is no part for V.

    Attributes:
        page_size: Tokens a page.
        latent_dim: Numbers of the compressed K and V of a token.
        rope_dim: Numbers of the rotated key that all heads share.
        dtype: The torch name of the dtype.
        index_dim: Numbers of the key by which sparse attention selects tokens; 0, if
            it attends to all.
    """

    latent_dim: int
    rope_dim: int
    dtype: str
    index_dim: int = 0

    def __post_init__(self) -> None:
        """Refuse what is out of range.

        Raises:
            ConfigError: A value is out of range.
        """
        super().__post_init__()
        self._check_size("latent_dim")
        self._check_size("rope_dim", 0)
        self._check_size("index_dim", 0)
        check_dtype("dtype", self.dtype)

    @property
    def parts(self) -> tuple[PagePart, ...]:
        """The vectors, `[page_size, 1, latent_dim + rope_dim]`, and the index keys."""
        width = self.latent_dim + self.rope_dim
        arrays = [("latent", (self.page_size, 1, width), self.dtype)]
        if self.index_dim:
            arrays.append(("index", (self.page_size, 1, self.index_dim), self.dtype))
        return lay_out(arrays)

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
