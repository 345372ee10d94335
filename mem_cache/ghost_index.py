"""The ghost index: what was evicted, by whom and when, and is not cached since."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any, Final, TypeAlias
from zlib import crc32

from .place_sketch import PlaceSketch, namespace_key, page_key
from .radix_node import RadixNode, RadixRoot
from .radix_tree import RadixTree
from .sharded_dict import MAX_DICT_SIZE, ShardedDict, dicts_of
from .sizes import as_size
from .tokens import first_page, shared_bytes
from .untracked import untracked

EvictedPart: TypeAlias = tuple[int, str, int]
"""How far a prompt follows what was evicted together, in bytes; who evicted it; and how
many requests had been admitted by then."""

_NUM_LET_GO: Final = 4
"""Forgotten ghosts that each eviction frees, so that they go sooner than they come."""

_UNSURE: Final = -1
"""The place of all that is unsure, and that no ghost follows yet: it has no number."""

_BLOCK_BITS: Final = 12
"""So many of the lowest bits of places differ in one shard."""


@untracked(acyclic=True)
class Ghost:
    """Pages that were evicted together, from the tail of one node.

    Attributes:
        place: What they follow.
        run: Their tokens.
        behind: The place behind them, 0 if nothing was evicted there before.
        by: Who evicted them.
        when: How many requests had been admitted by then.
    """

    place: int
    run: bytes
    behind: int
    by: str
    when: int

    def __init__(self, place: int, run: bytes, behind: int, by: str, when: int) -> None:
        """Remember pages; nothing of this changes."""
        self.place = place
        self.run = run
        self.behind = behind
        self.by = by
        self.when = when


_REVIVED: Final = Ghost(0, b"", 0, "", 0)
"""Follows no place."""


class _Generation:
    """Ghosts of about one age.

    Attributes:
        tails: What was cut off nodes that stayed, by the place that it follows.
        heads: One of all others that begin with a page, by that page.
        more: The rest of them, by the place that they follow, and their first page.
        num_bytes: Bytes of their tokens.
        roots: Roots that lost a page while it was the young one.
    """

    __slots__ = ("heads", "more", "num_bytes", "roots", "tails")

    def __init__(self) -> None:
        self.tails: dict[int, Ghost] | ShardedDict[int, Ghost] = {}
        self.heads: dict[bytes, Ghost] | ShardedDict[bytes, Ghost] = {}
        self.more: (
            dict[tuple[int, bytes], Ghost] | ShardedDict[tuple[int, bytes], Ghost]
        ) = {}
        self.num_bytes = 0
        self.roots: dict[RadixNode, None] = {}

    def ghosts(self) -> Iterator[Ghost]:
        """Iterate over them."""
        yield from self.tails.values()
        yield from self.heads.values()
        yield from self.more.values()

    def find(self, place: int, page: bytes) -> Ghost | None:
        """Return the ghost behind a place that begins with a page, if there is one."""
        tails = self.tails
        if tails:
            ghost = tails.get(place)
            if ghost is not None and ghost.run.startswith(page):
                return ghost
        heads = self.heads
        # Compiled code must know which of the two it is, or be slow.
        if isinstance(heads, dict):  # noqa: SIM108
            ghost = heads.get(page)
        else:
            ghost = heads.get(page)
        if ghost is None or ghost.place == place:
            return ghost
        return self.more.get((place, page))

    def put_tail(self, ghost: Ghost) -> None:
        """Add a ghost that was cut off a node that stayed."""
        tails = self.tails
        tails[ghost.place] = ghost
        if len(tails) > MAX_DICT_SIZE and isinstance(tails, dict):
            self.tails = ShardedDict(tails, _block_of)

    def put(self, ghost: Ghost, page: bytes) -> None:
        """Add a ghost that begins with a page, and is no tail."""
        heads = self.heads
        if page in heads:
            more = self.more
            more[ghost.place, page] = ghost
            if len(more) > MAX_DICT_SIZE and isinstance(more, dict):
                self.more = ShardedDict(more, _block_of_first)
            return
        heads[page] = ghost
        if len(heads) > MAX_DICT_SIZE and isinstance(heads, dict):
            self.heads = ShardedDict(heads, crc32)

    def take(self, ghost: Ghost, page: bytes) -> None:
        """Take out a ghost that begins with a page."""
        place = ghost.place
        tail = self.tails.get(place)
        if tail is not None and tail.run.startswith(page):
            del self.tails[place]
        elif self.heads[page].place != place:
            del self.more[place, page]
        elif self.more:
            self.heads[page] = _REVIVED  # others may begin with that page
        else:
            del self.heads[page]


def _block_of(place: int) -> int:
    return place >> _BLOCK_BITS


def _block_of_first(key: tuple[int, bytes]) -> int:
    return key[0] >> _BLOCK_BITS


class GhostIndex:
    """Remembers the tokens of evicted pages by where they were in the tree.

    Adaptive caches keep a list of what they evicted to learn from it (Megiddo and
    Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", 2003); this one only
    explains. A *place* is the number of a point in the tree behind which something was
    evicted: the end of a node, or of a ghost. A ghost is found by the place that it
    follows, and its first page. Nobody hashes or walks the tokens before it, and
    what an eviction costs does not depend on its pages.

    The place of a node, or behind a ghost, is negative as long as nothing follows there
    but what was cut off the same node: if that comes back, the place is done with.

    Tokens of a ghost are compared, never only hashed. A page is cached, or in one
    ghost, or forgotten. There are two generations of ghosts, each of at most half of
    the bound; when the young one is full, the old one is forgotten as a whole, and it
    takes its place. So nobody looks for what to forget, and the half of the bound that
    was evicted last is always remembered.

    Invariant: whatever follows a page was evicted before it, and is in no younger
    generation, so what is remembered has no gaps.

    That something was there outlives the ghost: a sketch keeps a few bits for the first
    page of each that was forgotten, with the place that it followed. Where such a
    page is published again, nobody knows any more what else followed it: from there on
    all places are *unsure*, which odd numbers are; the others are even. So what has no
    ghost is told apart: it was never seen, or may have been.

    Invariant: whatever follows an unsure place is unsure, ghosts too.

    Attributes:
        now: How many requests have been admitted; for the owner to count.
        has_forgotten: Whether what follows the last part that `follow` found may have
            been cached once: its first page was, as far as the sketch knows, or it is
            unsure. If not, it never was, unless the sketch has forgotten it, too.
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
        self.resize(max_num_pages)
        self._young = _Generation()
        self._old = _Generation()
        # Forgotten generations with ghosts that the sketch does not have yet.
        self._fading: list[_Generation] = []
        self._to_let_go: list[dict[Any, Ghost]] = []
        # By their offsets, the places that other tokens followed since in the same
        # node: a leaf that lost its tail grew again.
        self._inside: dict[RadixNode, dict[int, int]] = {}
        # Of nodes that begin sure and end unsure, the bytes that are sure.
        self._sure_bytes: dict[RadixNode, int] = {}
        self._sketch = PlaceSketch(max_num_pages)
        self._last_place = 0
        self.now = 0
        self.has_forgotten = False
        tree.on_published.append(self._on_published)
        tree.on_split.append(self._on_split)
        tree.on_evicted.append(self._on_evicted)

    @property
    def num_pages(self) -> int:
        """Pages that it remembers."""
        return (self._young.num_bytes + self._old.num_bytes) // self._page_bytes

    def state(self) -> dict[str, object]:
        """Return all that it remembers, as plain values to compare."""
        old, young = self._old, self._young
        sizes = (old.num_bytes, young.num_bytes)
        ghosts = [
            (ghost.place, ghost.run, ghost.behind, ghost.by, ghost.when)
            for generation in (old, young)
            for ghost in generation.ghosts()
        ]
        return {"ghosts": (*sizes, self.now, ghosts)}

    def has_behind(self, root: RadixNode) -> bool:
        """Tell whether a ghost may follow a root."""
        return root in self._young.roots or root in self._old.roots

    def resize(self, max_num_pages: int) -> None:
        """Change how many pages it remembers. O(1).

        A lower bound holds for what is evicted from now on: why a pool that has shrunk
        has less is what many will ask. What is too much goes with its generation.

        Args:
            max_num_pages: Most pages to remember, at least 1; of one, it remembers two.

        Raises:
            ConfigError: `max_num_pages` is out of range.
        """
        most = max(as_size("max_num_pages", max_num_pages) // 2, 1)
        self._max_young_bytes = most * self._page_bytes

    def clear(self) -> None:
        """Forget everything: from now on, nothing was ever seen."""
        self._begin_generation()
        self._begin_generation()
        self._fading.clear()
        self._to_let_go.clear()
        self._inside.clear()
        self._sure_bytes.clear()
        self._sketch = PlaceSketch(self._sketch.max_num_keys)

    def follow(
        self, node: RadixNode, raw: bytes, start: int, end: int
    ) -> list[EvictedPart]:
        """Find what was evicted of the tokens that follow a hit.

        Args:
            node: The node that the hit ends with; a root if there is none.
            raw: Tokens of a prompt.
            start: Where the hit ends, in bytes.
            end: Where what was looked up ends: whole pages, and more than `start`.

        Returns:
            Each part on the way; the first was evicted last. What comes behind them,
            `has_forgotten` tells.

        Complexity: O(parts on the way), plus one comparison of their tokens.
        """
        found: list[EvictedPart] = []
        self.has_forgotten = False
        place = node.place
        while place and start < end:
            if place == _UNSURE:
                self.has_forgotten = True
                break
            page = raw[start : start + self._page_bytes]
            ghost = self._young.find(abs(place), page)
            if ghost is None:
                ghost = self._old.find(abs(place), page)
                if ghost is None:
                    self.has_forgotten = place & 1 == 1 or self._has_lost(place, page)
                    break
            run, place = ghost.run, ghost.behind
            shared = self._shared_bytes(raw, start, end, run)
            start += shared
            found.append((start, ghost.by, ghost.when))
            if shared < len(run):
                self.has_forgotten = place & 1 == 1
                break
        return found

    def move_root(self, old: RadixNode, new: RadixNode) -> None:
        """Take note that a namespace that came back has another root."""
        new.place = old.place
        for generation in (self._young, self._old):
            if old in generation.roots:
                del generation.roots[old]
                generation.roots[new] = None

    def drop(self, node: RadixNode) -> None:
        """Lose what follows a node: nobody will ask for it again.

        It is forgotten when its time comes.
        """
        node.place = 0
        self._inside.pop(node, None)
        self._sure_bytes.pop(node, None)

    def let_go(self, root: RadixRoot, namespace: Hashable) -> None:
        """Lose a namespace that has no ghosts, but may come back.

        Args:
            root: Its last root, which is in no tree any more.
            namespace: What it stood for.
        """
        if root.place:
            self._sketch.add(namespace_key(namespace))
        self.drop(root)

    def begin(self, root: RadixRoot) -> None:
        """Take note of a namespace that is new, or that was let go."""
        if self._sketch.has(namespace_key(root.namespace)):
            root.place = _UNSURE

    # Ghosts come ------------------------------------------------------------

    def _on_evicted(self, node: RadixNode, run: bytes, pages: bytes) -> None:
        """Remember what was cut off the tail of a node.

        Complexity: O(1), plus O(places inside of the node).
        """
        if node.root.is_stale:
            self.drop(node)
            return
        if self._fading:
            self._let_go()
        young = self._young
        num_bytes = young.num_bytes + len(run)
        if num_bytes > self._max_young_bytes:
            run = self._make_room(node, run)
            young = self._young
            num_bytes = len(run)
        young.num_bytes = num_bytes
        if self._inside and node in self._inside:
            run = self._cut_inside(node, run)
        behind = node.place
        is_unsure = behind & 1
        if self._sure_bytes and len(node.key) <= self._sure_bytes.get(node, -1):
            del self._sure_bytes[node]
            is_unsure = 0
        if not run:
            return
        by = self._tree.cause or self._policy
        if node.key:
            # As in `_new_place`; this is most of what happens.
            self._last_place = place = (self._last_place | 1) + 1 + is_unsure
            node.place = -place
            young.put_tail(Ghost(place, run, behind, by, self.now))
            return
        parent = node.parent
        place = parent.place
        if place == _UNSURE:
            parent.place = place = self._new_place(1)
        elif place < 0:
            parent.place = place = -place
        elif not place:
            parent.place = place = self._new_place(0)
        if parent is node.root:
            young.roots[parent] = None
        page = first_page(run, self._page_bytes)
        young.put(Ghost(place, run, behind, by, self.now), page)

    def _new_place(self, is_unsure: int) -> int:
        """Return the next number for a place: an odd one, if it is unsure."""
        self._last_place = place = (self._last_place | 1) + 1 + is_unsure
        return place

    def _has_lost(self, place: int, page: bytes) -> bool:
        """Tell whether a page was forgotten behind a place, as far as is known."""
        place = abs(place)
        for generation in self._fading:
            if generation.find(place, page) is not None:
                return True
        return self._sketch.has(page_key(place, page))

    def _make_room(self, node: RadixNode, run: bytes) -> bytes:
        """Begin a generation that takes the run of a node; returns what fits of it."""
        if len(run) > self._max_young_bytes:
            # Its last pages are forgotten, and with them all that was evicted before.
            self._begin_generation()
            self._begin_generation()
            self.drop(node)
            node.place = _UNSURE
            return run[: self._max_young_bytes]
        self._begin_generation()
        return run

    def _begin_generation(self) -> None:
        """Forget the old generation; the young one takes its place."""
        old = self._old
        self._fading.append(old)
        # The last go first, and heads tell where more of them are.
        self._to_let_go += dicts_of(old.heads)
        self._to_let_go += dicts_of(old.tails)
        self._to_let_go += dicts_of(old.more)
        self._old = self._young
        self._young = _Generation()

    def _let_go(self) -> None:
        """Let a few of the forgotten ghosts go: a million at once would be a pause."""
        if not self._to_let_go:
            self._fading.clear()
            return
        ghosts = self._to_let_go[-1]
        for _ in range(min(len(ghosts), _NUM_LET_GO)):
            ghost = ghosts.popitem()[1]
            if ghost is not _REVIVED:
                page = ghost.run[: self._page_bytes]
                self._sketch.add(page_key(ghost.place, page))
        if not ghosts:
            self._to_let_go.pop()

    def _cut_inside(self, node: RadixNode, run: bytes) -> bytes:
        """Cut a node piece by piece, down to each place in it; returns what is left."""
        inside = self._inside.pop(node)
        kept = len(node.key)
        for offset in sorted(inside, reverse=True):
            if offset < kept:
                self._inside[node] = inside
                break
            piece = run[offset - kept :]
            run = run[: offset - kept]
            behind = node.place
            node.place = place = inside.pop(offset)
            by = self._tree.cause or self._policy
            page = first_page(piece, self._page_bytes)
            self._young.put(Ghost(place, piece, behind, by, self.now), page)
        return run

    # Ghosts move and go -----------------------------------------------------

    def _on_split(self, upper: RadixNode, lower: RadixNode) -> None:
        """Share out the places inside of a node. O(places)."""
        if self._inside and lower in self._inside:
            self._share_inside(upper, lower)
        if lower.place & 1:
            cut = len(upper.key)
            num_sure = self._sure_bytes.pop(lower, 0)
            if num_sure > cut:
                self._sure_bytes[lower] = num_sure - cut
            elif num_sure < cut:
                if not upper.place:
                    upper.place = _UNSURE
                if num_sure:
                    self._sure_bytes[upper] = num_sure

    def _share_inside(self, upper: RadixNode, lower: RadixNode) -> None:
        cut = len(upper.key)
        above: dict[int, int] = {}
        below: dict[int, int] = {}
        for offset, place in self._inside.pop(lower).items():
            if offset < cut:
                above[offset] = place
            elif offset > cut:
                below[offset - cut] = place
            else:
                upper.place = place
        if above:
            self._inside[upper] = above
        if below:
            self._inside[lower] = below

    def _on_published(self, node: RadixNode, start: int) -> None:
        """Forget what is cached again.

        Complexity: O(1), plus O(parts that are), plus one comparison of their tokens.
        """
        if start == 0:
            place = node.parent.place
            if place == _UNSURE:
                node.place = _UNSURE
            elif place:
                self._revive(place, node, 0)
            return
        place = node.place
        if place and place != _UNSURE:  # which its new end is as well
            # What followed the end of the node is inside of it now.
            node.place = 0
            self._revive(place, node, start)

    def _revive(self, place: int, node: RadixNode, start: int) -> None:
        """Forget what ``node.key[start:]`` has of the ghosts that follow a place."""
        key = node.key
        page_bytes = self._page_bytes
        was_unsure = place & 1 == 1
        # Where it becomes unsure, if it does.
        unsure_at = start if was_unsure else len(key)
        while place:
            page = key[start : start + page_bytes]
            generation = self._young
            ghost = generation.find(abs(place), page)
            if ghost is None:
                generation = self._old
                ghost = generation.find(abs(place), page)
            if start and place != _UNSURE and (ghost is None or place > 0):
                # Other ghosts may follow here; before the start, that is its parent's.
                self._inside.setdefault(node, {})[start] = abs(place)
            if ghost is None:
                if unsure_at == len(key) and self._has_lost(place, page):
                    unsure_at = start
                break
            run, place = ghost.run, ghost.behind
            if place & 1 and start < unsure_at:
                unsure_at = start
            shared = self._shared_bytes(key, start, len(key), run)
            start += shared
            generation.take(ghost, page)
            generation.num_bytes -= shared
            if shared < len(run):
                # The rest stays as old as it was.
                rest = run[shared:]
                rest_place = self._new_place(place & 1)
                generation.put_tail(
                    Ghost(rest_place, rest, place, ghost.by, ghost.when)
                )
                place = -rest_place
            if start == len(key):
                node.place = place
                break
        if unsure_at < len(key):
            if not node.place:
                node.place = _UNSURE
            if unsure_at and not was_unsure:
                self._sure_bytes[node] = unsure_at

    def _shared_bytes(self, raw: bytes, start: int, end: int, run: bytes) -> int:
        """Count the bytes of whole pages that ``raw[start:end]`` shares with a run."""
        if raw.startswith(run, start, end):
            return len(run)
        return shared_bytes(raw, start, end, run, self._page_bytes)
