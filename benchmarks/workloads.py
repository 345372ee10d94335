"""The workloads that the cache is measured on, made from fixed seeds.

A request is a prompt and an output, two int32 arrays; the output is cached as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.int32]
VOCAB_SIZE = 128_000


@dataclass(frozen=True)
class Workload:
    """A stream of requests that can be made again and again.

    Attributes:
        name: What it is called in tables.
        num_requests: Requests in the stream.
        num_unique_tokens: Distinct prefix positions of all prompts and outputs.
        max_len: Longest prompt plus its output, in tokens.
        make: Makes the stream, lazily.
    """

    name: str
    num_requests: int
    num_unique_tokens: int
    max_len: int
    make: Callable[[], Iterator[tuple[Tokens, Tokens]]]


def text(seed: tuple[int, ...], num_tokens: int) -> Tokens:
    """Return the first tokens of an endless text: longer ones begin with shorter."""
    rng = np.random.Generator(np.random.SFC64(seed))
    return rng.integers(0, VOCAB_SIZE, num_tokens, dtype=np.int32)


def few_shot(num_requests: int = 4000) -> Workload:
    """50 system prompts of 400 tokens, 60 own tokens, 40 of output."""
    picks = np.random.Generator(np.random.SFC64(1)).integers(0, 50, num_requests)

    def make() -> Iterator[tuple[Tokens, Tokens]]:
        systems = [text((2, i), 400) for i in range(50)]
        for i, pick in enumerate(picks.tolist()):
            own = text((3, i), 100)
            yield np.concatenate([systems[pick], own[:60]]), own[60:]

    unique = 400 * len(np.unique(picks)) + 100 * num_requests
    return Workload("few-shot", num_requests, unique, 500, make)


def deep(num_sessions: int = 200, num_turns: int = 30) -> Workload:
    """Chats of 30 turns of about 120 tokens, all at the same time."""
    rng = np.random.Generator(np.random.SFC64(4))
    # Each turn adds a question and an answer of 30 to 89 tokens.
    ends = np.cumsum(rng.integers(30, 90, (num_sessions, 2 * num_turns)), axis=1)
    order = np.repeat(np.arange(num_sessions), num_turns)
    rng.shuffle(order)

    def make() -> Iterator[tuple[Tokens, Tokens]]:
        turns = [0] * num_sessions
        for session in order.tolist():
            turn = turns[session]
            turns[session] += 1
            asked, answered = ends[session, 2 * turn : 2 * turn + 2].tolist()
            whole = text((5, session), answered)
            yield whole[:asked], whole[asked:]

    unique, longest = int(ends[:, -1].sum()), int(ends.max())
    return Workload("deep", len(order), unique, longest, make)


def long(num_requests: int = 300) -> Workload:
    """Prompts of 14,000 tokens of which 0 to 90 % are shared, 200 of output."""
    rng = np.random.Generator(np.random.SFC64(6))
    documents = rng.integers(0, 20, num_requests).tolist()
    shared = (rng.integers(0, 10, num_requests) * 1400).tolist()

    def make() -> Iterator[tuple[Tokens, Tokens]]:
        for i, (document, num_shared) in enumerate(zip(documents, shared, strict=True)):
            own = text((8, i), 14_200 - num_shared)
            head = text((7, document), num_shared)
            yield np.concatenate([head, own[:-200]]), own[-200:]

    used = [0] * 20
    for document, num_shared in zip(documents, shared, strict=True):
        used[document] = max(used[document], num_shared)
    unique = sum(used) + 14_200 * num_requests - sum(shared)
    return Workload("long", num_requests, unique, 14_200, make)
