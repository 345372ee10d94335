"""Store K and V of a step's tokens to their slots."""

from __future__ import annotations

from typing import Final

import torch

from .backend import Backend, pick_backend
from .checks import as_numbers, check_factor
from .errors import ConfigError

FP8: Final = torch.float8_e4m3fn
FP8_MAX: Final = 448.0
"""The largest number that e4m3 has."""


def store_kv(
    k: torch.Tensor,
    v: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    slots: torch.Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    backend: Backend = "auto",
) -> None:
    """Write the K and V of each token to its slot, in place.

    Defined by this loop, in any order::

        for i, slot in enumerate(slots):
            if not 0 <= slot < num_slots:
                continue
            page, offset = slot // page_size, slot % page_size
            k_buffer[page, offset] = convert(k[i], k_scale)
            v_buffer[page, offset] = convert(v[i], v_scale)

    Values are converted to the buffers' dtype, rounded to the nearest. A buffer of fp8
    (e4m3) holds ``x / scale``, clamped to what e4m3 has, so that K is ``k_buffer *
    k_scale`` again. A slot named twice, as padded tokens name the slots of the hold
    page, gets each number from one of the tokens that name it. A slot outside the
    buffers, such as -1, which `last_loc` returns for nothing, is not written.

    Args:
        k: K of the tokens, `[num_tokens, num_kv_heads, head_dim]`, with any strides.
        v: V of the tokens, like K and in its dtype, with `v_head_dim`, which is 0 where
            there is no V.
        k_buffer: A layer's K, `[num_pages + 1, page_size, num_kv_heads, head_dim]`,
            with any strides; changed in place. `[num_slots, num_kv_heads, head_dim]`
            are pages of one slot.
        v_buffer: A layer's V, like its K and in its dtype, with `v_head_dim`; changed
            in place.
        slots: Slot of each token, int64 or int32 `[num_tokens]`.
        k_scale: What the K in a buffer of fp8 is a multiple of; others have no scale.
        v_scale: The same of V.
        backend: Which implementation; see `pick_backend`.

    Raises:
        BackendUnavailableError: The backend cannot run on the buffers' device.
        ConfigError: There is no such backend, a shape or dtype is not as it must be,
            or a scale is not above 0.
    """
    (slots,) = as_numbers(slots=slots)
    _check(k, v, k_buffer, v_buffer, slots)
    check_factor("k_scale", k_scale, is_divisor=True)
    check_factor("v_scale", v_scale, is_divisor=True)
    if pick_backend(backend, k_buffer.device) == "reference":
        store_kv_reference(
            k, v, k_buffer, v_buffer, slots, k_scale=k_scale, v_scale=v_scale
        )
    elif len(slots) > 0:
        tensors = k, v, _paged(k_buffer), _paged(v_buffer)
        _launch(*tensors, slots, float(k_scale), float(v_scale))


def store_kv_reference(
    k: torch.Tensor,
    v: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    slots: torch.Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """Write the K and V of each token to its slot; see `store_kv`."""
    num_pages, page_size = _paged(k_buffer).shape[:2]
    is_inside = (slots >= 0) & (slots < num_pages * page_size)
    if not is_inside.all():
        k, v, slots = k[is_inside], v[is_inside], slots[is_inside]
    places = slots // page_size, slots % page_size
    for x, buffer, scale in ((k, k_buffer, k_scale), (v, v_buffer, v_scale)):
        paged = _paged(buffer)
        _storable(paged)[places] = _storable(_convert(x, buffer.dtype, scale))


def _check(
    k: torch.Tensor,
    v: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Refuse what does not fit together; only shapes and dtypes are looked at."""
    if k_buffer.dim() not in (3, 4) or k_buffer.shape[:-1] != v_buffer.shape[:-1]:
        raise ConfigError(
            "k_buffer and v_buffer must be [num_pages + 1, page_size, num_kv_heads, "
            "dim of each], or [num_slots, num_kv_heads, dim of each], got "
            f"{list(k_buffer.shape)} and {list(v_buffer.shape)}"
        )
    for name, x, buffer in (("k", k, k_buffer), ("v", v, v_buffer)):
        shape = len(slots), *buffer.shape[-2:]
        if x.shape != shape:
            raise ConfigError(
                f"{name} must be {list(shape)}, for {len(slots)} slots of a buffer "
                f"{list(buffer.shape)}, got {list(x.shape)}"
            )
    for name, x, other in (("v", v, k), ("v_buffer", v_buffer, k_buffer)):
        if x.dtype != other.dtype:
            raise ConfigError(f"{name} must be {other.dtype}, as its K, got {x.dtype}")
    is_float8 = k_buffer.dtype.is_floating_point and k_buffer.itemsize == 1
    if is_float8 and k_buffer.dtype != FP8:
        raise ConfigError(f"buffers of float8 must be {FP8}, got {k_buffer.dtype}")


def _launch(
    k: torch.Tensor,
    v: torch.Tensor,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    slots: torch.Tensor,
    k_scale: float,
    v_scale: float,
) -> None:
    from .triton.kv_store import aligned_kernel, unaligned_kernel

    tensors = (k, v, k_buffer, v_buffer)
    is_aligned = all(map(_is_aligned, tensors))
    kernel = aligned_kernel if is_aligned else unaligned_kernel
    units = [16 // x.element_size() if is_aligned else 1 for x in tensors]
    strides = (
        stride
        for x, unit in zip(tensors, units, strict=True)
        for stride in (*(each // unit for each in x.stride()[:-1]), x.stride(-1))
    )
    num_heads, k_dim, v_dim = *k.shape[1:], v.shape[2]
    kernel[(len(slots),)](
        k,
        v,
        _storable(k_buffer),
        _storable(v_buffer),
        slots,
        k_scale,
        v_scale,
        len(k_buffer) * k_buffer.shape[1],
        *strides,
        PAGE_SIZE=k_buffer.shape[1],
        NUM_HEADS=num_heads,
        K_DIM=k_dim,
        V_DIM=v_dim,
        IS_FP8=k_buffer.dtype == FP8,
        K_BLOCK=_block(num_heads * k_dim),
        V_BLOCK=_block(num_heads * v_dim),
        X_UNIT=units[0],
        BUFFER_UNIT=units[2],
    )


def _convert(x: torch.Tensor, dtype: torch.dtype, scale: float) -> torch.Tensor:
    """Round numbers to a buffer's dtype."""
    if dtype == FP8:
        x = (x.float() / scale).clamp(-FP8_MAX, FP8_MAX)
    return x.to(dtype)


def _paged(buffer: torch.Tensor) -> torch.Tensor:
    """View slots as pages of one slot."""
    return buffer if buffer.ndim == 4 else buffer.unsqueeze(1)


def _storable(tensor: torch.Tensor) -> torch.Tensor:
    """View fp8 as bytes: torch indexes no fp8, and not every GPU converts to it."""
    return tensor.view(torch.uint8) if tensor.dtype == FP8 else tensor


def _is_aligned(tensor: torch.Tensor) -> bool:
    """Tell whether each head begins at a multiple of 16 bytes."""
    strides = tensor.stride()[:-1]
    places = (tensor.data_ptr(), *(n * tensor.element_size() for n in strides))
    return not any(place % 16 for place in places)


def _block(count: int) -> int:
    """Return a power of two that covers as many numbers, or 1,024 at a time."""
    return 1 << min(max(count - 1, 0).bit_length(), 10)
