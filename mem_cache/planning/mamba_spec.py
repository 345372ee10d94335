"""The spec of layers with a state instead of K and V."""

from __future__ import annotations

from msgspec.structs import force_setattr

from ..errors import ConfigError
from ..sizes import as_size
from .kv_cache_spec import (
    CHUNKED_PREFILL_SIZE,
    KVCacheCapabilities,
    KVCacheSpec,
    Rewind,
    check_lengths,
)
from .page_part import PagePart, check_dtype, lay_out
from .sequences import as_tuple


class MambaSpec(KVCacheSpec, frozen=True, kw_only=True, tag="mamba"):
    """A state of fixed size, rewritten at every token: Mamba, linear attention.

    A page holds one state, whatever the page size: the newest one of a running request,
    or one that is kept, so that others can begin there.

    Attributes:
        page_size: Tokens a page of the layers with attention.
        shapes: Shape of each array of the state, on one rank.
        dtypes: The torch name of the dtype of each.
        checkpoint_size: Tokens between the states that are kept, a multiple of
            `page_size`; None keeps none, so that no prefix is reused.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    checkpoint_size: int | None = None

    def __post_init__(self) -> None:
        """Refuse what is out of range.

        Raises:
            ConfigError: A value is out of range.
        """
        super().__post_init__()
        shapes = tuple(
            tuple(
                as_size("a dimension of shapes", dim)
                for dim in as_tuple("a shape of shapes", shape)
            )
            for shape in as_tuple("shapes", self.shapes)
        )
        force_setattr(self, "shapes", shapes)
        force_setattr(self, "dtypes", as_tuple("dtypes", self.dtypes))
        if not shapes or len(shapes) != len(self.dtypes):
            raise ConfigError(
                "shapes and dtypes must name each array of the state, got "
                f"{len(shapes)} shapes and {len(self.dtypes)} dtypes"
            )
        for dtype in self.dtypes:
            check_dtype("dtypes", dtype)
        if self.checkpoint_size is not None:
            self._check_size("checkpoint_size")
            if self.checkpoint_size % self.page_size:
                raise ConfigError(
                    f"checkpoint_size must be a multiple of page_size "
                    f"({self.page_size}), got {self.checkpoint_size}"
                )

    @property
    def parts(self) -> tuple[PagePart, ...]:
        """The arrays of the state: "state_0", "state_1", ..."""
        arrays = zip(self.shapes, self.dtypes, strict=True)
        return lay_out(
            (f"state_{i}", shape, dtype) for i, (shape, dtype) in enumerate(arrays)
        )

    @property
    def capabilities(self) -> KVCacheCapabilities:
        """Reuse where a state was kept; a state cannot go back."""
        return KVCacheCapabilities(
            prefix_reuse=self.checkpoint_size is not None,
            rewind=Rewind.NONE,
            hit_granularity=self.checkpoint_size,
        )

    def max_num_pages(
        self, max_len: int, *, chunked_prefill_size: int = CHUNKED_PREFILL_SIZE
    ) -> int:
        """Return 1, or 2 with checkpoints: the state, and the kept one it began with.

        Raises:
            ConfigError: `max_len` or `chunked_prefill_size` is out of range.
        """
        check_lengths(max_len, chunked_prefill_size)
        return 1 if self.checkpoint_size is None else 2
