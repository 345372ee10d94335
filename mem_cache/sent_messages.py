"""The newest messages of a cache: only those may be recalled, the newest first."""

from __future__ import annotations

from collections import deque
from itertools import islice

from .errors import RequestStateError
from .kv_cache_info import KVCacheInfo

MAX_NUM_MESSAGES = 64
"""Messages that are remembered, those of a step or two: one of many pages is large."""


class SentMessages:
    """What a cache has told its workers lately.

    Attributes:
        newest: The messages, the newest last; whoever makes one appends it.
        num_sent: How many were made and not recalled; whoever makes one counts it.
    """

    __slots__ = ("newest", "num_sent")

    def __init__(self) -> None:
        """Start without a message."""
        self.newest: deque[KVCacheInfo] = deque(maxlen=MAX_NUM_MESSAGES)
        self.num_sent = 0

    def clear(self) -> None:
        """Forget all messages: none of them may be recalled any more."""
        self.newest.clear()
        self.num_sent = 0

    def take_back(self, info: KVCacheInfo) -> None:
        """Forget the newest message, or the newest ones that were merged to this one.

        Args:
            info: A message that is to be recalled.

        Raises:
            RequestStateError: It is no message, or not the newest; nothing has changed.

        Complexity: O(numbers of the message).
        """
        num_messages = self._num_merged(info)
        if num_messages is None:
            raise RequestStateError(
                "recall needs the newest message that was made and not recalled yet, "
                f"or the newest ones merged; got {info!r:.200}"
            )
        self.num_sent -= num_messages
        for _ in range(num_messages):
            self.newest.pop()

    def _num_merged(self, info: object) -> int | None:
        """Return how many of the newest messages this one stands for."""
        if not isinstance(info, KVCacheInfo):
            return None
        num_reqs = 0
        for num_messages, message in enumerate(reversed(self.newest), 1):
            num_reqs += message.num_reqs
            if num_reqs > info.num_reqs:
                return None
            if num_reqs == info.num_reqs and self._merged(num_messages) == info:
                return num_messages
        # A step of more messages than are remembered can only be believed.
        is_older = self.num_sent > len(self.newest) and num_reqs < info.num_reqs
        return len(self.newest) if is_older else None

    def _merged(self, num_messages: int) -> KVCacheInfo | None:
        newest = reversed([*islice(reversed(self.newest), num_messages)])
        try:
            return KVCacheInfo.merge([*newest])
        except RequestStateError:
            return None  # nobody can have merged these
