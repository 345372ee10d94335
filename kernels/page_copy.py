"""Copy whole pages, for example when a resize moves them."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def copy_pages(
    buffers: Sequence[torch.Tensor] | torch.Tensor,
    sources: torch.Tensor,
    targets: torch.Tensor,
    *,
    page_size: int,
) -> None:
    """Copy pages to others in every buffer, all at a time, in place.

    Defined by these loops::

        for buffer in buffers:
            before = buffer.clone()
            for source, target in zip(sources, targets):
                for i in range(page_size):
                    buffer[target * page_size + i] = before[source * page_size + i]

    So a page may be both a source and a target, and chains and cycles come out right.

    Args:
        buffers: K and V of all layers, each `[num_slots, ...]` of whole pages, at least
            one, on one device; or one tensor of them, `[num_buffers, num_slots, ...]`.
            Changed in place.
        sources: Page to read of each copy, int32 `[num_copies]`, on the host.
        targets: Page to write of each copy, all different, int32 `[num_copies]`, on the
            host.
        page_size: Slots a page.
    """
    device = buffers[0].device
    read, written = sources.to(device, torch.int64), targets.to(device, torch.int64)
    for buffer in buffers:
        pages = buffer.view(-1, page_size, *buffer.shape[1:])
        # What is read lies in a temporary before anything is written.
        pages.index_copy_(0, written, pages.index_select(0, read))
