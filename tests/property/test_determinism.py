"""The same operations give the same result, in every process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import sys
from random import Random

from radixkv.mem_cache import MemoryManager, OutOfPagesError, RadixCache

random = Random(7)
memory = MemoryManager(40, 2, max_num_requests=6, max_context_len=60)
cache = RadixCache(memory, sys.argv[1])
names = ["", "a", "b", ("c", 1), frozenset("xyz")]
running = []
for step in range(600):
    action = random.randrange(5)
    if action < 2:
        tokens = random.choices([0, 1], k=random.randint(1, 30))
        request = cache.admit(tokens, namespace=random.choice(names))
        if request is not None:
            running.append((request, tokens))
    elif running:
        request, tokens = random.choice(running)
        if action == 2 and request.committed_len < len(tokens):
            try:
                info = cache.alloc_for_extend([request], [len(tokens)])
            except OutOfPagesError as error:
                print(error)
                continue
            cache.commit(request, len(tokens))
            print(info.payload.hex())
        elif action == 3:
            cache.cache_unfinished_req(request, tokens)
        elif action == 4:
            cache.cache_finished_req(request, tokens)
            running.remove((request, tokens))
print(cache.stats())
"""


@pytest.mark.parametrize("policy", ["lru", "lfu"])
def test_hash_seeds_change_nothing(policy: str) -> None:
    dumps = []
    for seed in ("0", "1"):
        output = subprocess.run(
            [sys.executable, "-P", "-c", SCRIPT, policy],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        )
        dumps.append(output.stdout)

    assert dumps[0] == dumps[1]
    assert len(dumps[0].splitlines()) > 50
