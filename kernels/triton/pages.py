"""The kernels that move whole pages, chunk by chunk; see `PageBuffers.chunks`.

A chunk is moved in words of `WORD_BYTES`, of 8 bytes at most. All addresses and lengths
are multiples of `ALIGNMENT`, of 16 at most, so that two words can go at a time. The
numbers of chunks are int64, and so is what is computed from them.
"""

from __future__ import annotations

from .language import Pointer, Scalar, constexpr, device_function, jit, tl


@device_function
def words_at(address: Scalar, WORD_BYTES: constexpr, ALIGNMENT: constexpr) -> Pointer:
    """Return an address as a pointer to words."""
    if WORD_BYTES == 8:
        words = address.to(tl.pointer_type(tl.int64))
    elif WORD_BYTES == 4:
        words = address.to(tl.pointer_type(tl.int32))
    elif WORD_BYTES == 2:
        words = address.to(tl.pointer_type(tl.int16))
    else:
        words = address.to(tl.pointer_type(tl.int8))
    return tl.multiple_of(words, ALIGNMENT)


@device_function
def words_of_chunk(
    chunk_ptr: Pointer, WORD_BYTES: constexpr, ALIGNMENT: constexpr
) -> Scalar:
    """Return how many words a chunk has."""
    num_words = tl.load(chunk_ptr + 3) // WORD_BYTES
    return tl.multiple_of(num_words, ALIGNMENT // WORD_BYTES)


@jit(do_not_specialize=["num_groups", "num_steps", "num_chunks"])
def copy_pages_kernel(
    chunks_ptr: Pointer,
    plan_ptr: Pointer,
    num_groups: Scalar,
    num_steps: Scalar,
    num_chunks: Scalar,
    WORD_BYTES: constexpr,
    ALIGNMENT: constexpr,
    BLOCK: constexpr,
) -> None:
    """Make the copies of one group, in order, of one chunk of every page.

    No other program writes what this one reads, so the order within the program is all
    the order there is to keep. The plan is ``bounds [num_groups + 1] | sources
    [num_steps] | targets [num_steps]``.
    """
    group, chunk = tl.program_id(0) // num_chunks, tl.program_id(0) % num_chunks
    sources_ptr = plan_ptr + num_groups + 1
    targets_ptr = sources_ptr + num_steps
    address = tl.load(chunks_ptr + 4 * chunk)
    stride = tl.load(chunks_ptr + 4 * chunk + 1)
    words = tl.arange(0, BLOCK)
    num_words = words_of_chunk(chunks_ptr + 4 * chunk, WORD_BYTES, ALIGNMENT)
    page_ptr = words_at(address, WORD_BYTES, ALIGNMENT)
    saved = tl.zeros([BLOCK], page_ptr.dtype.element_ty)
    for step in range(tl.load(plan_ptr + group), tl.load(plan_ptr + group + 1)):
        source = tl.load(sources_ptr + step)
        target = tl.load(targets_ptr + step)
        page_ptr = words_at(address + source * stride, WORD_BYTES, ALIGNMENT)
        num_read = tl.where(source >= 0, num_words, 0)
        read = tl.load(page_ptr + words, mask=words < num_read, other=0)
        read = tl.where(source >= 0, read, saved)
        page_ptr = words_at(address + target * stride, WORD_BYTES, ALIGNMENT)
        num_written = tl.where(target >= 0, num_words, 0)
        tl.store(page_ptr + words, read, mask=words < num_written)
        saved = tl.where(target >= 0, saved, read)
        # Other threads may read next what this one wrote.
        tl.debug_barrier()


@jit(
    do_not_specialize=["num_chunks"],
    do_not_specialize_on_alignment=["page_ids_ptr", "staging_ptr"],
)
def stage_pages_kernel(
    chunks_ptr: Pointer,
    page_ids_ptr: Pointer,
    staging_ptr: Pointer,
    num_chunks: Scalar,
    stride_staging: Scalar,
    IS_GATHER: constexpr,
    WORD_BYTES: constexpr,
    ALIGNMENT: constexpr,
    BLOCK: constexpr,
) -> None:
    """Move one chunk of one page to its place in the staging buffer, or from there."""
    i, chunk = tl.program_id(0) // num_chunks, tl.program_id(0) % num_chunks
    address = tl.load(chunks_ptr + 4 * chunk)
    stride = tl.load(chunks_ptr + 4 * chunk + 1)
    begin = tl.load(chunks_ptr + 4 * chunk + 2)
    words = tl.arange(0, BLOCK)
    num_words = words_of_chunk(chunks_ptr + 4 * chunk, WORD_BYTES, ALIGNMENT)
    is_real = words < num_words
    page = tl.load(page_ids_ptr + i)
    page_ptr = words_at(address + page * stride, WORD_BYTES, ALIGNMENT) + words
    row = staging_ptr.to(tl.int64) + i.to(tl.int64) * stride_staging
    row_ptr = words_at(row + begin, WORD_BYTES, ALIGNMENT) + words
    if IS_GATHER:
        tl.store(row_ptr, tl.load(page_ptr, mask=is_real), mask=is_real)
    else:
        tl.store(page_ptr, tl.load(row_ptr, mask=is_real), mask=is_real)
