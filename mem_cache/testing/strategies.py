"""Hypothesis strategies: prompts that share prefixes at every page size."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

_NUM_KINDS = 4


def spell(page_size: int, kinds: Sequence[int], tail: int = 0) -> list[int]:
    """Spell a prompt page by page.

    The pages of two kinds differ in all of their tokens, in the last one, or in all but
    the first. So prompts part at the beginning, in the middle and at the end of pages,
    whatever the page size.

    Args:
        page_size: Tokens a page.
        kinds: The kind of each page, in ``0..3``.
        tail: Tokens behind the last whole page, modulo the page size.

    Returns:
        Token ids below 3.

    Example:
        >>> spell(4, [0, 2, 3], 1)
        [0, 0, 0, 0, 0, 0, 0, 2, 0, 1, 1, 1, 1]
    """
    tokens: list[int] = []
    for kind in kinds:
        first, inner, last = [(0, 0, 0), (1, 1, 1), (0, 0, 2), (0, 1, 1)][kind]
        tokens += [first, *[inner] * (page_size - 2), last][-page_size:]
    return tokens + [tail % 2] * (tail % page_size)


def page_kinds(max_num_pages: int = 20) -> st.SearchStrategy[list[int]]:
    """Return a strategy for the pages of a prompt: few of many kinds, or many of few.

    Args:
        max_num_pages: Most pages.
    """
    few = st.lists(st.integers(0, _NUM_KINDS - 1), max_size=min(3, max_num_pages))
    return few | st.lists(st.integers(0, 1), max_size=max_num_pages)


def prompts(page_size: int, max_num_pages: int = 20) -> st.SearchStrategy[list[int]]:
    """Return a strategy for prompts that are likely to share prefixes.

    Args:
        page_size: Tokens a page.
        max_num_pages: Most whole pages; a part of one may follow.
    """

    def prompt(kinds: list[int], tail: int) -> list[int]:
        return spell(page_size, kinds, tail) or [0]

    tails = st.integers(0, page_size - 1)
    return st.builds(prompt, page_kinds(max_num_pages), tails)
