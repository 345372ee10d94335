"""Token ids for content other than tokens: images, audio, prompt embeddings."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .errors import ConfigError, IntegrityError, OutOfContentsError
from .radix_node import RadixNode
from .radix_tree import RadixTree
from .request_kv import RequestKV
from .sizes import Integer, as_size

Digest: TypeAlias = bytes | bytearray | memoryview
"""A content digest as callers give it."""

MAX_NUM_CONTENTS: Final = 65_536
"""Most contents of a cache that was not told another bound."""

LOWEST_TOKEN: Final = -(2**31)
"""The virtual token after which counting begins anew at -1."""

_MIN_DIGEST_BYTES: Final = 16
_MAX_DIGEST_BYTES: Final = 64


class _Content:
    """What is known of a content that has a virtual token.

    Attributes:
        digest: The whole of it.
        num_uses: Occurrences in cached pages, plus running requests.
        num_claims: Calls of `intern` that no admission has redeemed.
    """

    __slots__ = ("digest", "num_claims", "num_uses")

    def __init__(self, digest: bytes) -> None:
        self.digest = digest
        self.num_uses = 0
        self.num_claims = 0


class VirtualTokens:
    """Which content has which virtual token, and who still needs it.

    Virtual tokens are negative, so no vocabulary has them, and the tree compares them
    as it compares all others. Two contents never share one: the key of the dictionary
    is the whole digest.

    A virtual token is alive while somebody needs it: a cached page contains it, a
    running request was admitted with it, or it is claimed. Each `intern` is a claim
    that one admission redeems; `claim_again` makes another. With the last of these the
    content is forgotten. Claims alone are bounded: those whose turn never came go when
    there is no room, the oldest first.

    Numbers are given out in turn, -1 to -2**31 and then round again, past those that
    are alive. Nobody who kept one for too long can mistake another content for his,
    until two thousand million others were interned: the number is refused before that.

    Attributes:
        users: The virtual tokens of each running request that has any. For reading.
        last_token: The number that was given out last, 0 before the first.
    """

    def __init__(self, tree: RadixTree, max_num_contents: Integer) -> None:
        """Start without contents; listens to `tree` from the first one on.

        Args:
            tree: Tells which tokens are cached, and which no longer.
            max_num_contents: Most contents at a time.

        Raises:
            ConfigError: `max_num_contents` is below 1.
        """
        self._tree = tree
        self._max_num_contents = as_size("max_num_contents", max_num_contents)
        self._tokens: dict[bytes, int] = {}
        self._contents: dict[int, _Content] = {}
        # Those that only claims keep alive, the oldest first.
        self._unused: OrderedDict[int, None] = OrderedDict()
        self._is_listening = False
        self.users: dict[RequestKV, list[int]] = {}
        self.last_token = 0

    def __contains__(self, token: object) -> bool:
        """Tell whether `token` is a virtual token that is alive."""
        return token in self._contents

    def __len__(self) -> int:
        """Count the virtual tokens that are alive."""
        return len(self._contents)

    def intern(self, content_digest: Digest) -> int:
        """Return the virtual token of a content, and claim it.

        Args:
            content_digest: What tells the content from all others, 16 to 64 bytes.

        Returns:
            The token, in ``[-2**31, -1]``: the same for as long as it is alive.

        Raises:
            ConfigError: `content_digest` is not bytes, or too short or too long.
            OutOfContentsError: As many contents as are allowed are in use.
        """
        try:
            digest = bytes(memoryview(content_digest))
        except TypeError:
            raise ConfigError(
                f"a content digest must be bytes, got a {type(content_digest).__name__}"
            ) from None
        if not _MIN_DIGEST_BYTES <= len(digest) <= _MAX_DIGEST_BYTES:
            raise ConfigError(
                f"a content digest must have {_MIN_DIGEST_BYTES}..{_MAX_DIGEST_BYTES} "
                f"bytes, got {len(digest)}"
            )
        token = self._tokens.get(digest)
        if token is None:
            token = self._add(digest)
        elif token in self._unused:
            self._unused.move_to_end(token)
        self._contents[token].num_claims += 1
        return token

    def begin(self, request: RequestKV, tokens: NDArray[np.int32]) -> None:
        """Keep the virtual tokens of a new request until `end`; redeems claims.

        Args:
            request: A request that was just admitted.
            tokens: What it was admitted with, int32 `[num_tokens]`; those of them that
                are negative are alive.
        """
        counts = _count_virtual(tokens)
        if not counts:
            return
        self.users[request] = [token for token, _ in counts]
        for token, _ in counts:
            self._use(token, 1)
            content = self._contents[token]
            content.num_claims = max(0, content.num_claims - 1)

    def claim_again(self, request: RequestKV) -> None:
        """Claim the virtual tokens of a request that may be admitted once more."""
        for token in self.users.get(request, ()):
            self._contents[token].num_claims += 1

    def end(self, request: RequestKV) -> None:
        """Take note that a request no longer runs."""
        for token in self.users.pop(request, ()):
            self._drop(token, 1)

    def state(self) -> dict[str, object]:
        """Return all that it knows, as plain values to compare."""
        contents = [
            (token, content.digest, content.num_uses, content.num_claims)
            for token, content in self._contents.items()
        ]
        users = [(request, tuple(tokens)) for request, tokens in self.users.items()]
        return {"contents": (self.last_token, contents, list(self._unused), users)}

    def check_integrity(self) -> None:
        """Recount the uses. Costs O(cached tokens).

        Raises:
            IntegrityError: A virtual token has another number of uses than it should
                have, or is kept or missing without reason.
        """
        recount = dict.fromkeys(self._contents, 0)
        keys = b"".join(node.key for node in self._tree.nodes())
        for token, count in _count_virtual(np.frombuffer(keys, np.int32)):
            recount[token] = recount.get(token, 0) + count
        for tokens in self.users.values():
            for token in tokens:
                recount[token] = recount.get(token, 0) + 1
        faults: list[str] = []
        for token, num_uses in recount.items():
            content = self._contents.get(token)
            if content is None:
                faults.append(f"virtual token {token} is in use, but not alive")
                continue
            if content.num_uses != num_uses:
                off = content.num_uses - num_uses
                faults.append(f"virtual token {token}: num_uses is off by {off:+d}")
            if self._tokens.get(content.digest) != token:
                faults.append(f"virtual token {token} is not that of its content")
            if num_uses == 0 and content.num_claims == 0:
                faults.append(f"virtual token {token} is alive, but nobody needs it")
            if (token in self._unused) != (num_uses == 0):
                faults.append(f"virtual token {token} is wrongly in or not in `unused`")
        if len(self._tokens) != len(self._contents):
            faults.append("two contents share a virtual token")
        if faults:
            raise IntegrityError(
                "\n".join(["the virtual tokens contradict themselves:", *faults])
            )

    def _add(self, digest: bytes) -> int:
        """Give a new content the next number; forgets an old one if there is no room.

        Complexity: O(1); after the first round, O(neighbouring numbers alive).
        """
        if len(self._contents) >= self._max_num_contents:
            if not self._unused:
                in_requests = {token for used in self.users.values() for token in used}
                raise OutOfContentsError(self._max_num_contents, len(in_requests))
            self._forget(next(iter(self._unused)))
        if not self._is_listening:
            # Before the first content there is nothing to hear of.
            self._is_listening = True
            self._tree.on_published.append(self._on_published)
            self._tree.on_evicted.append(self._on_evicted)
        token = self.last_token
        while True:
            token = token - 1 if token > LOWEST_TOKEN else -1
            if token not in self._contents:
                break
        self.last_token = token
        self._tokens[digest] = token
        self._contents[token] = _Content(digest)
        self._unused[token] = None
        return token

    def _forget(self, token: int) -> None:
        self._unused.pop(token, None)
        del self._tokens[self._contents.pop(token).digest]

    def _use(self, token: int, num_uses: int) -> None:
        content = self._contents[token]
        if content.num_uses == 0:
            del self._unused[token]
        content.num_uses += num_uses

    def _drop(self, token: int, num_uses: int) -> None:
        content = self._contents[token]
        content.num_uses -= num_uses
        if content.num_uses == 0:
            if content.num_claims:
                self._unused[token] = None
            else:
                self._forget(token)

    def _on_published(self, node: RadixNode, start: int) -> None:
        if self._contents:
            new = np.frombuffer(node.key, np.int32, offset=start)
            for token, count in _count_virtual(new):
                self._use(token, count)

    def _on_evicted(self, node: RadixNode, tokens: bytes, pages: bytes) -> None:
        if self._contents:
            for token, count in _count_virtual(np.frombuffer(tokens, np.int32)):
                self._drop(token, count)


def _count_virtual(tokens: NDArray[np.int32]) -> list[tuple[int, int]]:
    """Count how often each negative token occurs, those near 0 first.

    Costs one pass if there are none.
    """
    if not len(tokens) or tokens[tokens.argmin()] >= 0:
        return []
    found, counts = np.unique(tokens[tokens < 0], return_counts=True)
    return list(zip(found[::-1].tolist(), counts[::-1].tolist(), strict=True))
