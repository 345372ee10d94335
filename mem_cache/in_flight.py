"""In flight: what running requests were admitted with, and may publish still."""

from __future__ import annotations

from bisect import bisect_left

from .radix_node import RadixNode
from .tokens import common_bytes


class InFlight:
    """The prompts that wait to be published, sorted under each root.

    Of all that are sorted, a neighbour shares the longest prefix with a prompt. So the
    answer is exact, needs no second tree, and nothing moves when somebody publishes:
    what is cached already is not asked for.
    """

    def __init__(self, page_bytes: int) -> None:
        """Start without prompts.

        Args:
            page_bytes: Bytes of the tokens of one page.
        """
        self._page_bytes = page_bytes
        self._keys: dict[RadixNode, list[bytes]] = {}

    def __len__(self) -> int:
        """Count the prompts."""
        return sum(len(keys) for keys in self._keys.values())

    def state(self) -> dict[str, object]:
        """Return all prompts, as plain values to compare."""
        return {
            "prompts in flight": [
                (root, list(keys)) for root, keys in self._keys.items()
            ]
        }

    def join(self, root: RadixNode, key: bytes, start: int) -> int:
        """Add a prompt, and tell how much of it is in flight already.

        Args:
            root: The root that the prompt was looked up under.
            key: Its tokens, whole pages.
            start: What comes before is not asked for, in bytes, whole pages.

        Returns:
            Bytes of whole pages that the prompt shares with another, or `start` if that
            is more.

        Complexity: O(log prompts) comparisons.
        """
        keys = self._keys.get(root)
        if keys is None:
            self._keys[root] = [key]
            return start
        page_bytes = self._page_bytes
        at = bisect_left(keys, key)
        longest = start
        missing = key[start : start + page_bytes]
        for other in keys[at - 1 if at else 0 : at + 1]:
            # Most differ right there: they need no exact count.
            if other[start : start + page_bytes] == missing != b"":
                longest = max(longest, common_bytes(key, 0, other))
        keys.insert(at, key)
        return longest - longest % page_bytes

    def leave(self, root: RadixNode, key: bytes) -> None:
        """Take a prompt out that `join` added."""
        keys = self._keys[root]
        del keys[bisect_left(keys, key)]
        if not keys:
            del self._keys[root]
