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


class Ghost:
    """Pages that were evicted together, from the tail of one node.

    Attributes:
        run: Their tokens, whole pages.
        size: Bytes of the run that are still remembered; 0 if it is forgotten.
        by: Who evicted them.
        when: How many requests had been admitted by then.
        next: What was cut off the same node before, and follows the run.
        behind: The ghosts that follow if there is no next, by their first page.
        home: The dictionary that it is in, if it is in one.
        page: Its first page: the key in that dictionary.
    """

    __slots__ = ("behind", "by", "home", "next", "page", "run", "size", "when")

    def __init__(
        self,
        run: bytes,
        by: str,
        when: int,
        next_ghost: Ghost | None,
        behind: dict[bytes, Ghost] | None,
    ) -> None:
        """Make a ghost that is nowhere yet."""
        self.run = run
        self.size = len(run)
        self.by = by
        self.when = when
        self.next: Ghost | None = next_ghost
        self.behind: dict[bytes, Ghost] | None = behind
        self.home: dict[bytes, Ghost] | None = None
        self.page = b""

    def forget(self) -> None:
        """Let the tokens go."""
        self.run = b""
        self.size = 0
        self.next = None


class GhostIndex:
    """Remembers the tokens of evicted pages by where they were in the tree.

    Adaptive caches keep a list of what they evicted to learn from it (Megiddo and
    Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", 2003); this one only
    explains. It is a shadow of the tree: each eviction leaves a ghost behind the end of
    a node or of another ghost, where one or two look-ups find it at the end of a hit.
    Nobody hashes or walks the tokens before it, and what an eviction costs does not
    depend on its pages.

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
        self._set_max(max_num_pages)
        # What was cut off a node that is still there, and what followed its end. Inside
        # of a node there are ghosts only if other tokens took their place since.
        self._tails: dict[RadixNode, Ghost] = {}
        self._behind: dict[RadixNode, dict[bytes, Ghost]] = {}
        self._inside: dict[RadixNode, dict[int, dict[bytes, Ghost]]] = {}
        # All ghosts, the first to be evicted first.
        self._queue: deque[Ghost] = deque()
        self._num_stale = 0  # of them, those that are cached again
        self.num_pages = 0
        self.now = 0
        tree.on_published.append(self._on_published)
        tree.on_split.append(self._on_split)
        tree.on_evicted.append(self._on_evicted)

    def state(self) -> dict[str, object]:
        """Return all that it remembers, as plain values to compare."""
        ghosts = [(one.run, one.size, one.by, one.when) for one in self._queue]
        return {"ghosts": (self.num_pages, self.now, ghosts)}

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
        self._set_max(max_num_pages)
        self._forget_down_to(self._max_num_pages)

    def _set_max(self, max_num_pages: int) -> None:
        self._max_num_pages = as_size("max_num_pages", max_num_pages)
        # Forgetting some pages at a time costs less than one by one.
        self._num_slack_pages = min(max_num_pages // 64, 64)

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
            shared = self._shared_bytes(raw, start, ghost)
            if shared:
                start += shared
                found.append((start, ghost.by, ghost.when))
            if shared < ghost.size:
                break
            behind = ghost.behind
            ghost = ghost.next
            if behind:
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
        if self._inside and node in self._inside:
            self._cut_inside(node, run)
        else:
            self._cut(node, len(node.key), run)
        num_pages = self.num_pages + len(pages) // PAGE_ID_BYTES
        self.num_pages = num_pages
        if num_pages > self._max_num_pages:
            self._forget_down_to(self._max_num_pages - self._num_slack_pages)

    def _cut(self, node: RadixNode, kept: int, run: bytes) -> None:
        """Put a ghost before what follows the end of a node; `kept` bytes are left."""
        tail = self._tails.get(node)
        behind = self._behind.pop(node, None)
        if tail is not None and behind:
            if tail.size:
                self._put(tail, behind)
            tail = None
        cause = self._tree.cause or self._policy
        ghost = Ghost(run, cause, self.now, tail, behind)
        self._queue.append(ghost)
        if kept:
            self._tails[node] = ghost
            return
        self._tails.pop(node, None)
        home = self._behind.get(node.parent)
        if home is None:
            home = self._behind[node.parent] = {}
        page = run[: self._page_bytes]
        home[page] = ghost
        ghost.page = page
        ghost.home = home

    def _put(self, ghost: Ghost, home: dict[bytes, Ghost]) -> None:
        """Let a ghost be found in `home` from now on."""
        ghost.page = ghost.run[: self._page_bytes]
        ghost.home = home
        home[ghost.page] = ghost

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
        before = node if start else node.parent
        tail = self._tails.get(before)
        behind = self._behind.get(before)
        if not behind and tail is None:
            return
        page = node.key[start : start + self._page_bytes]
        if start:
            # What followed the end of the node is inside of it now.
            behind = self._leave_end(node)
        elif tail is not None and self._begins(tail, page, 0):
            del self._tails[before]
            self._revive(tail, node, start)
            return
        ghost = behind.pop(page, None) if behind else None
        if start and behind:
            self._put_inside(node, start, behind)
        if ghost is not None:
            self._revive(ghost, node, start)

    def _leave_end(self, node: RadixNode) -> dict[bytes, Ghost]:
        """Take out all ghosts that follow the end of a node."""
        behind = self._behind.pop(node, None)
        if behind is None:
            behind = {}
        tail = self._tails.pop(node, None)
        if tail is not None and tail.size:
            self._put(tail, behind)
        return behind

    def _revive(self, first: Ghost, node: RadixNode, start: int) -> None:
        """Forget what ``node.key[start:]`` has of a ghost and of those that follow."""
        key = node.key
        ghost: Ghost | None = first
        while ghost is not None:
            shared = self._shared_bytes(key, start, ghost)
            start += shared
            self.num_pages -= shared // self._page_bytes
            behind: dict[bytes, Ghost] = ghost.behind or {}
            rest: Ghost | None = ghost.next
            if shared < ghost.size:
                ghost.run = ghost.run[shared:]
                ghost.size -= shared
                behind = {}
                rest = ghost
            else:
                ghost.forget()
                self._num_stale += 1
            if rest is not None and rest.size:
                self._put(rest, behind)
            ghost = behind.pop(key[start : start + self._page_bytes], None)
            if behind and start < len(key):
                self._put_inside(node, start, behind)
            elif behind:
                self._behind[node] = behind
        if self._num_stale > len(self._queue) // 2 + 64:
            self._queue = deque([ghost for ghost in self._queue if ghost.size])
            self._num_stale = 0

    def _forget_down_to(self, num_pages: int) -> None:
        """Forget the pages that were evicted first: of a ghost, the last ones."""
        excess = (self.num_pages - num_pages) * self._page_bytes
        while excess > 0:
            ghost = self._queue[0]
            if ghost.size > excess:
                # The tokens themselves go with the rest: that saves copying them.
                ghost.size -= excess
                break
            self._queue.popleft()
            if not ghost.size:
                self._num_stale -= 1
                continue
            excess -= ghost.size
            ghost.forget()
            if ghost.home is not None:
                del ghost.home[ghost.page]
        self.num_pages = min(self.num_pages, num_pages)

    # Comparing --------------------------------------------------------------

    def _begins(self, ghost: Ghost, raw: bytes, start: int) -> bool:
        """Tell whether ``raw[start:]`` begins with the first page of a ghost."""
        return ghost.size > 0 and raw.startswith(ghost.run[: self._page_bytes], start)

    def _shared_bytes(self, raw: bytes, start: int, ghost: Ghost) -> int:
        """Count the bytes of whole pages that ``raw[start:]`` shares with a ghost."""
        if raw.startswith(ghost.run, start):
            return ghost.size
        shared = min(common_bytes(raw, start, ghost.run), ghost.size)
        return shared - shared % self._page_bytes
