"""Gather pages of all layers into one run of bytes, and scatter them from it."""

from __future__ import annotations

from math import gcd

import torch

from .backend import Backend, pick_backend
from .checks import as_numbers
from .errors import ConfigError
from .page_buffers import PageBuffers


def gather_pages(
    pages: PageBuffers,
    page_ids: torch.Tensor,
    staging: torch.Tensor,
    *,
    backend: Backend = "auto",
) -> None:
    """Copy pages of all layers into a staging buffer, each page in one piece.

    Defined by this loop::

        for i, page in enumerate(page_ids):
            staging[i] = concatenate([buffer[page] for buffer in pages.buffers])

    One launch, whatever the numbers of pages and buffers.

    Args:
        pages: K and V of all layers.
        page_ids: Pages to read, int32 or int64 `[num_pages]`, on the buffers' device.
        staging: Where to, uint8 `[num_pages, pages.page_bytes]`, with any stride
            between rows; changed in place.
        backend: Which implementation; see `pick_backend`.

    Raises:
        BackendUnavailableError: The backend cannot run on the buffers' device.
        ConfigError: There is no such backend, or `page_ids` or `staging` is not as it
            must be.
    """
    page_ids = _check(pages, page_ids, staging)
    if pick_backend(backend, pages.device) == "reference":
        gather_pages_reference(pages, page_ids, staging)
    else:
        _launch(pages, page_ids, staging, is_gather=True)


def gather_pages_reference(
    pages: PageBuffers, page_ids: torch.Tensor, staging: torch.Tensor
) -> None:
    """Copy pages of all layers into a staging buffer; see `gather_pages`."""
    for buffer, part in zip(pages.buffers, _split(pages, staging), strict=True):
        part.copy_(buffer.index_select(0, page_ids))


def scatter_pages(
    pages: PageBuffers,
    page_ids: torch.Tensor,
    staging: torch.Tensor,
    *,
    backend: Backend = "auto",
) -> None:
    """Copy pages of all layers from a staging buffer to where they belong, in place.

    Defined by this loop, in any order::

        for i, page in enumerate(page_ids):
            begin = 0
            for buffer in pages.buffers:
                end = begin + buffer.shape[1]
                buffer[page] = staging[i, begin:end]
                begin = end

    One launch, whatever the numbers of pages and buffers. A page named twice, as
    padding names the hold page, gets each byte from one of the rows that name it.

    Args:
        pages: K and V of all layers; changed in place.
        page_ids: Pages to write, int32 or int64 `[num_pages]`, on the buffers' device.
        staging: What `gather_pages` made, uint8 `[num_pages, pages.page_bytes]`, with
            any stride between rows.
        backend: Which implementation; see `pick_backend`.

    Raises:
        BackendUnavailableError: The backend cannot run on the buffers' device.
        ConfigError: There is no such backend, or `page_ids` or `staging` is not as it
            must be.
    """
    page_ids = _check(pages, page_ids, staging)
    if pick_backend(backend, pages.device) == "reference":
        scatter_pages_reference(pages, page_ids, staging)
    else:
        _launch(pages, page_ids, staging, is_gather=False)


def scatter_pages_reference(
    pages: PageBuffers, page_ids: torch.Tensor, staging: torch.Tensor
) -> None:
    """Copy pages of all layers from a staging buffer; see `scatter_pages`."""
    for buffer, part in zip(pages.buffers, _split(pages, staging), strict=True):
        buffer.index_copy_(0, page_ids.long(), part)


def _check(
    pages: PageBuffers, page_ids: torch.Tensor, staging: torch.Tensor
) -> torch.Tensor:
    """Return the page ids in one piece, or refuse them or the staging buffer."""
    (page_ids,) = as_numbers(page_ids=page_ids)
    shape = len(page_ids), pages.page_bytes
    is_bytes = staging.dtype == torch.uint8 and staging.shape == shape
    if not is_bytes or staging.stride(1) != 1:
        raise ConfigError(
            f"staging must be uint8 {list(shape)}, each row in one piece, got "
            f"{staging.dtype} {list(staging.shape)} with strides {staging.stride()}"
        )
    return page_ids


def _split(pages: PageBuffers, staging: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cut staged pages into the parts of the buffers."""
    return torch.split(staging, [buffer.shape[1] for buffer in pages.buffers], dim=1)


def _launch(
    pages: PageBuffers,
    page_ids: torch.Tensor,
    staging: torch.Tensor,
    *,
    is_gather: bool,
) -> None:
    num_chunks = len(pages.chunks)
    if len(page_ids) == 0:
        return
    from .triton.pages import stage_pages_kernel

    stage_pages_kernel[(len(page_ids) * num_chunks,)](
        pages.chunks,
        page_ids,
        staging,
        num_chunks,
        staging.stride(0),
        IS_GATHER=is_gather,
        **pages.words(gcd(staging.data_ptr(), staging.stride(0))),
    )
