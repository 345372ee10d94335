"""B182: whoever samples without a seed gets one of its own, the same everywhere."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from radixkv.mem_cache import MemoryManager, RadixCache
from radixkv.scheduling import (
    Batch,
    Engine,
    Request,
    SamplingParams,
    Scheduler,
    sample,
)


class UniformRunner:
    """Every token is as likely as any other."""

    def run(self, batch: Batch) -> NDArray[np.int32]:
        entries = [entry for entry in batch.entries if entry.num_samples]
        return sample(
            torch.zeros(len(entries), 1000),
            [entry.request.sampling_params for entry in entries],
            [entry.stop for entry in entries],
        )


def generate(*params: SamplingParams) -> list[Request]:
    memory = MemoryManager(64, 4, max_num_requests=8, max_context_len=64)
    requests = [Request(str(i), [1, 2, 3], each) for i, each in enumerate(params)]
    return Engine(Scheduler(RadixCache(memory)), UniformRunner()).generate(requests)


def test_b182_two_requests_without_a_seed_say_different_things() -> None:
    params = SamplingParams(8, temperature=1.0)
    first, second = generate(params, params)

    assert first.output_tokens != second.output_tokens
    assert first.seed != second.seed
    assert first.seed == first.usage.seed == first.sampling_params.seed
    assert None is params.seed  # it may be for many requests


def test_b182_the_seed_that_was_told_says_the_same_again() -> None:
    params = SamplingParams(8, temperature=1.0)
    _, second = generate(params, params)
    seed = second.usage.seed

    (again,) = generate(SamplingParams(8, temperature=1.0, seed=seed))

    assert second.output_tokens == again.output_tokens
    assert seed == again.seed


def test_b182_the_same_requests_again_say_the_same() -> None:
    params = [SamplingParams(8, temperature=1.0)] * 3

    first, second = generate(*params), generate(*params)

    assert [r.output_tokens for r in first] == [r.output_tokens for r in second]


def test_b182_a_seed_that_was_given_stays() -> None:
    (first, second) = generate(*[SamplingParams(8, temperature=1.0, seed=0)] * 2)

    assert first.output_tokens == second.output_tokens
    assert (0, 0) == (first.seed, second.usage.seed)


def test_b182_who_does_not_sample_needs_none() -> None:
    (request,) = Request("a", [1]).fan_out(1)
    assert (None, None) == (request.seed, request.usage.seed)


def test_b182_samples_of_a_request_without_a_seed_differ() -> None:
    request = Request("r", [1, 2, 3], SamplingParams(8, temperature=1.0))
    samples = request.fan_out(4)
    memory = MemoryManager(64, 4, max_num_requests=8, max_context_len=64)
    Engine(Scheduler(RadixCache(memory)), UniformRunner()).generate(samples)

    assert 4 == len({each.seed for each in samples})
    assert 4 == len({tuple(each.output_tokens) for each in samples})


@given(st.sets(st.integers(0, 2**64 - 1), min_size=2, max_size=50))
def test_b182_no_two_numbers_give_the_same_seed(numbers: set[int]) -> None:
    params = SamplingParams(temperature=1.0)
    seeds = {params.with_seed(number).seed for number in numbers}

    assert len(numbers) == len(seeds)
    assert all(seed is not None and 0 <= seed < 2**64 for seed in seeds)


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_b182_every_process_makes_the_same_seeds(hash_seed: str) -> None:
    program = (
        "from radixkv.scheduling import SamplingParams\n"
        "print([SamplingParams(temperature=1.0).with_seed(i).seed for i in range(3)])"
    )
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    told = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    ).stdout

    # The first numbers of SplitMix64 from 0, as its authors' program prints them.
    expected = [16294208416658607535, 7960286522194355700, 487617019471545679]
    assert f"{expected}\n" == told
