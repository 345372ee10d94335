"""Copy whole pages: where a request shares the start of one, or a resize moves them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, chain
from typing import Final

import numpy as np
import torch

from .backend import Backend, pick_backend
from .checks import as_host_integers
from .errors import ConfigError
from .page_buffers import PageBuffers
from .upload import upload

SAVED: Final = -1
"""In a plan: what was set aside, where else a page would stand."""


def copy_pages(
    pages: PageBuffers,
    sources: Sequence[int],
    targets: Sequence[int],
    *,
    backend: Backend = "auto",
) -> None:
    """Copy pages to others in every buffer, all at a time, in place.

    Defined by these loops::

        for buffer in pages.buffers:
            before = buffer.clone()
            for source, target in zip(sources, targets):
                buffer[target] = before[source]

    So a page may be both a source and a target, and chains and cycles come out right:
    the kernel makes the copies in an order in which each page is read before it is
    written (see `plan_copies`), and needs no room for what it has read.

    One upload and one launch, whatever the numbers of copies and buffers.

    Args:
        pages: K and V of all layers; changed in place.
        sources: Page to read of each copy, `[num_copies]`, on the host.
        targets: Page to write of each copy, all different, `[num_copies]`, on the host.
        backend: Which implementation; see `pick_backend`.

    Raises:
        BackendUnavailableError: The backend cannot run on the buffers' device.
        ConfigError: There is no such backend, an id is no integer or none of a page, a
            target is named twice, or there are not as many of both.
    """
    sources, targets = _check(pages, sources, targets)
    if pick_backend(backend, pages.device) == "reference":
        copy_pages_reference(pages, sources, targets)
        return
    groups = plan_copies(dict(zip(targets, sources, strict=True)))
    if not groups:
        return
    from .triton.pages import copy_pages_kernel

    steps = list(chain.from_iterable(groups))
    plan = [
        *accumulate(map(len, groups), initial=0),
        *(source for source, _ in steps),
        *(target for _, target in steps),
    ]
    num_chunks = len(pages.chunks)
    copy_pages_kernel[(len(groups) * num_chunks,)](
        pages.chunks,
        upload(np.array(plan, np.int32), pages.device),
        len(groups),
        len(steps),
        num_chunks,
        **pages.words(),
        num_stages=1,  # no page is read ahead
    )


def _check(
    pages: PageBuffers, sources: Sequence[int], targets: Sequence[int]
) -> tuple[list[int], list[int]]:
    """Return the ids as plain integers, or refuse them."""
    ids = as_host_integers(sources=sources, targets=targets)
    lowest, highest = ids.min(initial=0), ids.max(initial=0)
    if lowest < 0 or highest >= pages.num_pages:
        raise ConfigError(
            f"page ids must be in 0..{pages.num_pages - 1}, got {lowest}..{highest}"
        )
    from_pages, to_pages = ids.tolist()
    if len(set(to_pages)) < len(to_pages):
        raise ConfigError(f"targets must be all different, got {to_pages}")
    return from_pages, to_pages


def copy_pages_reference(
    pages: PageBuffers, sources: Sequence[int], targets: Sequence[int]
) -> None:
    """Copy pages to others in every buffer; see `copy_pages`."""
    read, written = (
        torch.tensor(ids, dtype=torch.int64, device=pages.device)
        for ids in (sources, targets)
    )
    for buffer in pages.buffers:
        # What is read lies in a temporary before anything is written.
        buffer.index_copy_(0, written, buffer.index_select(0, read))


def plan_copies(source_of: Mapping[int, int]) -> list[list[tuple[int, int]]]:
    """Order page copies so that each page is read before it is written.

    Every page is the target of one copy at most. So pages and copies are trees, which
    are copied from the leaves up, and cycles with trees on them. A cycle is cut: the
    source of one of its copies is set aside first, and that copy is made last.

    Args:
        source_of: Source page by target page.

    Returns:
        Groups of steps ``(source, target)``, to be done in order within a group; groups
        have no page in common but sources. `SAVED` as a target sets the source aside,
        as a source it is what was set aside last.

    Complexity: O(copies).
    """
    copies = {to: source for to, source in source_of.items() if to != source}
    targets_of: dict[int, list[int]] = {}
    for target, source in copies.items():
        targets_of.setdefault(source, []).append(target)
    if targets_of.keys().isdisjoint(copies):
        # Nearly always: no page is read and written.
        return [[(source, target)] for target, source in copies.items()]
    groups = [
        _copies_from(page, targets_of) for page in targets_of if page not in copies
    ]
    left = copies.keys() - {to for group in groups for _, to in group}
    for page in copies:
        if page in left:
            cut = _page_on_cycle(page, copies)
            source = copies[cut]
            targets_of[source].remove(cut)
            below = _copies_from(cut, targets_of)
            left -= {cut, *(to for _, to in below)}
            groups.append([(source, SAVED), *below, (SAVED, cut)])
    return groups


def _copies_from(
    root: int, targets_of: Mapping[int, Sequence[int]]
) -> list[tuple[int, int]]:
    """Return the copies of a tree, those of a page's content before those onto it."""
    copies = [(root, target) for target in targets_of.get(root, ())]
    for _, page in copies:  # which grows meanwhile
        copies.extend((page, target) for target in targets_of.get(page, ()))
    return copies[::-1]


def _page_on_cycle(page: int, copies: Mapping[int, int]) -> int:
    """Return the first page that comes twice on the way from source to source."""
    seen: set[int] = set()
    while page not in seen:
        seen.add(page)
        page = copies[page]
    return page
