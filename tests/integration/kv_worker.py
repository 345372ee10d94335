"""A worker process: it owns a KV pool, and knows what the messages tell it.

Its "model" is a chain: K of a position follows from K of the position before it, read
from the pool, and from the token. One wrong slot spoils everything behind it.
"""

from __future__ import annotations

import struct
import sys
from typing import IO

import msgspec
import torch

from radixkv.kernels import slot_mapping_extend
from radixkv.mem_cache import KVCacheInfo, KVPool, PageTable


class Step(msgspec.Struct, tag=True):
    """Compute these tokens, the requests of `info` one after another."""

    info: KVCacheInfo
    tokens: list[int]


class Read(msgspec.Struct, tag=True):
    """Send K and V of these slots."""

    slots: list[int]


class Resize(msgspec.Struct, tag=True):
    """Change the pool to so many pages."""

    num_pages: int


class Setup(msgspec.Struct, tag=True):
    """The sizes of pool and page table."""

    num_pages: int
    page_size: int
    max_num_requests: int
    max_pages_per_request: int


Message = Setup | Step | Read | Resize


def chain(previous: int, token: int) -> int:
    """K of a position; small enough to be exact in float32."""
    return (previous * 31 + token + 1) % 65_521


def send(stream: IO[bytes], message: object) -> None:
    """Write a message behind its length."""
    wire = msgspec.msgpack.encode(message)
    stream.write(struct.pack("<I", len(wire)) + wire)
    stream.flush()


def receive(stream: IO[bytes]) -> bytes | None:
    """Read a message; ``None`` at the end of the stream."""
    head = stream.read(4)
    return stream.read(*struct.unpack("<I", head)) if head else None


class Worker:
    """Applies steps to its own page table and its own pool."""

    def __init__(self, setup: Setup) -> None:
        self.page_size = setup.page_size
        self.pool = KVPool.uniform(
            num_pages=setup.num_pages,
            page_size=setup.page_size,
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
        )
        self.page_table = PageTable(
            max_num_requests=setup.max_num_requests,
            max_pages_per_request=setup.max_pages_per_request,
        )

    def run(self, step: Step) -> None:
        self.pool.copy_pages(step.info.copy_sources, step.info.copy_targets)
        self.page_table.apply(step.info)
        tokens = iter(step.tokens)
        numbers = (step.info.rows, step.info.starts, step.info.stops)
        for row, start, stop in zip(*(x.tolist() for x in numbers), strict=True):
            known = self.slots(row, max(start - 1, 0), start)
            value = self.values(self.pool.k_buffer(0), known)[0] if start else 0
            values = []
            for _ in range(start, stop):
                value = chain(value, next(tokens))
                values.append(value)
            k = torch.tensor(values, dtype=torch.float32).reshape(-1, 1, 1)
            self.pool.store(0, k, -k, self.slots(row, start, stop))

    def slots(self, row: int, start: int, stop: int) -> torch.Tensor:
        numbers = [torch.tensor([x], dtype=torch.int32) for x in (row, start, stop)]
        return slot_mapping_extend(
            self.page_table.table,
            *numbers,
            page_size=self.page_size,
            num_tokens=stop - start,
        )

    def read(self, slots: list[int]) -> list[list[int]]:
        buffers = (self.pool.k_buffer(0), self.pool.v_buffer(0))
        return [self.values(x, torch.tensor(slots, dtype=torch.int64)) for x in buffers]

    def values(self, buffer: torch.Tensor, slots: torch.Tensor) -> list[int]:
        found = buffer[slots // self.page_size, slots % self.page_size]
        return found.flatten().int().tolist()


def main() -> None:
    """Serve messages from standard input until it ends."""
    torch.set_num_threads(1)
    worker: Worker | None = None
    while (wire := receive(sys.stdin.buffer)) is not None:
        message = msgspec.msgpack.decode(wire, type=Message)
        if isinstance(message, Setup):
            worker = Worker(message)
            continue
        assert worker is not None
        if isinstance(message, Step):
            worker.run(message)
        elif isinstance(message, Resize):
            worker.pool.resize(message.num_pages)
        else:
            send(sys.stdout.buffer, worker.read(message.slots))


if __name__ == "__main__":
    main()
