"""Any operations in any order: the cache equals the oracle, and the law holds."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize

from radixkv.mem_cache.testing import CacheMachine

from .caches import make_checked


class AnyCacheMachine(CacheMachine):
    """The exported machine, with caches of every kind."""

    @initialize(
        policy=st.sampled_from(["lru", "lru", "lfu", "priority", "none"]),
        num_pages=st.integers(1, 12) | st.integers(6, 12),
        page_size=st.sampled_from([1, 2, 3, 16]),
        num_rows=st.integers(1, 4),
        shorter=st.integers(0, 2),
        partial_pages=st.booleans(),
    )
    def start(  # type: ignore[override]
        self,
        policy: str,
        num_pages: int,
        page_size: int,
        num_rows: int,
        shorter: int,
        partial_pages: bool,
    ) -> None:
        self.checked = make_checked(
            policy,
            num_pages,
            page_size,
            num_rows,
            max_len=20 * page_size - shorter,
            partial_pages=partial_pages,
        )


TestCacheMachine = AnyCacheMachine.TestCase
TestCacheMachine.settings = settings(stateful_step_count=40)
