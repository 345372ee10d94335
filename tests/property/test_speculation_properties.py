"""Drafts of any quality change no output, whatever happens around them."""

from __future__ import annotations

from collections import Counter, deque
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from radixkv.mem_cache import ChunkCache, MemoryManager, PrefixCache, RadixCache
from radixkv.scheduling import (
    Batch,
    Drafter,
    Engine,
    Estimate,
    FinishReason,
    NullRunner,
    PromptLookup,
    Request,
    RequestStatus,
    SamplingParams,
    Scheduler,
    SchedulerLimits,
)
from radixkv.scheduling.testing import LabelRunner

VOCAB_SIZE = 3
EOS_TOKEN_IDS = (2,)
PAGE_SIZES = (1, 2, 3, 16)


def plain_outputs(requests: list[Request]) -> dict[object, list[int]]:
    """What comes out without drafts, where there is room for everybody."""
    longest = max(request.max_kv_len for request in requests)
    memory = MemoryManager(
        2 * longest, 1, max_num_requests=2, max_context_len=2 * longest
    )
    scheduler = Scheduler(ChunkCache(memory), eos_token_ids=EOS_TOKEN_IDS)
    copies = [
        Request(r.request_id, r.prompt_tokens, r.sampling_params) for r in requests
    ]
    Engine(scheduler, NullRunner(VOCAB_SIZE)).generate(copies)
    return {request.request_id: request.output_tokens for request in copies}


class Seer:
    """Each guess is right with some probability, and may be too many of them."""

    def __init__(self, random: Random, probability: float) -> None:
        self.outputs: dict[object, list[int]] = {}
        self._random = random
        self._probability = probability

    def propose(self, request: Request, max_tokens: int) -> tuple[int, ...]:
        assert max_tokens >= 1
        random = self._random
        # Behind its end there is nothing to know.
        ahead = self.outputs[request.request_id][request.num_output_tokens :] + [0] * 99
        num_tokens = random.choice(
            [0, 1, max_tokens, random.randint(0, max_tokens + 2)]
        )
        return tuple(
            token
            if random.random() < self._probability
            else (token + random.randint(1, VOCAB_SIZE - 1)) % VOCAB_SIZE
            for token in ahead[:num_tokens]
        )


class Day:
    """Requests at random times in a small pool, with drafts, watched at every step."""

    def __init__(self, page_size: int, probability: float, seed: int) -> None:
        random = self.random = Random(seed)
        self.longest = random.randint(4, 6 * page_size + 10)
        num_pages = -(-self.longest // page_size) + random.choice([0, 1, 2, 5, 20, 60])
        memory = MemoryManager(
            num_pages,
            page_size,
            max_num_requests=random.choice([1, 3, 6]),
            max_context_len=self.longest,
        )
        self.cache: PrefixCache = (
            RadixCache(memory, partial_pages=random.random() < 0.3)
            if random.random() < 0.8
            else ChunkCache(memory)
        )
        overlap = random.random() < 0.4
        self.preempts = random.random() < 0.3
        self.max_in_flight = 2 if overlap else 1
        max_running = random.choice([1, 2, 5])
        limits = SchedulerLimits(
            max_running_requests=max_running,
            max_batched_tokens=max_running + random.choice([0, 1, 2, 5, 30]),
            chunked_prefill_size=random.choice([1, 3, 16]),
        )
        self.seer = Seer(random, probability)
        drafter: Drafter = self.seer if random.random() < 0.8 else PromptLookup()
        self.scheduler = Scheduler(
            self.cache,
            limits,
            admission=random.choice(
                ["worst-case", Estimate(initial_ratio=0.05, min_ratio=0)]
            ),
            retraction=random.choice(["least-loss", "newest"]),
            preempts=self.preempts,
            overlap=overlap,
            drafter=drafter,
            max_draft_tokens=random.choice([1, 2, 4, 9]),
            eos_token_ids=EOS_TOKEN_IDS,
            vocab_size=VOCAB_SIZE,
        )
        self.runner = LabelRunner(self.cache, VOCAB_SIZE, overlap=overlap)
        self.in_flight: deque[Batch] = deque()
        self.seen: Counter[str] = Counter()
        self.requests = [self._request(i) for i in range(random.randint(1, 9))]
        self.expected = self.seer.outputs = plain_outputs(self.requests)

    def run(self) -> Counter[str]:
        arriving = list(self.requests)
        num_steps = 0
        while arriving or self.scheduler.has_requests:
            num_steps += 1
            assert num_steps < 2000, "it never ends"
            while arriving and self.random.random() < 0.5:
                self.scheduler.add_request(arriving.pop(0))
            batch = self._schedule()
            if self.random.random() < 0.03:
                self._abort()
            num_in_flight = len(self.in_flight)
            must = 1 if num_in_flight == self.max_in_flight else 0
            must = num_in_flight if batch is None else must
            for _ in range(self.random.randint(must, num_in_flight)):
                self._update()
            self._check()
        self._check_end()
        return self.seen

    def _request(self, number: int) -> Request:
        random = self.random
        num_prompt = random.randint(1, max(1, self.longest - 2))
        prompt = [random.choice([0, 0, 1]) for _ in range(num_prompt)]
        params = SamplingParams(
            random.randint(1, self.longest - num_prompt + 1),
            ignore_eos=random.random() < 0.7,
        )
        return Request(number, prompt, params, priority=random.choice([0, 0, 1]))

    def _schedule(self) -> Batch | None:
        num_retractions = self.scheduler.num_retractions
        batch = self.scheduler.schedule()
        if batch is None:
            return None
        self.in_flight.append(batch)
        self._check_batch(batch)
        if self.scheduler.num_retractions > num_retractions and not self.preempts:
            # Nobody was retracted for a page that only guesses need.
            page_size = self.cache.page_size
            for entry in batch.entries:
                num_crossed = (entry.stop - 1) // page_size - entry.start // page_size
                assert not entry.drafts or num_crossed == 0
        return batch

    def _abort(self) -> None:
        request = self.random.choice(self.requests)
        if request.arrival >= 0:
            self.seen["abort"] += request.status is not RequestStatus.FINISHED
            self.scheduler.abort(request.request_id)

    def _update(self) -> None:
        batch = self.in_flight.popleft()
        outputs = self.scheduler.update(batch, self.runner.run(batch))
        for output in outputs:
            self.seen["several at once"] += len(output.tokens) > 1
            self.seen["stop among drafts"] += (
                len(output.tokens) > 1 and output.finish_reason is FinishReason.STOP
            )

    def _check_batch(self, batch: Batch) -> None:
        assert batch.num_tokens <= self.scheduler.limits.max_batched_tokens
        assert batch.num_tokens == len(batch.input_ids) == len(batch.positions)
        for entry in batch.entries:
            assert entry.stop <= entry.request.max_kv_len
            if entry.drafts:
                self.seen["drafts"] += 1
                assert entry.num_samples == len(entry.drafts) + 1
                assert entry.stop - entry.start == entry.num_samples
                assert entry.start == entry.request.num_tokens - 1

    def _check(self) -> None:
        cache = self.cache
        cache.check_integrity()
        parts = (cache.available_size, cache.evictable_size, cache.protected_size)
        assert cache.total_size == sum(parts) + cache.held_size
        for request in self.requests:
            output = request.output_tokens
            assert self.expected[request.request_id][: len(output)] == output
            if request.kv is None or request.num_in_flight:
                continue
            # Nothing is left of rejected drafts, not even a page.
            kv = request.kv
            assert kv.committed_len == kv.allocated_len <= request.num_tokens
            assert kv.num_pages == -(-kv.committed_len // cache.page_size)

    def _check_end(self) -> None:
        assert self.cache.held_size == self.cache.protected_size == 0
        self.seen["retraction"] += self.scheduler.num_retractions
        for request in self.requests:
            usage = request.usage
            assert usage.num_accepted_tokens <= usage.num_draft_tokens
            self.seen["accepted"] += usage.num_accepted_tokens
            rejected = usage.num_draft_tokens - usage.num_accepted_tokens
            self.seen["rejected"] += rejected
            self.seen["retracted with drafts"] += (
                request.num_retractions > 0 and usage.num_draft_tokens > 0
            )
            assert request.finish_reason is not None
            if request.finish_reason is not FinishReason.ABORT:
                self.seen[request.finish_reason] += 1
                assert self.expected[request.request_id] == request.output_tokens


@given(
    page_size=st.sampled_from(PAGE_SIZES),
    probability=st.sampled_from([0.0, 0.3, 0.7, 0.95, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_drafts_of_any_quality_change_no_output(
    page_size: int, probability: float, seed: int
) -> None:
    Day(page_size, probability, seed).run()


def test_the_days_meet_everything_that_can_happen() -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        seen += Day(PAGE_SIZES[seed % 4], (0.0, 0.7, 1.0)[seed % 3], seed).run()

    expected = {
        "abort",
        "accepted",
        "drafts",
        "length",
        "rejected",
        "retracted with drafts",
        "retraction",
        "several at once",
        "stop",
        "stop among drafts",
    }
    assert set() == expected - set(seen)
