"""The chunk cache: the same interface without sharing."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, ClassVar

from mypy_extensions import mypyc_attr

from .eviction import RecencyIndex
from .memory_manager import MemoryManager
from .prefix_cache import PrefixCache
from .radix_key import RadixKey
from .radix_tree import RadixTree
from .request_kv import RequestKV
from .sizes import Flag, Integer
from .tokens import TOKEN_BYTES, Tokens
from .virtual_tokens import MAX_NUM_CONTENTS

if TYPE_CHECKING:
    from .shared_counters import SharedCounters


@mypyc_attr(allow_interpreted_subclasses=True)
class ChunkCache(PrefixCache):
    """A prefix cache that caches nothing: what a request computed goes with it.

    Its tree stays empty. Engines use it to switch prefix caching off.
    """

    shares_prefixes: ClassVar[bool] = False

    def __init__(
        self,
        memory: MemoryManager,
        *,
        max_num_contents: Integer = MAX_NUM_CONTENTS,
        debug: Flag = False,
        counters: SharedCounters | None = None,
    ) -> None:
        """Make a cache.

        Args:
            memory: The allocator and the request table; no other cache may use them.
            max_num_contents: Most contents that have a virtual token at a time.
            debug: Check everything after each call, and add the last calls to the
                report of a fault.
            counters: Where other processes read the sizes.

        Raises:
            ConfigError: `memory` belongs to another cache, `max_num_contents` is below
                1, or `counters` cannot be written by this cache.
        """
        empty = RadixTree(memory.page_size * TOKEN_BYTES, RecencyIndex())
        super().__init__(memory, empty, max_num_contents, debug, counters)

    def match_prefix(
        self, tokens: Tokens | RadixKey, namespace: Hashable = None
    ) -> int:
        """Return 0: nothing is cached."""
        self._check_thread()
        self._as_key(tokens, namespace)
        return 0

    def _open(self, key: RadixKey, priority: int) -> RequestKV:
        return self._running.open(key.namespace, priority, None, b"")

    def _publish(
        self, request: RequestKV, tokens: Tokens | RadixKey, prompt_len: Integer | None
    ) -> None:
        pass
