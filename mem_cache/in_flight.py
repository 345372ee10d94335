"""In flight: what running requests were admitted with, and may publish still."""

from __future__ import annotations

from bisect import bisect_left, insort

from .radix_node import RadixNode
from .request_kv import RequestKV
from .tokens import shared_bytes


class InFlight:
    """The prompts that wait to be published, sorted under each root.

    Of all that are sorted, a neighbour shares the longest prefix with a prompt. So the
    answer is exact, needs no second tree, and nothing moves when somebody publishes:
    what is cached already is not asked for.

    The last prompt is sorted in when the next one comes: many are published before.
    """

    def __init__(self, page_bytes: int) -> None:
        """Start without prompts.

        Args:
            page_bytes: Bytes of the tokens of one page.
        """
        self._page_bytes = page_bytes
        self._keys: dict[RadixNode, list[bytes]] = {}
        self._last_root: RadixNode | None = None
        self._last_key = b""  # empty if there is none, or it is among the others

    def __len__(self) -> int:
        """Count the prompts."""
        return sum(map(len, self._keys.values())) + bool(self._last_key)

    def state(self) -> dict[str, object]:
        """Return all prompts, as plain values to compare."""
        return {
            "prompts in flight": [
                *((root, list(keys)) for root, keys in self._keys.items()),
                (self._last_root, [self._last_key]),
            ]
        }

    def join(self, root: RadixNode, key: bytes, start: int) -> int:
        """Add a prompt, and tell how much of it is in flight already.

        Args:
            root: The root that the prompt was looked up under.
            key: Its tokens, at least one page.
            start: What comes before is not asked for, in bytes, whole pages.

        Returns:
            Bytes of whole pages that the prompt shares with another, or `start` if that
            is more.

        Complexity: O(log prompts) comparisons.
        """
        if self._last_key:
            self._sort_in_last()
        self._last_root = root
        self._last_key = key
        longest = start
        if root in self._keys:
            keys = self._keys[root]
            missing = key[start : start + self._page_bytes]
            at = bisect_left(keys, key)
            for other in keys[at - 1 if at else 0 : at + 1]:
                # Most differ right there: they need no exact count.
                if missing and other.startswith(missing, start):
                    shared = shared_bytes(key, 0, len(key), other, self._page_bytes)
                    longest = max(longest, shared)
        return longest

    def leave(self, request: RequestKV) -> None:
        """Take the prompt out that a request awaits; `join` added it."""
        key = request.awaited
        node = request.node
        assert node is not None  # it has its lease
        root = node.root
        # Requests of one `RadixKey` share its bytes, under the roots of two epochs too.
        if key is self._last_key and root is self._last_root:
            self._last_root = None
            self._last_key = b""
            return
        keys = self._keys[root]
        del keys[bisect_left(keys, key)]
        if not keys:
            del self._keys[root]

    def _sort_in_last(self) -> None:
        root = self._last_root
        assert root is not None  # it came with the key
        insort(self._keys.setdefault(root, []), self._last_key)
