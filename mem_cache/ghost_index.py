"""The ghost index: what was evicted, by whom and when, and is not cached since."""

from __future__ import annotations

from collections import deque
from typing import TypeAlias

from .radix_node import PAGE_ID_BYTES, RadixNode
from .radix_tree import RadixTree
from .sizes import as_size
from .tokens import common_bytes

EvictedPart: TypeAlias = tuple[int, str, int]
"""How far a prompt follows what was evicted together, in bytes; who evicted it; and how
many requests had been admitted by then."""

_Part: TypeAlias = tuple[bytes, int, str, int]
"""The same, with the tokens, whole pages, and how many bytes of them are still
remembered instead."""


class Ghost:
    """What is left of a node: pages that were evicted from its tail on.

    Attributes:
        parts: What was cut off each time. The first is the end of the run, the last its
            start; none if it is forgotten.
        behind: The ghosts that follow its end, by the bytes of their first page.
        home: The dictionary that it is in; ``None`` if its node is still there.
    """

    __slots__ = ("behind", "home", "parts")

    def __init__(self, part: _Part, behind: dict[bytes, Ghost] | None) -> None:
        """Make the ghost of a first part."""
        self.parts = [part]
        self.behind = behind
        self.home: dict[bytes, Ghost] | None = None


class GhostIndex:
    """Remembers the tokens of evicted pages by where they were in the tree.

    Adaptive caches keep a list of what they evicted to learn from it (Megiddo and
    Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", 2003); this one only
    explains. It is a shadow of the tree: a node has at most one ghost, which is found
    by one or two look-ups at the end of a hit. Nobody hashes or walks the tokens before
    it, and what an eviction costs does not depend on its pages.

    Tokens of a ghost are compared, never only hashed. A page is cached, or in one
    ghost, or forgotten; of too many, those are forgotten that were evicted first.
    Whatever follows a page was evicted before it, so what is remembered has no gaps.

    Attributes:
        num_pages: Pages that it remembers.
        now: How many requests have been admitted; for the owner to count.
    """

    def __init__(
        self, tree: RadixTree, page_bytes: int, max_num_pages: int, policy: str
    ) -> None:
        """Listen to an empty tree.

        Args:
            tree: The cached prefixes.
            page_bytes: Bytes of the tokens of one page.
            max_num_pages: Most pages to remember, at least 1.
            policy: Who evicts what goes without another cause.

        Raises:
            ConfigError: `max_num_pages` is out of range.
        """
        self._tree = tree
        self._page_bytes = page_bytes
        self._policy = policy
        self._max_num_pages = as_size("max_num_pages", max_num_pages)
        # What was cut off a node that is still there, and what followed its end. Inside
        # of a node there are ghosts only if other tokens took their place since.
        self._tails: dict[RadixNode, Ghost] = {}
        self._behind: dict[RadixNode, dict[bytes, Ghost]] = {}
        self._inside: dict[RadixNode, dict[int, dict[bytes, Ghost]]] = {}
        # The ghost of every part, the first to be evicted first. Of one ghost, the
        # first parts are the first to be forgotten, and the last to be cached again.
        self._queue: deque[Ghost] = deque()
        self._num_stale = 0  # of them, those whose part is cached again
        self.num_pages = 0
        self.now = 0
        tree.on_published.append(self._on_published)
        tree.on_split.append(self._on_split)
        tree.on_evicted.append(self._on_evicted)

    def has_behind(self, node: RadixNode) -> bool:
        """Tell whether a ghost follows the end of `node`."""
        return bool(self._behind.get(node))

    def resize(self, max_num_pages: int) -> None:
        """Change how many pages it remembers, and forget those that are too many.

        Args:
            max_num_pages: Most pages to remember, at least 1.

        Raises:
            ConfigError: `max_num_pages` is out of range.
        """
        self._max_num_pages = as_size("max_num_pages", max_num_pages)
        self._forget_excess()

    def clear(self) -> None:
        """Forget everything."""
        self._tails.clear()
        self._behind.clear()
        self._inside.clear()
        self._queue.clear()
        self._num_stale = 0
        self.num_pages = 0

    def follow(self, node: RadixNode, raw: bytes, start: int) -> list[EvictedPart]:
        """Find what was evicted of the tokens that follow a hit.

        Args:
            node: The node that the hit ends with; a root if there is none.
            raw: Tokens of a prompt, whole pages.
            start: Where the hit ends, in bytes; less than all of `raw`.

        Returns:
            Each part on the way; the first was evicted last.

        Complexity: O(parts on the way), plus one comparison of their tokens.
        """
        found: list[EvictedPart] = []
        ghost = self._tails.get(node)
        if ghost is None or not self._begins(ghost, raw, start):
            behind = self._behind.get(node)
            if not behind:
                return found
            ghost = behind.get(raw[start : start + self._page_bytes])
        while ghost is not None:
            for run, size, by, when in reversed(ghost.parts):
                shared = self._shared_bytes(raw, start, run, size)
                if shared:
                    start += shared
                    found.append((start, by, when))
                if shared < size:
                    return found
            behind = ghost.behind or {}
            ghost = behind.get(raw[start : start + self._page_bytes])
        return found

    def move_root(self, old: RadixNode, new: RadixNode) -> None:
        """Take note that a namespace that came back has another root."""
        behind = self._behind.pop(old, None)
        if behind:
            self._behind[new] = behind

    def drop(self, node: RadixNode) -> None:
        """Lose what follows a node: nobody will ask for it again.

        It is forgotten when its time comes.
        """
        self._tails.pop(node, None)
        self._behind.pop(node, None)
        self._inside.pop(node, None)

    # Ghosts come ------------------------------------------------------------

    def _on_evicted(self, node: RadixNode, run: bytes, pages: bytes) -> None:
        """Remember what was cut off the tail of a node.

        Complexity: O(1), plus O(ghosts inside of the node).
        """
        if node.root.is_stale:
            self.drop(node)
            return
        self.num_pages += len(pages) // PAGE_ID_BYTES
        if node in self._inside:
            self._cut_inside(node, run)
        else:
            self._cut(node, len(node.key), run)
        if self.num_pages > self._max_num_pages:
            self._forget_excess()

    def _cut(self, node: RadixNode, kept: int, run: bytes) -> None:
        """Put a part before what follows the end of a node; `kept` bytes are left."""
        part = (run, len(run), self._tree.cause or self._policy, self.now)
        behind = self._behind.pop(node, None)
        ghost = self._tails.get(node)
        if ghost is not None and not behind:
            ghost.parts.append(part)
            if not kept:
                del self._tails[node]
        else:
            if ghost is not None:
                del self._tails[node]
                if behind and ghost.parts:
                    behind[self._first_page(ghost)] = ghost
                    ghost.home = behind
            ghost = Ghost(part, behind)
            if kept:
                self._tails[node] = ghost
        if not kept:
            home = self._behind.get(node.parent)
            if home is None:
                home = self._behind[node.parent] = {}
            home[run[: self._page_bytes]] = ghost
            ghost.home = home
        self._queue.append(ghost)

    def _cut_inside(self, node: RadixNode, run: bytes) -> None:
        """Cut a node piece by piece, from one place with ghosts to the next."""
        inside = self._inside.pop(node)
        kept = len(node.key)
        for offset in sorted(inside, reverse=True):
            if offset <= kept:
                break
            self._cut(node, offset, run[offset - kept :])
            self._behind[node] = inside.pop(offset)
            run = run[: offset - kept]
        self._cut(node, kept, run)
        if kept in inside:
            self._behind[node] = inside.pop(kept)
        if inside:
            self._inside[node] = inside

    def _put_inside(
        self, node: RadixNode, offset: int, ghosts: dict[bytes, Ghost]
    ) -> None:
        self._inside.setdefault(node, {})[offset] = ghosts

    def _on_split(self, upper: RadixNode, node: RadixNode) -> None:
        """Move the ghosts inside of `node`, whose first tokens `upper` took."""
        inside = self._inside.pop(node, None)
        if inside is None:
            return
        cut = len(upper.key)
        for offset, ghosts in inside.items():
            if offset == cut:
                self._behind[upper] = ghosts
            elif offset < cut:
                self._put_inside(upper, offset, ghosts)
            else:
                self._put_inside(node, offset - cut, ghosts)

    # Ghosts go --------------------------------------------------------------

    def _on_published(self, node: RadixNode, start: int) -> None:
        """Forget what is cached again: ``node.key[start:]``.

        Complexity: O(1), plus O(ghosts of these tokens).
        """
        ghost = self._leave_end(node, start) if start else self._leave_parent(node)
        key = node.key
        while ghost is not None:
            start = self._shorten(ghost, key, start)
            if ghost.parts:
                behind = {self._first_page(ghost): ghost}
                ghost.home = behind
                ghost = None
            else:
                behind = ghost.behind or {}
                ghost = behind.pop(key[start : start + self._page_bytes], None)
            if behind:
                if start == len(key):
                    self._behind[node] = behind
                else:
                    self._put_inside(node, start, behind)
        if self._num_stale > len(self._queue) // 2 + 64:
            self._compact()

    def _leave_parent(self, node: RadixNode) -> Ghost | None:
        """Take out the ghost that a new node begins with, if there is one."""
        parent = node.parent
        ghost = self._tails.get(parent)
        if ghost is not None and self._begins(ghost, node.key, 0):
            del self._tails[parent]
            return ghost
        behind = self._behind.get(parent)
        return behind.pop(node.key[: self._page_bytes], None) if behind else None

    def _leave_end(self, node: RadixNode, start: int) -> Ghost | None:
        """Take out the ghost that the new part of a node begins with.

        What else followed its former end is inside of it now.
        """
        tail = self._tails.pop(node, None)
        behind = self._behind.pop(node, None) or {}
        if tail is not None and tail.parts:
            behind[self._first_page(tail)] = tail
            tail.home = behind
        if not behind:
            return None
        ghost = behind.pop(node.key[start : start + self._page_bytes], None)
        if behind:
            self._put_inside(node, start, behind)
        return ghost

    def _shorten(self, ghost: Ghost, key: bytes, start: int) -> int:
        """Take off a ghost what it shares with ``key[start:]``; returns the end."""
        parts = ghost.parts
        while parts:
            run, size, by, when = parts[-1]
            shared = self._shared_bytes(key, start, run, size)
            self.num_pages -= shared // self._page_bytes
            start += shared
            if shared < size:
                parts[-1] = (run[shared:], size - shared, by, when)
                break
            parts.pop()
            self._num_stale += 1
        return start

    def _forget_excess(self) -> None:
        """Forget the pages that were evicted first: of a part, the last ones."""
        excess = (self.num_pages - self._max_num_pages) * self._page_bytes
        if excess <= 0:
            return
        self.num_pages = self._max_num_pages
        queue = self._queue
        while excess > 0:
            ghost = queue[0]
            parts = ghost.parts
            if parts:
                run, size, by, when = parts[0]
                if size > excess:
                    # The tokens themselves go with the rest: that saves copying them.
                    parts[0] = (run, size - excess, by, when)
                    return
                excess -= size
                if len(parts) == 1 and ghost.home is not None:
                    del ghost.home[run[: self._page_bytes]]
                del parts[0]
            else:
                self._num_stale -= 1
            queue.popleft()

    def _compact(self) -> None:
        """Take out of the queue what was cached again. O(1) amortized."""
        counts: dict[Ghost, int] = {}
        queue: deque[Ghost] = deque()
        for ghost in self._queue:
            count = counts.get(ghost, 0)
            if count < len(ghost.parts):
                counts[ghost] = count + 1
                queue.append(ghost)
        self._queue = queue
        self._num_stale = 0

    # Comparing --------------------------------------------------------------

    def _first_page(self, ghost: Ghost) -> bytes:
        return ghost.parts[-1][0][: self._page_bytes]

    def _begins(self, ghost: Ghost, raw: bytes, start: int) -> bool:
        """Tell whether ``raw[start:]`` begins with the first page of a ghost."""
        return bool(ghost.parts) and raw.startswith(self._first_page(ghost), start)

    def _shared_bytes(self, raw: bytes, start: int, run: bytes, size: int) -> int:
        """Count the bytes of whole pages that ``raw[start:]`` shares with a part."""
        if raw.startswith(run, start):
            return size
        shared = min(common_bytes(raw, start, run), size)
        return shared - shared % self._page_bytes
