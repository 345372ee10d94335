"""One layer's part of a KV pool: views of the pool's buffer."""

from __future__ import annotations

from types import MappingProxyType
from typing import Final, Literal, TypeAlias, get_args

import torch

from radixkv.kernels import store_kv
from radixkv.kernels.backend import Backend
from radixkv.kernels.checks import check_factor

from .errors import ConfigError
from .planning import AnyKVCacheSpec, KVCacheConfig, MLASpec, PagePart
from .sizes import as_number

KVLayout: TypeAlias = Literal["NHD", "HND"]
"""Which comes first within a page, the slots (N) or the heads (H); D is a head."""

_FLOAT8: Final = torch.float8_e4m3fn
_STORABLE: Final = (torch.float32, torch.float16, torch.bfloat16, _FLOAT8)


class KVLayer:
    """What one layer keeps, as views of its pool's buffer; nothing is copied.

    A pool makes these. When it is resized the views move, and those that were taken
    before are stale; the object stays, and so does a model that it is bound to.

    Between a page and the next, a view has gaps: there lies V, and with all layers of a
    page together, the others' K and V. Within a page it has none, so ``k[page, slot]``
    finds a token, and ``k.transpose(1, 2)`` is the same with the heads first, "HND".

    Attributes:
        name: Its name in the config.
        spec: What it keeps.
        parts: The arrays that the spec names, each `[num_pages + 1, ...]`.
        k_scale: What K in float8 is a multiple of.
        v_scale: What V in float8 is a multiple of.
    """

    __slots__ = ("_backend", "_tensor", "k_scale", "name", "parts", "spec", "v_scale")

    def __init__(self, name: str, spec: AnyKVCacheSpec, backend: Backend) -> None:
        """Make a layer without views; its pool calls `look_at`.

        Args:
            name: Its name in the config.
            spec: What it keeps.
            backend: Which implementation of the ops; see `pick_backend`.
        """
        self.name = name
        self.spec = spec
        self.k_scale = self.v_scale = 1.0
        self.parts = MappingProxyType[str, torch.Tensor]({})
        self._backend: Backend = backend

    def look_at(self, buffer: torch.Tensor, config: KVCacheConfig) -> None:
        """Take the views of a buffer.

        Args:
            buffer: The pool's buffer, uint8 `[buffer_bytes]`.
            config: How it is laid out.

        Raises:
            ConfigError: A number would lie across the places of two.
        """
        tensor = config.tensor_of(self.name)
        self.parts = MappingProxyType(
            {
                part.name: _view(
                    buffer,
                    part,
                    tensor.address(self.name, page=0) + part.offset,
                    tensor.page_stride,
                    config.num_pages + 1,
                )
                for part in self.spec.parts
            }
        )

    @property
    def k(self) -> torch.Tensor:
        """K, `[num_pages + 1, page_size, num_kv_heads, head_dim]`.

        With latent attention it is the vectors, of one head.

        Raises:
            ConfigError: The layer keeps a state.
        """
        for name in ("k", "latent"):
            if name in self.parts:
                return self.parts[name]
        raise ConfigError(
            f"layer must keep K and V, got {self.name}, which keeps {list(self.parts)}"
        )

    @property
    def v(self) -> torch.Tensor:
        """V, like K but with `v_head_dim` numbers a head.

        With latent attention it is a part of K, the first `latent_dim` numbers.

        Raises:
            ConfigError: The layer keeps a state.
        """
        k = self.k
        if isinstance(self.spec, MLASpec):
            return k[..., : self.spec.latent_dim]
        return self.parts["v"]

    def kv(self, layout: KVLayout = "NHD") -> torch.Tensor:
        """View K and V as one, `[num_pages + 1, 2, page_size, num_kv_heads, head_dim]`.

        FlashInfer takes this as a paged KV cache.

        Args:
            layout: "NHD", or "HND" for `[num_pages + 1, 2, num_kv_heads, page_size,
                head_dim]`.

        Raises:
            ConfigError: The layer keeps no V of the shape of K, or there is no such
                layout.
        """
        if layout not in get_args(KVLayout):
            raise ConfigError(
                f"layout must be one of {get_args(KVLayout)}, got {layout!r}"
            )
        k, v = self.k, self.parts.get("v")
        if v is None or v.shape != k.shape:
            raise ConfigError(f"layer must keep V in the shape of K, got {self.name}")
        between = v.storage_offset() - k.storage_offset()
        page_stride, *strides = k.stride()
        both = k.as_strided((len(k), 2, *k.shape[1:]), (page_stride, between, *strides))
        return both if layout == "NHD" else both.transpose(2, 3)

    def store(
        self, k: torch.Tensor, v: torch.Tensor | None, slots: torch.Tensor
    ) -> None:
        """Write what the layer keeps of tokens to their slots, in the pool's dtype.

        Args:
            k: K of the tokens, `[num_tokens, num_kv_heads, head_dim]`; with latent
                attention the vectors, `[num_tokens, 1, latent_dim + rope_dim]`.
            v: V of the tokens, `[num_tokens, num_kv_heads, v_head_dim]`; with latent
                attention the index keys, `[num_tokens, 1, index_dim]`, or None if there
                are none.
            slots: Slot of each token, int64 or int32 `[num_tokens]`; one outside the
                pool, such as -1, is not written.

        Raises:
            ConfigError: The layer keeps a state, or numbers of a dtype that nothing is
                converted to, or `v` is None or not where it must not be, or a tensor
                has another shape or dtype.
        """
        first, *rest = self._storable()
        if (v is None) == bool(rest):
            raise ConfigError(
                f"v must be {'given' if rest else 'None'}, as {self.name} keeps "
                f"{list(self.parts)}, got {'None' if v is None else 'a tensor'}"
            )
        # An array without numbers takes nothing to write.
        second = rest[0] if rest else first[..., :0]
        v = k[..., :0] if v is None else v
        store_kv(
            k,
            v,
            first,
            second,
            slots,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            backend=self._backend,
        )

    def set_scales(self, k_scale: float, v_scale: float | None = None) -> None:
        """Say what the numbers of a float8 layer are multiples of.

        Before any is stored: what is stored stays as it is.

        Args:
            k_scale: K is what is stored, times this; above 0, in the range of float32.
            v_scale: The same of V; as of K if not given.

        Raises:
            ConfigError: The layer is not float8, a scale is out of range, or V is a
                part of K and has another.
        """
        scales = [
            as_number(name, scale)
            for name, scale in (
                ("k_scale", k_scale),
                ("v_scale", k_scale if v_scale is None else v_scale),
            )
        ]
        for name, scale in zip(("k_scale", "v_scale"), scales, strict=True):
            check_factor(name, scale, is_divisor=True)
        if self.k.dtype != _FLOAT8:
            raise ConfigError(
                f"scales are for float8_e4m3fn, got {self.name} in {self.k.dtype}"
            )
        if isinstance(self.spec, MLASpec) and scales[0] != scales[1]:
            raise ConfigError(f"V is a part of K and has its scale, got {scales}")
        self.k_scale, self.v_scale = scales

    def _storable(self) -> list[torch.Tensor]:
        """Return the arrays that a token's numbers are written to."""
        dtype = self.k.dtype
        if dtype not in _STORABLE:
            raise ConfigError(
                f"K and V are stored as one of {_STORABLE}, got {self.name} in {dtype}"
            )
        return list(self.parts.values())


def _view(
    buffer: torch.Tensor, part: PagePart, start: int, page_stride: int, num_pages: int
) -> torch.Tensor:
    """View one array of all pages of a layer, `[num_pages, *part.shape]`.

    Args:
        buffer: uint8 `[buffer_bytes]`.
        part: The array.
        start: Where it begins in page 0, in bytes.
        page_stride: From one page to the next, in bytes.
        num_pages: Pages, the hold page included.
    """
    dtype: torch.dtype = getattr(torch, part.dtype)
    if start % dtype.itemsize or page_stride % dtype.itemsize:
        raise ConfigError(
            f"{part.dtype} must lie at multiples of {dtype.itemsize} bytes, got "
            f"{part.name!r} at {start}, each page {page_stride} further"
        )
    typed = buffer[: len(buffer) // dtype.itemsize * dtype.itemsize].view(dtype)
    strides = [1]
    for size in part.shape[:0:-1]:
        strides.insert(0, strides[0] * size)
    return typed.as_strided(
        (num_pages, *part.shape),
        (page_stride // dtype.itemsize, *strides),
        typed.storage_offset() + start // dtype.itemsize,
    )
