"""Every error that RadixKV raises for a call it refuses.

A refused call changes nothing. Caller mistakes also inherit the built-in that fits, so
``except ValueError`` keeps working::

    RadixKVError
    ├── ConfigError (ValueError)              a size or an option out of range
    │   ├── BatchRefusedError                 a batch that a runner has no pages for
    │   ├── MissingExtraError (ImportError)   a package of an extra is not installed
    │   ├── PoolSizeError                     a growth beyond the pool of a worker
    │   ├── SpecConflictError                 workers that contradict each other
    │   └── UnknownSpecError                  a kind of cache without a grouping rule
    ├── TokenError (ValueError)               ids that no int32 vocabulary has
    ├── LengthError (ValueError)              a length that goes backwards or too far
    ├── PageError (ValueError)
    │   ├── DoubleFreeError                   a page that nobody owns, or named twice
    │   └── ForeignPageError                  a page that this pool never hands out
    ├── OutOfPagesError (MemoryError)         not even eviction makes enough room
    │   └── QuotaError                        not below the ceiling of a namespace
    ├── OutOfContentsError (MemoryError)      as many contents as allowed are in use
    ├── KVCacheMemoryError (MemoryError)      not even one longest request fits
    ├── PagesInUseError (RuntimeError)        a shrink would cut off pages in use
    ├── RequestStateError (RuntimeError)      a released, foreign or repeated request
    ├── CacheBusyError (RuntimeError)         a reset while requests are running
    │   └── StalledError                      requests of which none can go on
    ├── WrongThreadError (RuntimeError)       a call from a thread that is not the owner
    ├── PolicyError (RuntimeError)            the caller's policy or drafter failed
    ├── NonFiniteLogitsError (ArithmeticError)    a model that says no next token
    ├── BackendUnavailableError (RuntimeError)    a kernel that cannot run here
    └── IntegrityError (RuntimeError)         the structures contradict each other
"""

from __future__ import annotations

from collections.abc import Hashable

# Kernels raise these, and imports point down only.
from radixkv.kernels.errors import BackendUnavailableError as BackendUnavailableError
from radixkv.kernels.errors import ConfigError as ConfigError
from radixkv.kernels.errors import RadixKVError as RadixKVError


class BatchRefusedError(ConfigError):
    """A runner cannot compute a batch, and has not applied its message.

    Whoever drives it recalls the message, after all that were made since; `Engine`
    does.
    """


class MissingExtraError(ConfigError, ImportError):
    """What is asked for needs a package that only comes with an extra.

    Attributes:
        extra: Name of the extra: ``pip install 'radixkv[EXTRA]'`` brings the package.
    """

    def __init__(self, what: str, package: str, extra: str) -> None:
        """Keep the names.

        Args:
            what: What needs it, in the plural.
            package: What is missing, or what the package says that needs it.
            extra: See above.
        """
        super().__init__(what, package, extra)
        self.what = what
        self.package = package
        self.extra = extra

    def __str__(self) -> str:
        """Say what is missing, and how to install it."""
        return f"{self.what} need {self.package}: pip install 'radixkv[{self.extra}]'"


class PoolSizeError(ConfigError):
    """The cache would have more pages than the pool of a worker.

    Grow the pool first.

    Attributes:
        num_pages: Pages that the cache would have.
        max_num_pages: Pages of the smallest pool.
    """

    def __init__(self, num_pages: int, max_num_pages: int) -> None:
        """Keep the numbers."""
        super().__init__(num_pages, max_num_pages)
        self.num_pages = num_pages
        self.max_num_pages = max_num_pages

    def __str__(self) -> str:
        """Say how many pages were asked for, and how many there are."""
        return (
            f"num_pages must be <= {self.max_num_pages}, the pages of a worker's pool, "
            f"got {self.num_pages}: grow the pool first"
        )


class SpecConflictError(ConfigError):
    """Two workers contradict each other on the cache of a layer, which is named."""


class UnknownSpecError(ConfigError):
    """A class of cache specs has no grouping rule; the message names it."""


class TokenError(RadixKVError, ValueError):
    """Token ids are not a flat sequence of integers in ``[0, 2**31)``.

    Nor are they virtual tokens that are alive.
    """


class LengthError(RadixKVError, ValueError):
    """A length goes backwards, too far, or does not cover what it must."""


class PageError(RadixKVError, ValueError):
    """Page ids that cannot be given back; the whole call is refused."""


class DoubleFreeError(PageError):
    """A page is free already, or is named twice in one call."""


class ForeignPageError(PageError):
    """A page id is outside ``1..num_pages`` (page 0 is the hold page)."""


class OutOfPagesError(RadixKVError, MemoryError):
    """Not even eviction makes enough room; normal under load.

    Retract a running request, or wait until one finishes.

    Attributes:
        needed: Pages that the call needed.
        available: Free pages.
        evictable: Pages that eviction could free; not those that floors keep.
        protected: Pages in the tree that running requests need.
        held: Pages that running requests own outside the tree.
    """

    def __init__(
        self, needed: int, available: int, evictable: int, protected: int, held: int
    ) -> None:
        """Keep the numbers, all in pages."""
        super().__init__(needed, available, evictable, protected, held)
        self.needed = needed
        self.available = available
        self.evictable = evictable
        self.protected = protected
        self.held = held

    def __str__(self) -> str:
        """Say what was needed and where the pages are."""
        return (
            f"need {self.needed} pages, got {self.available} free and "
            f"{self.evictable} evictable ({self.protected} are protected, "
            f"{self.held} held by running requests)"
        )


class OutOfContentsError(RadixKVError, MemoryError):
    """Cached pages and running requests need as many contents as are allowed.

    Evict, wait until a request finishes, or allow more.

    Attributes:
        max_num_contents: Contents that are allowed at a time.
        num_in_requests: Those of them that running requests need.
    """

    def __init__(self, max_num_contents: int, num_in_requests: int) -> None:
        """Keep the numbers; cached pages need the contents that no request needs."""
        super().__init__(max_num_contents, num_in_requests)
        self.max_num_contents = max_num_contents
        self.num_in_requests = num_in_requests

    def __str__(self) -> str:
        """Say how many contents are allowed, and who needs them."""
        return (
            f"max_num_contents is {self.max_num_contents}, and all are in use: "
            f"{self.num_in_requests} by running requests, "
            f"{self.max_num_contents - self.num_in_requests} by cached pages alone"
        )


class QuotaError(OutOfPagesError):
    """An allocation would push a namespace above its ceiling, whatever it evicts.

    Retract a request of that namespace, or wait until one finishes: the pages of others
    are no help. All numbers count only what is the namespace's own.

    Attributes:
        namespace: Whose ceiling it is.
        ceiling: Pages that the namespace may use.
        needed: Pages that the call needed for it.
        available: Pages that it could take without evicting any.
        evictable: Its pages that eviction could free.
        protected: Its pages in the tree that its running requests need.
        held: Pages that its running requests own outside the tree.
    """

    def __init__(
        self,
        namespace: Hashable,
        ceiling: int,
        needed: int,
        evictable: int,
        protected: int,
        held: int,
    ) -> None:
        """Keep the numbers, all in pages."""
        available = max(0, ceiling - evictable - protected - held)
        super().__init__(needed, available, evictable, protected, held)
        self.args = (namespace, ceiling, needed, evictable, protected, held)
        self.namespace = namespace
        self.ceiling = ceiling

    def __str__(self) -> str:
        """Say what was needed, and what the namespace may use and does."""
        return (
            f"need {self.needed} pages for namespace {self.namespace!r}, which may use "
            f"{self.ceiling}: it has {self.evictable} evictable ({self.protected} are "
            f"protected, {self.held} held by running requests)"
        )


class KVCacheMemoryError(RadixKVError, MemoryError):
    """A worker cannot hold even one request of the greatest length.

    Give it more memory, or allow shorter requests only.

    Attributes:
        needed_bytes: Bytes that one such request needs, page 0 included.
        available_bytes: Bytes that the worker has.
        max_len: The greatest length, in tokens.
        longest_len: The greatest length that would fit, in tokens; 0, if none.
    """

    def __init__(
        self, needed_bytes: int, available_bytes: int, max_len: int, longest_len: int
    ) -> None:
        """Keep the numbers."""
        super().__init__(needed_bytes, available_bytes, max_len, longest_len)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.max_len = max_len
        self.longest_len = longest_len

    def __str__(self) -> str:
        """Say what is needed, what there is, and what would fit."""
        return (
            f"a request of {self.max_len} tokens needs {self.needed_bytes} bytes of "
            f"cache, got {self.available_bytes}: at most {self.longest_len} tokens fit"
        )


class PagesInUseError(RadixKVError, RuntimeError):
    """A shrink would cut off pages in use.

    Attributes:
        needed: The least number of pages to which a shrink is possible now.
        available: The number of pages that the call would leave.
    """

    def __init__(self, needed: int, available: int) -> None:
        """Keep the numbers, both in pages."""
        super().__init__(needed, available)
        self.needed = needed
        self.available = available

    def __str__(self) -> str:
        """Say how many pages are needed, and how many would be left."""
        return (
            f"cannot shrink to {self.available} pages: "
            f"those in use need at least {self.needed}"
        )


class RequestStateError(RadixKVError, RuntimeError):
    """A request was released already, is another cache's, or is named twice."""


class CacheBusyError(RadixKVError, RuntimeError):
    """The call needs a cache without running requests."""


class StalledError(CacheBusyError):
    """There are requests, but none of them can go on; the message says why.

    What they need is held by somebody else than the scheduler's requests, or kept back
    by a quota or a policy. Once it is there, they go on.
    """


class WrongThreadError(RadixKVError, RuntimeError):
    """A cache or a scheduler was called from a thread that does not own it."""


class PolicyError(RadixKVError, RuntimeError):
    """The caller's policy or drafter failed; the cause is its own error, if any."""


class NonFiniteLogitsError(RadixKVError, ArithmeticError):
    """The model gives a request no next token: its logits are no numbers to compare.

    One of them is NaN or positive infinity, or all are negative infinity. The request
    ends with this error, alone.
    """


class IntegrityError(RadixKVError, RuntimeError):
    """The structures contradict each other; the message is a signed report."""
