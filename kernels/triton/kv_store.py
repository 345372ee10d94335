"""The kernels that store K and V."""

from __future__ import annotations

from typing import Final

from .language import Pointer, Scalar, constexpr, device_function, jit, tl

STRIDES: Final = tuple(
    f"stride_{x}_{dim}"
    for x, dims in (
        ("k", ("token", "head")),
        ("v", ("token", "head")),
        ("k_buffer", ("page", "slot", "head")),
        ("v_buffer", ("page", "slot", "head")),
    )
    for dim in dims
)
"""Strides in 16 bytes, some of which change with the batch."""


@device_function
def to_e4m3_bits(x: Scalar) -> Scalar:
    """Round float32 to the nearest of fp8 e4m3, as bytes; ties go to the even one.

    By hand, since not every GPU has an instruction for it. Numbers from 2**-6 on keep
    3 bits of their fraction, and 7 is added to their exponent where float32 adds 127.
    Below, they are multiples of 2**-9, to which adding 2**14 rounds a float32.
    """
    magnitude = tl.minimum(tl.abs(x), 448.0)
    bits = magnitude.to(tl.uint32, bitcast=True)
    is_odd = (bits >> 20) & 1
    normal = (bits + 0x7FFFF + is_odd - (120 << 23)) >> 20
    multiple = (magnitude + 16384.0).to(tl.uint32, bitcast=True) - (141 << 23)
    code = tl.where(magnitude < 0.015625, multiple, normal)
    sign = (x.to(tl.uint32, bitcast=True) >> 24) & 0x80
    return tl.where(x == x, code | sign, 0x7F).to(tl.uint8)


@device_function
def store_token(
    x_ptr: Pointer,
    buffer_ptr: Pointer,
    scale: Scalar,
    stride_x_head: Scalar,
    stride_x_dim: Scalar,
    stride_head: Scalar,
    stride_dim: Scalar,
    NUM_HEADS: constexpr,
    DIM: constexpr,
    IS_FP8: constexpr,
    BLOCK: constexpr,
) -> None:
    """Write all heads of one token, from `x_ptr` to `buffer_ptr`."""
    for first in tl.static_range(0, NUM_HEADS * DIM, BLOCK):
        numbers = first + tl.arange(0, BLOCK)
        heads, dims = (numbers // DIM).to(tl.int64), numbers % DIM
        is_real = numbers < NUM_HEADS * DIM
        x = tl.load(x_ptr + heads * stride_x_head + dims * stride_x_dim, mask=is_real)
        if IS_FP8:
            x = to_e4m3_bits(tl.div_rn(x.to(tl.float32), scale))
        x = x.to(buffer_ptr.dtype.element_ty)
        targets = buffer_ptr + heads * stride_head + dims * stride_dim
        tl.store(targets, x, mask=is_real)


def store_kv_kernel(
    k_ptr: Pointer,
    v_ptr: Pointer,
    k_buffer_ptr: Pointer,
    v_buffer_ptr: Pointer,
    slots_ptr: Pointer,
    k_scale: Scalar,
    v_scale: Scalar,
    num_slots: Scalar,
    stride_k_token: Scalar,
    stride_k_head: Scalar,
    stride_k_dim: Scalar,
    stride_v_token: Scalar,
    stride_v_head: Scalar,
    stride_v_dim: Scalar,
    stride_k_buffer_page: Scalar,
    stride_k_buffer_slot: Scalar,
    stride_k_buffer_head: Scalar,
    stride_k_buffer_dim: Scalar,
    stride_v_buffer_page: Scalar,
    stride_v_buffer_slot: Scalar,
    stride_v_buffer_head: Scalar,
    stride_v_buffer_dim: Scalar,
    PAGE_SIZE: constexpr,
    NUM_HEADS: constexpr,
    K_DIM: constexpr,
    V_DIM: constexpr,
    IS_FP8: constexpr,
    K_BLOCK: constexpr,
    V_BLOCK: constexpr,
    X_UNIT: constexpr,
    BUFFER_UNIT: constexpr,
) -> None:
    """Store the K and V of one token.

    All strides but those of dims come in units: where heads begin at multiples of 16
    bytes, a unit is as many numbers as 16 bytes hold, and the compiler sees that it can
    move 16 bytes at a time, whatever the batch. A slot outside the buffers is not
    written.
    """
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):
        page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
        k_place = page * stride_k_buffer_page + offset * stride_k_buffer_slot
        v_place = page * stride_v_buffer_page + offset * stride_v_buffer_slot
        store_token(
            k_ptr + token * stride_k_token * X_UNIT,
            k_buffer_ptr + k_place * BUFFER_UNIT,
            k_scale,
            stride_k_head * X_UNIT,
            stride_k_dim,
            stride_k_buffer_head * BUFFER_UNIT,
            stride_k_buffer_dim,
            NUM_HEADS,
            K_DIM,
            IS_FP8,
            K_BLOCK,
        )
        store_token(
            v_ptr + token * stride_v_token * X_UNIT,
            v_buffer_ptr + v_place * BUFFER_UNIT,
            v_scale,
            stride_v_head * X_UNIT,
            stride_v_dim,
            stride_v_buffer_head * BUFFER_UNIT,
            stride_v_buffer_dim,
            NUM_HEADS,
            V_DIM,
            IS_FP8,
            V_BLOCK,
        )


aligned_kernel = jit(
    do_not_specialize=("num_slots", *STRIDES),
    do_not_specialize_on_alignment=["slots_ptr"],
)(store_kv_kernel)
"""For tensors that begin at multiples of 16 bytes, as all their heads do."""

unaligned_kernel = jit(
    do_not_specialize=("num_slots", *STRIDES),
    do_not_specialize_on_alignment=[
        "slots_ptr",
        "k_ptr",
        "v_ptr",
        "k_buffer_ptr",
        "v_buffer_ptr",
    ],
)(store_kv_kernel)
"""For any tensors."""
