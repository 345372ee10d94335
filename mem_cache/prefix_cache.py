"""What a scheduler may ask of a prefix cache, and what all caches do alike."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from threading import enumerate as enumerate_threads
from threading import get_ident
from typing import TYPE_CHECKING, ClassVar, Final, cast

import numpy as np
from mypy_extensions import mypyc_attr
from numpy.typing import NDArray

from .cache_state import Room
from .call_watch import CallWatch
from .debug_log import DebugLog
from .errors import (
    CacheBusyError,
    ConfigError,
    LengthError,
    OutOfPagesError,
    PagesInUseError,
    RequestStateError,
    WrongThreadError,
)
from .explainer import Explainer
from .hit_counters import HitCounters
from .integrity import check_cache
from .kv_cache_info import KVCacheInfo
from .memory_manager import MemoryManager
from .open_object import OpenObject
from .output_marks import OutputMarks
from .page_moves import move_pages_below
from .partial_pages import PartialPages
from .quotas import Quotas
from .radix_key import RadixKey
from .radix_node import PAGE_ID_BYTES
from .radix_tree import RadixTree
from .request_handle import RequestHandle
from .request_kv import RequestKV
from .retention import Retention
from .room_forecast import Obstacle, RoomForecast
from .running_requests import RunningRequests
from .sent_messages import SentMessages
from .sizes import (
    Flag,
    Integer,
    are_equal,
    as_integer,
    as_length,
    as_size,
    check_hashable,
    check_kind,
    num_pages_for,
)
from .stale_first import end_epoch
from .stats import CacheStats
from .step_builder import StepBuilder
from .tokens import Tokens, as_sequence, check_virtual
from .victims import Victim, list_victims
from .virtual_tokens import MAX_NUM_CONTENTS, Digest, VirtualTokens

if TYPE_CHECKING:
    from .shared_counters import SharedCounters


_get_ident: Final = get_ident  # compiled code finds what is final without a look-up

_NO_COPIES: Final[dict[int, int]] = {}


# It is no ABC, as compiled ABCs share what they remember of `isinstance`.
@mypyc_attr(allow_interpreted_subclasses=True)
class PrefixCache(OpenObject):
    """The interface between a batch scheduler and the KV memory.

    At every step boundary ``available + evictable + protected + held = total``, in
    whole pages, and every page has exactly one owner.

    A cache has one owner thread: the first that admits a request; when that has ended,
    the next that calls. All methods refuse other threads with a `WrongThreadError`. The
    properties, which are sizes and `version`, are safe: each is a number of the moment,
    but two that are read one after the other need not belong together.

    A call that a cache refuses raises a `RadixKVError` and changes nothing.

    Wherever a call takes tokens and a namespace, it takes a `RadixKey` of both instead:
    that is checked, and turned into bytes, once for all calls.

    Attributes:
        shares_prefixes: Whether requests of this kind of cache share what they compute.
        memory: The allocator and the request table that it manages, alone.
        watch: Sees every call that may change the cache; ``None`` if nobody looks.
    """

    shares_prefixes: ClassVar[bool] = True

    def __init__(
        self,
        memory: MemoryManager,
        tree: RadixTree,
        max_num_contents: Integer = MAX_NUM_CONTENTS,
        debug: Flag = False,
        counters: SharedCounters | None = None,
    ) -> None:
        """Take charge of `memory`, which no other cache may use.

        Args:
            memory: The allocator and the request table.
            tree: What is cached; empty.
            max_num_contents: Most contents that have a virtual token at a time.
            debug: Check everything after each call.
            counters: Where other processes read the sizes.

        Raises:
            ConfigError: `memory` belongs to another cache, `max_num_contents` is below
                1, or `counters` cannot be written by this cache.
        """
        self._virtual = VirtualTokens(tree, max_num_contents)
        self.memory = memory
        self._allocator = memory.allocator
        self._table = memory.request_table
        self._copies = memory.page_copies
        self._partial_pages: PartialPages | None = None
        self._hits = HitCounters()
        self._running = RunningRequests(
            memory.allocator, memory.request_table, memory.max_context_len, self._hits
        )
        self._sent = SentMessages()
        self._step: StepBuilder | None = None
        self._tree = tree
        self._quotas: Quotas | None = None
        self._retention: Retention | None = None
        self._output_marks: OutputMarks | None = None
        self._owner: int | None = None
        self._explainer: Explainer | None = None
        self._num_published_pages = 0
        self._num_duplicate_pages = 0
        self._num_evicted_pages = 0
        self._rooms: list[Room] = [self._virtual]
        self.watch: CallWatch | None = None
        if debug or counters is not None:
            log = None
            if debug:
                log = DebugLog(self, tree, self._running, self._rooms)
            self.watch = CallWatch(self, log, counters)
        memory.attach()
        if self.watch is not None:
            self.watch.write_counters()

    def __del__(self) -> None:
        """Free all nodes at once, though what listens to the tree refers to it."""
        tree = getattr(self, "_tree", None)
        if tree is not None:
            self._running.let_go()
            tree.take_apart()

    # Sizes ------------------------------------------------------------------

    @property
    def page_size(self) -> int:
        """Slots a page."""
        return self._allocator.page_size

    @property
    def total_size(self) -> int:
        """Capacity, in tokens."""
        return self._allocator.num_pages * self.page_size

    @property
    def available_size(self) -> int:
        """Free, in tokens."""
        return self._allocator.num_free_pages * self.page_size

    @property
    def evictable_size(self) -> int:
        """In the tree and needed by no running request, in tokens."""
        return self._tree.num_evictable_pages * self.page_size

    @property
    def protected_size(self) -> int:
        """In the tree and needed by a running request, in tokens."""
        return self._tree.num_protected_pages * self.page_size

    @property
    def held_size(self) -> int:
        """In pages that running requests own outside the tree, in tokens."""
        return self._running.num_held_pages * self.page_size

    def max_request_size(self, namespace: Hashable = None) -> int:
        """Tell how long a request can become when no other runs, in tokens.

        That is the least of `max_context_len`, the ceiling of its namespace, and the
        capacity without the floors of others.

        Args:
            namespace: Any hashable.

        Raises:
            ConfigError: `namespace` is not hashable.

        Complexity: O(namespaces with a quota).
        """
        self._check_thread()
        check_hashable("namespace", namespace)
        size = self.total_size
        if self._quotas is not None:
            size = self._quotas.max_num_pages(namespace) * self.page_size
        return min(size, self.memory.max_context_len)

    def admission_obstacle(
        self,
        tokens: Tokens | RadixKey,
        max_len: Integer,
        *,
        namespace: Hashable = None,
        reserved_sizes: Mapping[Hashable, Integer] | None = None,
        released: Sequence[RequestHandle] = (),
    ) -> Obstacle | None:
        """Tell what keeps a request from beginning now and growing to its longest.

        If nothing does, `admit` succeeds, and no allocation up to `max_len` lacks pages
        after it, whatever others take of what is reserved for them, in any order. Nor
        does one of theirs, unless its own namespace is at its ceiling. What the request
        would find cached is protected then, so it is room for nobody. Changes nothing.

        Args:
            tokens: What the request would be admitted with, or the key of that.
            max_len: The longest that it may become, in tokens.
            namespace: Where it shares.
            reserved_sizes: What others may allocate still, in tokens, by namespace.
                Each of them needs whole pages, so add up whole pages.
            released: Running requests to reckon with as if they had finished.

        Returns:
            What is in its way; ``None`` if nothing is.

        Raises:
            TokenError: `tokens` are no token ids.
            LengthError: No tokens, more than `max_len`, or this is more than
                `max_context_len`; or a size is negative.
            ConfigError: `namespace` is not hashable, or `reserved_sizes` no mapping.
            RequestStateError: One of `released` is released, foreign, or named twice.

        Complexity: O(namespaces in `reserved_sizes`, and those with a quota), one match
        of `tokens`, and O(nodes) that only `released` use.
        """
        self._check_thread()
        key = self._as_key(tokens, namespace)
        max_len = as_length("max_len", max_len)
        longest = self.memory.max_context_len
        if not 0 < len(key) <= max_len <= longest:
            raise LengthError(
                f"a request must have 1..max_len tokens, and max_len be <= {longest}, "
                f"got {len(key)} and {max_len}"
            )
        namespace = key.namespace
        claims = self._as_claims({} if reserved_sizes is None else reserved_sizes)
        gone = self._as_batch(released)
        if len(set(gone)) < len(gone):
            raise RequestStateError("released must name each request once")
        if not gone and not self.memory.request_table.num_free_rows:
            return Obstacle.ROW
        page_size = self.page_size
        forecast = RoomForecast(self._tree, self._allocator)
        for request in gone:
            forecast.end(request)
        num_found = forecast.begin(key)
        num_new = num_pages_for(max_len, page_size) - num_found
        claims[namespace] = claims.get(namespace, 0) + num_new
        num_pages = forecast.num_pages
        if self._quotas is not None:
            if not self._quotas.allows(namespace, claims[namespace], forecast):
                return Obstacle.QUOTA
            num_pages -= self._quotas.num_withheld_pages(claims, forecast)
        return Obstacle.PAGES if sum(claims.values()) > num_pages else None

    @property
    def version(self) -> int:
        """A number that changes before any answer of `match_prefix` does."""
        return self._tree.version

    # A request's life -------------------------------------------------------

    @abstractmethod
    def match_prefix(
        self, tokens: Tokens | RadixKey, namespace: Hashable = None
    ) -> int:
        """Tell how many leading tokens are cached, in whole pages.

        Changes nothing: no split, no touch, no lock.

        Args:
            tokens: Token ids, or the key of them.
            namespace: Any hashable; equal namespaces share, others share nothing.

        Raises:
            TokenError: `tokens` are no token ids.
            ConfigError: `namespace` is not hashable.
        """
        raise NotImplementedError

    def intern(self, content_digest: Digest) -> int:
        """Return a virtual token for an image, a sound, or any other content.

        Put it in the place of the placeholders that the model has for the content, in
        all tokens that the cache is given. Then equal contents match, and others do
        not: the whole digest is compared.

        The token is alive while a cached page contains it or a running request was
        admitted with it. Each call also claims it for one admission to come, and
        `release` does so again, for a request that was retracted. Claims do not outlive
        `max_num_contents`: the contents with nothing but a claim make room for others,
        the oldest first. A token that is no longer alive is refused, so intern before
        every admission, and keep no tokens.

        Args:
            content_digest: A cryptographic digest of all that determines the content's
                K and V, 16 to 64 bytes; what is no `bytes` object is copied.

        Returns:
            A negative number, the same for the same digest for as long as it is alive.

        Raises:
            ConfigError: `content_digest` is not bytes, or too short or too long.
            OutOfContentsError: As many contents as are allowed are in use.
        """
        if self.watch is not None:
            return self.watch.call(self.intern, content_digest)
        self._check_thread()
        return self._virtual.intern(content_digest)

    def admit(
        self,
        tokens: Tokens | RadixKey,
        *,
        namespace: Hashable = None,
        priority: Integer = 0,
        computed_len: Integer = 0,
    ) -> RequestKV | None:
        """Start a request: a row, and a lock on its cached prefix.

        The prefix is whole pages and at most ``len(tokens) - 1`` tokens: at least one
        is left to compute.

        Args:
            tokens: All token ids known so far, at least one, or the key of them, which
                may grow while the request runs. Where outputs are wanted at positions
                of the prompt, pass only the tokens up to the first of these: it is
                computed, and so is all that follows.
            namespace: Any hashable; equal namespaces share, others share nothing. To
                Python, 1, 1.0 and True are equal.
            priority: Raises the priority of the path that the request publishes.
            computed_len: How many of the tokens the request had computed before it was
                retracted. If it had any, it counts as resumed: what it has to compute
                is no miss any more, and what it finds is no hit.

        Returns:
            The request's handle; all three lengths equal the hit, or two of them are
            beyond it by what is reused of a page (see `RadixCache`). ``None`` if all
            rows are taken; then nothing has changed.

        Raises:
            TokenError: `tokens` are no token ids.
            LengthError: No tokens, or more than `max_context_len`; or `computed_len` is
                negative, or more than there are tokens.
            ConfigError: `namespace` is not hashable, or `priority` no integer.
        """
        if self.watch is not None:
            return self.watch.call(
                self.admit,
                tokens,
                namespace=namespace,
                priority=priority,
                computed_len=computed_len,
            )
        if _get_ident() != self._owner:
            self._check_thread()
        key = self._as_key(tokens, namespace)
        num_tokens = len(key)
        if not 0 < num_tokens <= self._running.max_context_len:
            raise LengthError(
                f"a request must have 1..{self._running.max_context_len} tokens, "
                f"got {num_tokens}"
            )
        rank = as_integer("priority", priority)
        num_computed = _as_computed_len(computed_len, num_tokens)
        if not self._table.num_free_rows:
            return None
        request = self._open(key, rank)
        if key.has_virtual:
            self._virtual.begin(request, key.tokens)
        explainer = self._explainer
        raw = key.raw
        available = 0
        if explainer is not None:
            available = explainer.count_available(request, raw)
        if self._partial_pages is not None:
            self._partial_pages.extend_hit(
                request, raw, self.page_size, self._take_page
            )
        if self._owner is None:
            self._owner = _get_ident()
        request.computed_len = num_computed
        if explainer is not None:
            explainer.begin(request, raw, available)
        else:
            request.hit = (num_tokens, request.committed_len)
        return request

    def alloc_for_extend(
        self, requests: Sequence[RequestHandle], new_lens: Sequence[Integer]
    ) -> KVCacheInfo:
        """Give slots to the next part of each request's prompt.

        All or nothing for the batch; evicts exactly the shortfall. Each message that
        this returns must reach every worker, once and in order.

        Args:
            requests: Running requests, each once. An empty batch is a batch.
            new_lens: Total length of each request after this step, above its
                `committed_len`.

        Returns:
            The step's message; positions ``[committed_len, new_len)`` are to compute.

        Raises:
            OutOfPagesError: Not even eviction makes enough room.
            QuotaError: A namespace would pass its ceiling, whatever it evicts.
            PolicyError: The eviction policy failed.
            LengthError: A length does not go forward, or passes `max_context_len`.
            RequestStateError: A request is released, foreign, or named twice.
        """
        if self.watch is not None:
            return self.watch.call(self.alloc_for_extend, requests, new_lens)
        step = StepBuilder(self)
        self._check_no_step()
        self._grow(step, self._as_batch(requests), _as_lens(new_lens))
        return self._send(step)

    def alloc_for_decode(
        self, requests: Sequence[RequestHandle], num_tokens: Integer = 1
    ) -> KVCacheInfo:
        """Give each request slots for its next tokens, behind its `committed_len`.

        Args:
            requests: Running requests, each once. An empty batch is a batch.
            num_tokens: Tokens a request: 1, or more for drafts.

        Returns:
            The step's message; see `alloc_for_extend`.

        Raises:
            OutOfPagesError: Not even eviction makes enough room.
            QuotaError: A namespace would pass its ceiling, whatever it evicts.
            PolicyError: The eviction policy failed.
            ConfigError: `num_tokens` is below 1.
            LengthError: A length passes `max_context_len`.
            RequestStateError: A request is released, foreign, or named twice.
        """
        if self.watch is not None:
            return self.watch.call(self.alloc_for_decode, requests, num_tokens)
        step = StepBuilder(self)
        self._check_no_step()
        self._grow_by(step, requests, num_tokens)
        return self._send(step)

    def begin_step(self) -> StepBuilder:
        """Begin a step of which parts are added one by one, for one message.

        Returns:
            What gives slots to requests; `StepBuilder.message` or `StepBuilder.recall`
            ends it, and from its first request until then the cache makes no other
            message.

        Raises:
            RequestStateError: The last one has requests and has not ended.
        """
        if self.watch is not None:
            return self.watch.call(self.begin_step)
        if _get_ident() != self._owner:
            self._check_thread()
        self._check_no_step()
        self._step = StepBuilder(self)
        return self._step

    def recall(self, info: KVCacheInfo) -> None:
        """Take note that a message reached no worker: the next one tells the rest.

        That is the rows to forget and the pages to copy, which others rely on. What it
        said of its own requests is lost, so they must be released.

        Args:
            info: The newest message that was made and not recalled yet, as it was
                returned or decoded; or the newest ones, merged.

        Raises:
            RequestStateError: It is no message, or another one; those that were made
                later must be recalled before.
        """
        if self.watch is not None:
            return self.watch.call(self.recall, info)
        self._check_thread()
        self._sent.take_back(info)
        self._running.forget_rows(info.forgotten_rows.tolist())
        self._copies.recall(info)

    def commit(self, request: RequestHandle, new_len: Integer) -> None:
        """Take note that the positions below `new_len` have K and V now.

        Raises:
            LengthError: `new_len` goes backwards, or beyond `allocated_len`.
            RequestStateError: The request is released or foreign.
        """
        if self.watch is not None and self.watch.log is not None:
            return self.watch.call(self.commit, request, new_len)
        kv = self._check(request)
        # This saves a call for each request of a step.
        end = new_len if type(new_len) is int else as_length("new_len", new_len)
        if not kv.committed_len <= end <= kv.allocated_len:
            raise LengthError(
                f"new_len must be in {kv.committed_len}..{kv.allocated_len}, got {end}"
            )
        kv.committed_len = end

    def truncate(self, request: RequestHandle, new_len: Integer) -> None:
        """Drop the positions from `new_len` on, computed or not; frees whole pages.

        Raises:
            LengthError: `new_len` is below `protected_len` or above `allocated_len`.
            RequestStateError: The request is released or foreign.
        """
        if self.watch is not None:
            return self.watch.call(self.truncate, request, new_len)
        kv = self._check(request)
        end = as_length("new_len", new_len)
        if not kv.protected_len <= end <= kv.allocated_len:
            raise LengthError(
                f"new_len must be in {kv.protected_len}..{kv.allocated_len}, got {end}"
            )
        self._running.drop_tail(kv, end)

    def cache_unfinished_req(
        self,
        request: RequestHandle,
        tokens: Tokens | RadixKey,
        *,
        prompt_len: Integer | None = None,
    ) -> None:
        """Publish the full pages that are computed; the request runs on.

        Where another request published the same tokens first, this one's copies are
        freed, and its row lists the tree's.

        Args:
            request: A running request.
            tokens: All its final token ids, or the key of them; at least
                `committed_len`. Drafts must not be among the first `committed_len`.
            prompt_len: Tokens of the prompt; the rest is output. ``None`` if all is
                prompt. It matters where outputs go first.

        Raises:
            LengthError: `tokens` do not cover `committed_len` or `prompt_len`.
            ConfigError: `tokens` are a key of another namespace.
            TokenError: `tokens` are no token ids.
            RequestStateError: The request is released or foreign.

        Complexity: O(new tokens); the walk begins at the request's locked node.
        """
        if self.watch is not None:
            return self.watch.call(
                self.cache_unfinished_req, request, tokens, prompt_len=prompt_len
            )
        if not isinstance(tokens, RadixKey):
            tokens = as_sequence(tokens, self._virtual)
        self._publish(
            self._check_cover(request, tokens, prompt_len), tokens, prompt_len
        )

    def cache_finished_req(
        self,
        request: RequestHandle,
        tokens: Tokens | RadixKey,
        *,
        prompt_len: Integer | None = None,
    ) -> None:
        """Publish the full pages that are computed, and give everything else back.

        The newest sampled token has no K and V yet: with n prompt and k output tokens,
        ``n + k - 1`` are committed.

        Args:
            request: A running request; it is released.
            tokens: See `cache_unfinished_req`.
            prompt_len: See `cache_unfinished_req`.

        Raises:
            LengthError: `tokens` do not cover `committed_len` or `prompt_len`.
            ConfigError: `tokens` are a key of another namespace.
            TokenError: `tokens` are no token ids.
            RequestStateError: The request is released or foreign.
        """
        if self.watch is not None:
            return self.watch.call(
                self.cache_finished_req, request, tokens, prompt_len=prompt_len
            )
        if not isinstance(tokens, RadixKey):
            tokens = as_sequence(tokens, self._virtual)
        kv = self._check_cover(request, tokens, prompt_len)
        self._publish(kv, tokens, prompt_len)
        self._close(kv)

    def release(self, request: RequestHandle) -> None:
        """Give everything back and publish nothing: abort or retract.

        Raises:
            RequestStateError: The request is released or foreign.
        """
        if self.watch is not None:
            return self.watch.call(self.release, request)
        kv = self._check(request)
        if self._virtual.users:
            self._virtual.claim_again(kv)
        self._close(kv)

    def slots(
        self, request: RequestHandle, start: Integer = 0, stop: Integer | None = None
    ) -> NDArray[np.int64]:
        """Return the slots of a request's positions.

        Args:
            request: A running request.
            start: First position.
            stop: End of the positions; `allocated_len` if ``None``.

        Returns:
            Slots, int64 `[stop - start]`.

        Raises:
            LengthError: The positions are not all allocated.
            RequestStateError: The request is released or foreign.
        """
        kv = self._check(request)
        first = as_length("start", start)
        end = kv.allocated_len if stop is None else as_length("stop", stop)
        if not 0 <= first <= end <= kv.allocated_len:
            raise LengthError(
                f"positions must be in 0..{kv.allocated_len}, got {first}..{end}"
            )
        return self._running.slots(kv, first, end)

    # The whole cache --------------------------------------------------------

    def evict_if_needed(self, num_tokens: Integer) -> int:
        """Make room for `num_tokens` tokens: evict the shortfall and no more.

        Returns:
            Tokens evicted, in whole pages; 0 if enough is free. Fewer than the
            shortfall if fewer are evictable, or floors keep them.

        Raises:
            LengthError: `num_tokens` is negative.
            PolicyError: The eviction policy failed.
        """
        if self.watch is not None:
            return self.watch.call(self.evict_if_needed, num_tokens)
        num_pages = self._num_pages(num_tokens)
        return self._evict(num_pages - self._allocator.num_free_pages)

    def evict(self, num_tokens: Integer) -> int:
        """Evict `num_tokens` tokens, whatever is free.

        Returns:
            Tokens evicted, in whole pages; fewer if fewer are evictable, or floors keep
            them.

        Raises:
            LengthError: `num_tokens` is negative.
            PolicyError: The eviction policy failed.
        """
        if self.watch is not None:
            return self.watch.call(self.evict, num_tokens)
        return self._evict(self._num_pages(num_tokens))

    def eviction_order(self, num_pages: Integer) -> list[Victim]:
        """List the pages that the next evictions would drop. Changes nothing.

        Args:
            num_pages: How many.

        Returns:
            Exactly the pages that ``evict(num_pages * page_size)`` would drop now, in
            its order; fewer if fewer are evictable.

        Raises:
            LengthError: `num_pages` is negative.
            PolicyError: The eviction policy failed.
        """
        self._check_thread()
        num_victims = as_length("num_pages", num_pages)
        if num_victims < 0:
            raise LengthError(f"num_pages must be >= 0, got {num_victims}")
        return list_victims(self._tree, num_victims, self.page_size)

    def reset(self) -> None:
        """Forget everything that is cached.

        The eviction policy starts afresh, too: it is told of each page that goes, then
        its method `reset` is called, if it has one, and a failure of it is forgotten.
        Counters go on. A message that was made before can no longer be recalled, and a
        step that has not ended is.

        Afterwards any thread may become the owner.

        Raises:
            CacheBusyError: Requests are running.
        """
        if self.watch is not None:
            return self.watch.call(self.reset)
        self._check_thread()
        if len(self._running):
            raise CacheBusyError(
                f"reset needs a cache without requests, got {len(self._running)}"
            )
        self._tree.clear()
        if self._explainer is not None:
            self._explainer.clear()
        self._restart_policy()
        self._sent.clear()
        if self._step is not None:
            self._drop_step(self._step)
        self._allocator.free_all()
        self.memory.request_table.free_all()
        self._owner = None

    def bump_epoch(self, namespace: Hashable) -> None:
        """End the epoch of a namespace: its weights or its adapter were reloaded.

        What is cached there matches nobody from now on, and is the first to go.
        Requests that were admitted before still finish, but publish nothing.

        Args:
            namespace: Any hashable; one without entries is no fault.

        Raises:
            ConfigError: `namespace` is not hashable.

        Complexity: O(1), whatever is cached.
        """
        if self.watch is not None:
            return self.watch.call(self.bump_epoch, namespace)
        self._check_thread()
        check_hashable("namespace", namespace)
        end_epoch(self._tree, namespace)
        if self._explainer is not None:
            self._explainer.end_epoch(namespace)
        if self._quotas is not None:
            self._quotas.begin_epoch(namespace)
        if self._retention is not None:
            self._retention.end_epoch()

    def resize(self, num_pages: Integer) -> None:
        """Change the capacity while requests run.

        A growth keeps every page where it is. A shrink evicts as many pages as must go,
        and moves those in use above the new end to free ones below it: slots change,
        and the next message tells the workers what to copy. `alloc_for_extend` of an
        empty batch gives a message at once.

        A pool that was given to the memory manager as its `kv_pool` is resized as well.
        A worker resizes any other: before the engine grows, and after it applied the
        first message that was made after a shrink. `MemoryManager.join` makes sure of
        the former. Slots that were read before a shrink are void; messages that were
        made before it are not.

        Args:
            num_pages: The new number of usable pages, at least 1.

        Raises:
            ConfigError: `num_pages` is out of range, or below the floors together.
            PoolSizeError: The pool of a worker has fewer pages.
            PagesInUseError: Running requests, and the floors, need more pages.
            PolicyError: The eviction policy failed.

        Complexity: O(pages + nodes).
        """
        if self.watch is not None:
            return self.watch.call(self.resize, num_pages)
        self._check_thread()
        end = as_size("num_pages", num_pages)
        needed = self._tree.num_protected_pages + self._running.num_held_pages
        evictable = self._tree.num_evictable_pages
        if self._quotas is not None:
            self._quotas.check_capacity(end)
            needed += evictable - self._quotas.num_reachable_pages
            evictable = self._quotas.num_reachable_pages
        if needed > end:
            raise PagesInUseError(needed=needed, available=end)
        excess = needed + evictable - end
        if excess > 0:
            self._take_back(self._drop(excess, "resize"))
        move_pages_below(end, self.memory, self._tree, self._running)
        self.memory.resize(end)
        if self._retention is not None:
            self._retention.settle()
        if self._explainer is not None:
            self._explainer.resize(end)

    def check_integrity(self) -> None:
        """Recount everything from the structures. Costs O(pages + nodes).

        Raises:
            IntegrityError: The law is broken; the message says which quantity is off
                by how many pages, and which pages have two owners or none.
        """
        if self.watch is not None:
            return self.watch.call(self.check_integrity)
        self._check_thread()
        check_cache(self.memory, self._tree, self._running)
        self._virtual.check_integrity()
        if self._retention is not None:
            self._retention.check_integrity()
        if self._output_marks is not None:
            self._output_marks.check_integrity(self._tree)
        if self._quotas is not None:
            self._quotas.check_integrity()

    def stats(self) -> CacheStats:
        """Return the sizes and counters. Costs O(free pages)."""
        self._check_thread()
        page_size = self.page_size
        hits = self._hits
        return CacheStats(
            total_size=self.total_size,
            available_size=self.available_size,
            evictable_size=self.evictable_size,
            protected_size=self.protected_size,
            held_size=self.held_size,
            num_requests=len(self._running),
            num_contents=len(self._virtual),
            num_admitted_requests=hits.num_admitted_requests,
            num_resumed_requests=hits.num_resumed_requests,
            num_prompt_tokens=hits.num_prompt_tokens,
            num_cached_tokens=hits.num_cached_tokens,
            num_missed_evicted_tokens=hits.num_missed_evicted_tokens,
            num_missed_quota_tokens=hits.num_missed_quota_tokens,
            num_missed_unpublished_tokens=hits.num_missed_unpublished_tokens,
            num_missed_other_epoch_tokens=hits.num_missed_other_epoch_tokens,
            num_missed_other_namespace_tokens=hits.num_missed_other_namespace_tokens,
            num_missed_forgotten_tokens=hits.num_missed_forgotten_tokens,
            num_missed_cold_tokens=hits.num_missed_cold_tokens,
            num_missed_unaligned_tokens=hits.num_missed_unaligned_tokens,
            num_resumed_cached_tokens=hits.num_resumed_cached_tokens,
            num_recomputed_tokens=hits.num_recomputed_tokens,
            num_published_tokens=self._num_published_pages * page_size,
            num_duplicate_tokens=self._num_duplicate_pages * page_size,
            num_evicted_tokens=self._num_evicted_pages * page_size,
            runs_per_thousand_pages=self._allocator.fragmentation(),
        )

    # For the caches themselves ----------------------------------------------

    @abstractmethod
    def _open(self, key: RadixKey, priority: int) -> RequestKV:
        """Begin a request with the cached prefix of all tokens but the last."""
        raise NotImplementedError

    @abstractmethod
    def _publish(
        self, request: RequestKV, tokens: Tokens | RadixKey, prompt_len: Integer | None
    ) -> None:
        """Publish the full pages of a request that are computed."""
        raise NotImplementedError

    def _restart_policy(self) -> None:
        """Let the eviction policy start afresh; nothing is cached any more."""

    def _as_batch(self, requests: Iterable[RequestHandle]) -> list[RequestKV]:
        """Refuse what is no batch, and a foreign thread."""
        if _get_ident() != self._owner:
            self._check_thread()
        try:
            batch: list[object] = [*requests]
        except TypeError:
            raise RequestStateError(
                f"a batch must be a sequence of requests, got {requests!r}"
            ) from None
        running = self._running
        for request in batch:
            if not isinstance(request, RequestKV) or request.owner is not running:
                raise _not_running(request)
        return cast("list[RequestKV]", batch)

    def _as_key(self, tokens: Tokens | RadixKey, namespace: Hashable) -> RadixKey:
        """Return the key of tokens, or refuse them."""
        if not isinstance(tokens, RadixKey):
            key = RadixKey(tokens, namespace)
        elif namespace is None:
            key = tokens
        else:
            raise ConfigError(
                f"a key has its namespace, {tokens.namespace!r}; got {namespace!r} too"
            )
        if key.has_virtual:
            check_virtual(key.tokens, self._virtual)
        return key

    def _as_claims(self, sizes: Mapping[Hashable, Integer]) -> dict[Hashable, int]:
        """Return sizes in pages, or refuse them."""
        check_kind("reserved_sizes", sizes, Mapping)
        return {namespace: self._num_pages(sizes[namespace]) for namespace in sizes}

    def _check_no_step(self) -> None:
        """Refuse to make a message before that of a step that has requests."""
        step = self._step
        if step is not None and step.rows:
            raise RequestStateError(f"{step!r} must be packed or recalled before")

    def _extend_step(
        self,
        step: StepBuilder,
        requests: Sequence[RequestHandle],
        new_lens: Sequence[Integer],
    ) -> None:
        """Do as `StepBuilder.extend`."""
        if self.watch is not None:
            return self.watch.call(self._extend_step, step, requests, new_lens)
        step.check_open()
        self._grow(step, self._as_batch(requests), _as_lens(new_lens))

    def _decode_step(
        self,
        step: StepBuilder,
        requests: Sequence[RequestHandle],
        num_tokens: Integer,
    ) -> None:
        """Do as `StepBuilder.decode`."""
        if self.watch is not None:
            return self.watch.call(self._decode_step, step, requests, num_tokens)
        step.check_open()
        self._grow_by(step, requests, num_tokens)

    def _end_step(self, step: StepBuilder) -> KVCacheInfo:
        """Do as `StepBuilder.message`."""
        if self.watch is not None:
            return self.watch.call(self._end_step, step)
        self._check_thread()
        step.check_open()
        return self._send(step)

    def _drop_step(self, step: StepBuilder) -> None:
        """Do as `StepBuilder.recall`."""
        if self.watch is not None:
            return self.watch.call(self._drop_step, step)
        self._check_thread()
        step.check_open()
        self._close_step(step)
        self._running.forget_rows(step.forgotten_rows)

    def _grow_by(
        self, step: StepBuilder, requests: Sequence[RequestHandle], num_tokens: Integer
    ) -> None:
        num_new = as_size("num_tokens", num_tokens)
        batch = self._as_batch(requests)
        self._grow(step, batch, [kv.committed_len + num_new for kv in batch])

    def _grow(
        self, step: StepBuilder, requests: list[RequestKV], lens: list[int]
    ) -> None:
        """Give slots to requests, all or nothing, and add them to a step."""
        running = self._running
        num_pages = running.count_new_pages(step, requests, lens)
        if self._quotas is not None and num_pages:
            claims = running.claims(requests, lens)
            self._take_back(self._quotas.make_room(num_pages, claims))
        pages = self._take(num_pages) if num_pages else b""
        running.grow(step, requests, lens, pages)
        if self._copies.pending:
            self._copies.drop(pages)

    def _send(self, step: StepBuilder) -> KVCacheInfo:
        """End a step; returns its message."""
        self._close_step(step)
        copies = self._copies
        info = step.pack(copies.take() if copies.pending else _NO_COPIES)
        sent = self._sent
        sent.newest.append(info)
        sent.num_sent += 1
        return info

    def _close_step(self, step: StepBuilder) -> None:
        step.is_open = False
        if self._step is step:
            self._step = None

    def _take_page(self, request: RequestKV) -> bytes:
        """Take one page for a request, as `_grow` would."""
        if self._quotas is not None:
            claims = {} if request.quota is None else {request.quota: 1}
            self._take_back(self._quotas.make_room(1, claims))
        return self._take(1)

    def _take(self, num_pages: int) -> bytes:
        """Take pages for requests; evicts exactly the shortfall, or refuses."""
        allocator = self._allocator
        num_free = allocator.num_free_pages
        shortfall = num_pages - num_free
        evicted = b""
        if shortfall > 0:
            tree = self._tree
            if shortfall > tree.num_evictable_pages:
                raise OutOfPagesError(
                    needed=num_pages,
                    available=num_free,
                    evictable=tree.num_evictable_pages,
                    protected=tree.num_protected_pages,
                    held=self._running.num_held_pages,
                )
            # These change hands without a detour through the free list.
            evicted = tree.evict(shortfall)
            self._num_evicted_pages += shortfall
            if not num_free:
                return evicted
            num_pages = num_free
        return allocator.take(num_pages) + evicted

    def _evict(self, num_pages: int) -> int:
        self._check_thread()
        if num_pages <= 0:
            return 0
        return self._take_back(self._drop(num_pages, "manual")) * self.page_size

    def _drop(self, num_pages: int, cause: str) -> bytes:
        """Evict for nobody in particular; returns the page ids."""
        with self._tree.because(cause):
            if self._quotas is not None:
                return self._quotas.evict(num_pages)
            return self._tree.evict(num_pages)

    def _take_back(self, evicted: bytes) -> int:
        """Free pages that the tree gave up; how many."""
        num_pages = len(evicted) // PAGE_ID_BYTES
        self._num_evicted_pages += num_pages
        self._allocator.give_back(evicted)
        return num_pages

    def _close(self, request: RequestKV) -> None:
        if request.awaited:
            self._end_wait(request)
        self._running.close(request)
        if request.node is not None:
            self._tree.unlock(request.node)
        if self._virtual.users:
            self._virtual.end(request)

    def _end_wait(self, request: RequestKV) -> None:
        """Take note that nobody need wait for a request any longer."""
        if self._explainer is not None:
            self._explainer.end(request)
        request.awaited = b""

    def _check(self, request: RequestHandle) -> RequestKV:
        """Refuse a request that this cache does not run, and a foreign thread."""
        if _get_ident() != self._owner:
            self._check_thread()
        if not isinstance(request, RequestKV) or request.owner is not self._running:
            raise _not_running(request)
        return request

    def _check_cover(
        self,
        request: RequestHandle,
        tokens: Tokens | RadixKey,
        prompt_len: Integer | None,
    ) -> RequestKV:
        kv = self._check(request)
        if (
            isinstance(tokens, RadixKey)
            and tokens.namespace is not kv.namespace
            and not are_equal(tokens.namespace, kv.namespace)
        ):
            raise ConfigError(
                f"a request of namespace {kv.namespace!r} needs a key of it, "
                f"got {tokens!r}"
            )
        num_tokens = len(tokens)
        if num_tokens < kv.committed_len:
            raise LengthError(
                f"tokens must cover {kv.committed_len} computed positions, "
                f"got {num_tokens}"
            )
        if prompt_len is not None and not (
            0 <= as_length("prompt_len", prompt_len) <= num_tokens
        ):
            raise LengthError(
                f"prompt_len must be in 0..{num_tokens}, got {prompt_len}"
            )
        return kv

    def _check_thread(self) -> None:
        if self._owner is not None and _get_ident() != self._owner:
            self._check_other_thread(self._owner)

    def _check_other_thread(self, owner: int) -> None:
        if any(thread.ident == owner for thread in enumerate_threads()):
            raise WrongThreadError(
                "a cache has one owner thread, the first that admitted a request; "
                f"got a call from {_get_ident()}, the owner is {owner}"
            )
        self._owner = _get_ident()  # who owned it has ended

    def _num_pages(self, num_tokens: Integer) -> int:
        size = as_length("num_tokens", num_tokens)
        if size < 0:
            raise LengthError(f"num_tokens must be >= 0, got {size}")
        return num_pages_for(size, self.page_size)


def _not_running(request: object) -> RequestStateError:
    return RequestStateError(f"{request!r} was released already, or is another cache's")


def _as_lens(new_lens: Sequence[Integer]) -> list[int]:
    try:
        return [as_length("each of new_lens", new_len) for new_len in new_lens]
    except TypeError as error:
        raise LengthError(f"new_lens must be a sequence: {error}") from None


def _as_computed_len(computed_len: Integer, num_tokens: int) -> int:
    size = as_length("computed_len", computed_len)
    if not 0 <= size <= num_tokens:
        raise LengthError(f"computed_len must be in 0..{num_tokens}, got {size}")
    return size
