"""One call at a time, from one thread."""

from __future__ import annotations

from threading import enumerate as enumerate_threads
from threading import get_ident
from types import TracebackType

from radixkv.mem_cache.errors import RequestStateError, WrongThreadError


class Turn:
    """Refuses calls of a scheduler that would find it in the middle of another one.

    These come from another thread, or from a policy, a drafter or a runner that calls
    back. Nor can anybody go on after an interrupt (whatever is no `Exception`, such as
    `KeyboardInterrupt`) that has cut a call short: what it had done by then is unknown.
    """

    __slots__ = ("_is_cut_short", "_is_taken", "_owner")

    def __init__(self) -> None:
        """Start without an owner."""
        self._owner: int | None = None
        self._is_taken = False
        self._is_cut_short = False

    def own(self) -> None:
        """Make the calling thread the owner, if there is none."""
        if self._owner is None:
            self._owner = get_ident()

    def check_thread(self) -> None:
        """Refuse a thread that is not the owner, as long as that has not ended.

        Raises:
            WrongThreadError: Another thread owns the scheduler.
        """
        owner = self._owner
        if owner is not None and owner != get_ident():
            self._take_over(owner)

    def __enter__(self) -> None:
        """Begin a call.

        Raises:
            WrongThreadError: Another thread owns the scheduler.
            RequestStateError: Another call is under way, or was cut short.
        """
        self.check_thread()
        if self._is_taken:
            raise RequestStateError(
                "a scheduler must not be called from within one of its calls; note "
                "what is to do, and do it after the step"
            )
        if self._is_cut_short:
            raise RequestStateError(
                "an interrupt has cut a call of this scheduler short, so nothing is "
                "known for sure: make a new one, with a new cache"
            )
        self._is_taken = True

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End a call."""
        self._is_taken = False
        if error_type is not None and not issubclass(error_type, Exception):
            self._is_cut_short = True

    def _take_over(self, owner: int) -> None:
        if any(thread.ident == owner for thread in enumerate_threads()):
            raise WrongThreadError(
                "a scheduler has one owner thread, the first that scheduled a step; "
                f"got a call from {get_ident()}, the owner is {owner}. Hand requests "
                "and aborts over to it, for example by a queue.SimpleQueue"
            )
        self._owner = get_ident()  # who owned it has ended
