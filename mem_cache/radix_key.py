"""The radix key: the tokens of a request, looked at once and made into bytes once."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from .errors import TokenError
from .sizes import Integer, check_hashable, is_integer
from .tokens import TOKEN_BYTES, Tokens, as_ids, has_negative

_MAX_TOKEN: Final = 2**31 - 1


class RadixKey:
    """Token ids in a namespace, which grow at their end.

    A cache takes it wherever it takes tokens and a namespace. What it is made of is
    checked and turned into bytes once; each call with plain tokens does that anew,
    which for a long list of `int` is most of what the call costs.

    Attributes:
        namespace: What separates it from others; equal namespaces share.
        has_virtual: Whether virtual tokens are among its ids. A cache looks at each
            call whether these are alive.

    >>> key = RadixKey([1, 2, 3], "tenant")
    >>> key.append(4)
    >>> key
    RadixKey(4 tokens, namespace='tenant')
    >>> key.tokens.tolist()
    [1, 2, 3, 4]
    """

    __slots__ = ("_buffer", "_num_tokens", "_raw", "_room", "has_virtual", "namespace")

    def __init__(self, tokens: Tokens, namespace: Hashable = None) -> None:
        """Check and copy the tokens.

        Args:
            tokens: Ids in ``[0, 2**31)``, or virtual tokens: a flat list, a tuple, or
                an array of any integer type.
            namespace: Any hashable.

        Raises:
            TokenError: `tokens` are no token ids.
            ConfigError: `namespace` is not hashable.
        """
        if namespace is not None:
            check_hashable("namespace", namespace)
        ids = as_ids(tokens)
        self.namespace = namespace
        self.has_virtual = has_negative(ids)
        self._num_tokens = len(ids)
        # The first tokens, and all of them: until it grows, in the same memory.
        self._raw = ids.tobytes()
        self._buffer: NDArray[np.int32] = np.frombuffer(self._raw, np.int32)
        self._room = self._buffer  # the same, but to write into, once it has grown

    def __copy__(self) -> RadixKey:
        """Return a key of the same tokens, which grows on its own."""
        return RadixKey(self.tokens, self.namespace)

    def __reduce__(self) -> tuple[type[RadixKey], tuple[NDArray[np.int32], Hashable]]:
        """Pickle the tokens and the namespace."""
        return RadixKey, (self.tokens, self.namespace)

    def __len__(self) -> int:
        """Count the tokens."""
        return self._num_tokens

    def __repr__(self) -> str:
        """Show the length and the namespace."""
        return f"RadixKey({self._num_tokens} tokens, namespace={self.namespace!r})"

    @property
    def tokens(self) -> NDArray[np.int32]:
        """All tokens, a view of int32 `[len(self)]` made in O(1); only for reading."""
        return self._buffer[: self._num_tokens]

    def append(self, token: Integer) -> None:
        """Add a token; earlier views stay as they are. O(1) amortized.

        Raises:
            TokenError: `token` is no integer in ``[0, 2**31)``.
        """
        is_int = type(token) is int or is_integer(token)
        if not is_int or not 0 <= token <= _MAX_TOKEN:
            raise TokenError(f"token ids must be integers in [0, 2**31), got {token!r}")
        size = self._num_tokens
        if size == len(self._buffer):
            self._grow(size + 1)
        self._room[size] = token
        self._num_tokens = size + 1

    def extend(self, tokens: Tokens) -> None:
        """Add tokens. O(new tokens) amortized.

        Raises:
            TokenError: They are no token ids; nothing has changed.
        """
        ids = as_ids(tokens)
        if not len(ids):
            return  # without room behind it, the buffer can only be read
        size = self._num_tokens + len(ids)
        if size > len(self._buffer):
            self._grow(size)
        self._room[self._num_tokens : size] = ids
        self._num_tokens = size
        self.has_virtual = self.has_virtual or has_negative(ids)

    @property
    def raw(self) -> bytes:
        """The bytes of all tokens, made again only if tokens were added."""
        if len(self._raw) != self._num_tokens * TOKEN_BYTES:
            self._raw = self.tokens.tobytes()
        return self._raw

    def part(self, start: int, stop: int) -> tuple[bytes, int, int]:
        """Return the tokens of ``[start, stop)`` within some bytes, and where there.

        Nothing is copied but what was added.

        Returns:
            Bytes, and the start and the end of the tokens in these, in bytes.
        """
        end = stop * TOKEN_BYTES
        if end <= len(self._raw):
            return self._raw, start * TOKEN_BYTES, end
        part = self._buffer[start:stop].tobytes()
        return part, 0, len(part)

    def _grow(self, num_tokens: int) -> None:
        # A new array, not resize(): views of the old one are still in use.
        grown = np.empty(max(num_tokens, 2 * len(self._buffer)), np.int32)
        grown[: self._num_tokens] = self.tokens
        self._room = grown
        self._buffer = grown.view()
        self._buffer.flags.writeable = False
