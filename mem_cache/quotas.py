"""Quotas: what each namespace is sure of, and what it may use at most."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from typing import TYPE_CHECKING

from .allocator import TokenToKVPoolAllocator
from .errors import ConfigError, IntegrityError, OutOfPagesError
from .eviction import EvictionIndex, KeyedIndex, RecencyIndex
from .quota import Quota, requests_of
from .quota_index import QuotaIndex
from .radix_node import PAGE_ID_BYTES, RadixNode, RadixRoot
from .radix_tree import RadixTree
from .running_requests import RunningRequests
from .sizes import Integer, as_size, num_pages_for
from .stale_first import StaleFirst
from .tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from .room_forecast import RoomForecast


class Quotas:
    """The namespaces with a quota, in the order in which they got one.

    Their roots stay in the tree, so each node finds its quota in O(1), and so does each
    request. The index of the tree is split by namespace as long as there are any.
    """

    def __init__(
        self,
        tree: RadixTree,
        running: RunningRequests,
        allocator: TokenToKVPoolAllocator,
    ) -> None:
        """Start without quotas; nothing is changed.

        Args:
            tree: The cached prefixes.
            running: The running requests.
            allocator: Knows how many pages there are, and how many are free.
        """
        self._tree = tree
        self._running = running
        self._allocator = allocator
        self._index: QuotaIndex | None = None
        self._roots: dict[Hashable, RadixRoot] = {}
        self._quotas: dict[Hashable, Quota] = {}

    def __len__(self) -> int:
        """Count the namespaces with a quota."""
        return len(self._quotas)

    def set(
        self, namespace: Hashable, floor_size: Integer, ceiling_size: Integer | None
    ) -> None:
        """Give a namespace a quota, or another, or none.

        Args:
            namespace: Whose it is.
            floor_size: What others leave it, in tokens; rounded up to whole pages.
            ceiling_size: Most that it may use, in tokens; rounded down to whole pages.
                With a floor of 0, ``None`` takes the quota away.

        Raises:
            ConfigError: A size is out of range, the floor is above the ceiling, or the
                floors of all namespaces do not fit in the capacity.
        """
        page_size = self._allocator.page_size
        floor = num_pages_for(as_size("floor_size", floor_size, 0), page_size)
        ceiling = None
        if ceiling_size is not None:
            ceiling = as_size("ceiling_size", ceiling_size, 0) // page_size
            if floor > ceiling:
                raise ConfigError(
                    f"floor_size must be <= ceiling_size in whole pages of {page_size} "
                    f"tokens, got {floor_size} ({floor} pages) and {ceiling_size} "
                    f"({ceiling} pages)"
                )
        quota = self._quotas.get(namespace)
        known = 0 if quota is None else quota.num_floor_pages
        self._check_floors(floor - known, self._allocator.num_pages)
        if floor == 0 and ceiling is None:
            if quota is not None:
                self._remove(quota)
            return
        if quota is None:
            quota = self._add(namespace)
        quota.num_floor_pages = floor
        quota.num_ceiling_pages = ceiling

    def check_capacity(self, num_pages: int) -> None:
        """Refuse a capacity that the floors do not fit in.

        Raises:
            ConfigError: They do not.
        """
        self._check_floors(0, num_pages)

    def max_num_pages(self, namespace: Hashable) -> int:
        """Return the pages that a namespace can have at most. O(quotas)."""
        num_pages = self._allocator.num_pages
        own = self._quotas.get(namespace)
        for quota in self._quotas.values():
            if quota is not own:
                num_pages -= quota.num_floor_pages
        if own is not None and own.num_ceiling_pages is not None:
            num_pages = min(num_pages, own.num_ceiling_pages)
        return num_pages

    def begin_epoch(self, namespace: Hashable) -> None:
        """Let a quota go on without what has become stale. O(1).

        Args:
            namespace: Its root is stale; one without a quota is no fault.
        """
        quota = self._quotas.get(namespace)
        if quota is None:
            return
        assert self._index is not None  # there is a quota
        stale = self._roots[namespace]
        self._index.retire(quota, stale)
        stale.quota = None
        self._forget_if_unused(stale)
        root = self._roots[namespace] = self._tree.add_root(namespace)
        root.quota = quota
        root.counters = stale.counters
        quota.num_tree_pages = quota.num_evictable_pages = 0

    @property
    def num_reachable_pages(self) -> int:
        """Pages that may be evicted now: all but those that floors keep. O(quotas)."""
        num_pages = self._tree.num_evictable_pages
        for quota in self._quotas.values():
            num_pages -= max(0, quota.num_evictable_pages - quota.num_spare_pages)
        return num_pages

    # Forecasts --------------------------------------------------------------

    def allows(
        self, namespace: Hashable, num_new_pages: int, forecast: RoomForecast
    ) -> bool:
        """Tell whether a namespace may allocate so many pages below its ceiling."""
        quota = self._quotas.get(namespace)
        if quota is None or quota.num_ceiling_pages is None:
            return True
        num_pages = forecast.num_pages_in_use(quota) + num_new_pages
        return num_pages <= quota.num_ceiling_pages

    def num_withheld_pages(
        self, claims: Mapping[Hashable, int], forecast: RoomForecast
    ) -> int:
        """Return the evictable pages that floors may withhold from somebody's claim.

        What a namespace allocates fills its floor, but it may have done so with free
        pages and kept its evictable ones. From itself, a floor withholds nothing. So if
        all claims together fit in what is left, each allocation finds its pages, in
        whatever order they come and whatever is evicted.

        Args:
            claims: Pages that each namespace may allocate still.
            forecast: What they find.

        Complexity: O(quotas + claims).
        """
        withheld: dict[Hashable, int] = {}
        for namespace, quota in self._quotas.items():
            num_used = forecast.num_pages_in_use(quota) + claims.get(namespace, 0)
            rest = quota.num_floor_pages - num_used
            rest = min(rest, forecast.num_evictable_pages(quota))
            withheld[namespace] = max(0, rest)
        own = [withheld.get(name, 0) for name, claim in claims.items() if claim]
        return sum(withheld.values()) - min(own, default=0)

    # Eviction ---------------------------------------------------------------

    def make_room(self, num_pages: int, claims: Mapping[Quota, int]) -> bytes:
        """Evict what an allocation needs, or refuse it and change nothing.

        First, each namespace that it would push above its ceiling gives up its own
        pages, exactly as many as that takes. Then whoever goes first gives up what is
        missing still. Others keep their floors; for its own allocation, a namespace
        also loses pages below its floor. The new pages count as used from here on.

        Args:
            num_pages: New pages of the batch; there must be free ones afterwards.
            claims: How many of them each quota gets.

        Returns:
            The page ids evicted, the bytes of int32.

        Raises:
            QuotaError: A namespace would pass its ceiling, whatever it evicts.
            OutOfPagesError: Not even eviction makes enough room.
            PolicyError: The policy failed.
        """
        for quota, num_new in claims.items():
            quota.check_ceiling(num_new)
        for quota, num_new in claims.items():
            quota.num_held_pages += num_new
            quota.num_own_pages = num_new
        try:
            return self._make_room(num_pages, claims)
        except Exception:
            for quota, num_new in claims.items():
                quota.num_held_pages -= num_new
            raise
        finally:
            for quota in claims:
                quota.num_own_pages = 0

    def evict(self, num_pages: int) -> bytes:
        """Evict for nobody in particular: everybody keeps its floor.

        Returns:
            The page ids evicted, the bytes of int32; fewer if fewer may go.

        Raises:
            PolicyError: The policy failed; nothing was evicted.

        Complexity: O(nodes evicted), times O(quotas) and that of the policy's index.
        """
        self._tree.index.check()
        return self._evict(num_pages)

    def _make_room(self, num_pages: int, claims: Iterable[Quota]) -> bytes:
        num_free = self._allocator.num_free_pages
        shortfall = num_pages - num_free
        if shortfall > 0:
            reachable = self.num_reachable_pages
            if shortfall > reachable:
                raise OutOfPagesError(
                    needed=num_pages,
                    available=num_free,
                    evictable=reachable,
                    protected=self._tree.num_protected_pages,
                    held=self._running.num_held_pages,
                )
        excess = {quota: quota.num_excess_pages for quota in claims}
        if shortfall <= 0 and not any(excess.values()):
            return b""
        self._tree.index.check()
        with self._tree.because("quota"):
            own = b"".join([self._evict_own(*item) for item in excess.items()])
        return own + self._evict(shortfall - len(own) // PAGE_ID_BYTES)

    def _evict_own(self, quota: Quota, num_pages: int) -> bytes:
        """Evict pages of one namespace; as many are evictable."""
        assert self._index is not None  # there is a quota
        freed: list[bytes] = []
        while num_pages > 0:
            node = self._index.first_of(quota)
            assert node is not None
            freed.append(self._tree.trim(node, num_pages))
            num_pages -= len(freed[-1]) // PAGE_ID_BYTES
        return b"".join(freed)

    def _evict(self, num_pages: int) -> bytes:
        """Evict those that go first, and from each no more than it may lose."""
        freed: list[bytes] = []
        while num_pages > 0:
            node = self._tree.index.first()
            if node is None:
                break
            quota = node.root.quota
            most = num_pages if quota is None else quota.num_spare_pages
            freed.append(self._tree.trim(node, min(num_pages, most)))
            num_pages -= len(freed[-1]) // PAGE_ID_BYTES
        return b"".join(freed)

    # The whole --------------------------------------------------------------

    def check_integrity(self) -> None:
        """Recount what each namespace with a quota uses. Costs O(nodes + requests).

        Raises:
            IntegrityError: A counter is wrong, or a node or a request has the quota of
                another namespace.
        """
        faults: list[str] = []
        for namespace, quota in self._quotas.items():
            root = self._roots[namespace]
            if self._tree.root_of(namespace) is not root or root.quota is not quota:
                faults.append(f"namespace {namespace!r} has lost its quota")
                continue
            page_size = self._allocator.page_size
            nodes = self._tree.nodes_of(root)
            requests = requests_of(namespace, self._running)
            faults += quota.faults(nodes, requests, page_size)
        faults += [
            f"{request!r} has a wrong quota"
            for request in self._running
            if request.quota is not self._quotas.get(request.namespace)
        ]
        if faults:
            raise IntegrityError("\n".join(["the quotas are wrong:", *faults]))

    # Namespaces come and go -------------------------------------------------

    def _check_floors(self, more: int, num_pages: int) -> None:
        floors = sum(quota.num_floor_pages for quota in self._quotas.values()) + more
        if floors > num_pages:
            raise ConfigError(
                f"the floors of all namespaces must fit in {num_pages} pages, "
                f"got {floors}"
            )

    def _add(self, namespace: Hashable) -> Quota:
        """Give a namespace a quota without bounds. O(nodes of the namespace)."""
        tree = self._tree
        root = tree.root_of(namespace)
        nodes = list(tree.nodes_of(root)) if root else []
        # First what may fail: a namespace may have an __eq__ of its own.
        requests = requests_of(namespace, self._running)
        quota = Quota(namespace)
        quota.count(nodes, requests, self._allocator.page_size)
        if self._index is None:
            self._begin()
        assert self._index is not None
        self._index.add(quota, [node for node in nodes if not node.lock_ref])
        if root is None:
            root = tree.add_root(namespace)
        root.quota = quota
        self._quotas[namespace] = quota
        self._roots[namespace] = root
        for request in requests:
            request.quota = quota
        return quota

    def _remove(self, quota: Quota) -> None:
        """Take a quota away. O(nodes)."""
        assert self._index is not None  # there is a quota
        root = self._roots.pop(quota.namespace)
        del self._quotas[quota.namespace]
        root.quota = None
        self._index.remove(quota)
        self._forget_if_unused(root)
        for request in self._running:
            if request.quota is quota:
                request.quota = None
        if not self._quotas:
            self._end()

    def _begin(self) -> None:
        """Split the index of the tree by namespace, from now on."""
        outer = self._tree.index
        inner = outer.inner if isinstance(outer, StaleFirst) else outer
        assert isinstance(inner, (RecencyIndex, KeyedIndex))
        self._index = QuotaIndex(inner)
        self._set_index(self._index)
        self._tree.on_published.append(self._count_published)
        self._tree.on_evicted.append(self._count_evicted)

    def _end(self) -> None:
        """Leave the tree as if there never had been a quota."""
        assert self._index is not None
        self._set_index(self._index.shared)
        self._index = None
        self._tree.on_published.remove(self._count_published)
        self._tree.on_evicted.remove(self._count_evicted)

    def _set_index(self, index: EvictionIndex) -> None:
        outer = self._tree.index
        if isinstance(outer, StaleFirst):
            outer.inner = index
        else:
            self._tree.index = index

    def _forget_if_unused(self, root: RadixRoot) -> None:
        # Giving a lease back is what lets the tree look.
        self._tree.lock(root)
        self._tree.unlock(root)

    def _count_published(self, node: RadixNode, start: int) -> None:
        quota = node.root.quota
        if quota is not None:
            page_bytes = self._allocator.page_size * TOKEN_BYTES
            quota.num_tree_pages += (len(node.key) - start) // page_bytes

    def _count_evicted(self, node: RadixNode, key: bytes, pages: bytes) -> None:
        quota = node.root.quota
        if quota is not None:
            num_pages = len(pages) // PAGE_ID_BYTES
            quota.num_tree_pages -= num_pages
            quota.num_evictable_pages -= num_pages
            quota.num_own_pages = max(0, quota.num_own_pages - num_pages)
