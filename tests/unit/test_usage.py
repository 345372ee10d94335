"""RequestUsage: what a request has cost, at every point of its life."""

from __future__ import annotations

from radixkv.mem_cache import MemoryManager, RadixCache
from radixkv.scheduling import (
    Batch,
    Estimate,
    FinishReason,
    NullRunner,
    Request,
    RequestUsage,
    SamplingParams,
    Scheduler,
    SchedulerLimits,
)


class Clock:
    """Shows what it is set to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class StrangeClock(Clock):
    """Jumps back and forth."""

    def __call__(self) -> float:
        self.now = -2 * self.now
        return self.now


class Server:
    """A scheduler, a runner without a model, and the time."""

    def __init__(
        self,
        num_pages: int = 16,
        *,
        chunk: int = 64,
        admission: str | Estimate = "worst-case",
        overlap: bool = False,
        clock: Clock | None = None,
    ) -> None:
        memory = MemoryManager(num_pages, 4, max_num_requests=8, max_context_len=64)
        self.clock = clock or Clock()
        self.cache = RadixCache(memory)
        self.scheduler = Scheduler(
            self.cache,
            SchedulerLimits(chunked_prefill_size=chunk),
            admission=admission,
            retraction="newest",
            overlap=overlap,
            clock=self.clock,
        )
        self.runner = NullRunner(99)

    def add(self, name: str, num_tokens: int, max_new_tokens: int) -> Request:
        first = 1000 * ord(name)
        params = SamplingParams(max_new_tokens)
        request = Request(name, range(first, first + num_tokens), params)
        self.scheduler.add_request(request)
        return request

    def schedule(self, at: float) -> Batch:
        self.clock.now = 1000 + at
        batch = self.scheduler.schedule()
        assert batch is not None
        return batch

    def update(self, batch: Batch, at: float) -> None:
        self.clock.now = 1000 + at
        self.scheduler.update(batch, self.runner.run(batch))

    def drain(self) -> None:
        while self.scheduler.has_requests:
            batch = self.scheduler.schedule()
            if batch is not None:
                self.clock.now += 1
                self.scheduler.update(batch, self.runner.run(batch))
            self.scheduler.take_outputs()


def times(usage: RequestUsage) -> tuple[float | None, float | None, float | None]:
    return usage.queue_s, usage.first_token_s, usage.total_s


def test_the_times_count_from_the_submission() -> None:
    server = Server()
    request = server.add("a", 5, 3)
    assert (None, None, None) == times(request.usage)

    first = server.schedule(at=2)
    assert (2, None, None) == times(request.usage)
    server.update(first, at=7)
    assert (2, 7, None) == times(request.usage)
    server.update(server.schedule(at=8), at=11)
    assert (2, 7, None) == times(request.usage)
    server.update(server.schedule(at=12), at=15)

    assert (2, 7, 15) == times(request.usage)
    assert FinishReason.LENGTH is request.finish_reason


def test_a_request_that_was_never_submitted_has_no_times() -> None:
    usage = Request("a", [1, 2, 3]).usage

    assert RequestUsage(3, 0, 0, 0, 0, 0, 0, 0, None, None, None, None) == usage


def test_a_prompt_in_chunks_leaves_the_queue_with_the_first_of_them() -> None:
    server = Server(chunk=4)
    request = server.add("a", 9, 2)
    for at in (10, 20, 30):
        server.update(server.schedule(at=at), at=at + 5)

    assert (10, 35, None) == times(request.usage)
    assert (9, 1) == (request.usage.num_computed_tokens, request.num_output_tokens)


def test_who_is_aborted_in_the_queue_has_an_end_and_no_start() -> None:
    server = Server()
    request = server.add("a", 5, 3)
    server.clock.now += 4

    server.scheduler.abort("a")

    assert (None, None, 4) == times(request.usage)


def test_an_abort_in_flight_ends_at_the_abort_and_costs_what_was_done() -> None:
    server = Server()
    request = server.add("a", 5, 9)
    server.update(server.schedule(at=1), at=2)
    batch = server.schedule(at=3)
    server.clock.now = 1004
    server.scheduler.abort("a")
    server.update(batch, at=9)

    assert (1, 2, 4) == times(request.usage)
    # The step that was in flight counts for nobody: its token was dropped.
    assert (5, 1) == (
        request.usage.num_computed_tokens,
        request.usage.num_output_tokens,
    )


def test_what_the_cache_had_is_not_computed() -> None:
    server = Server()
    cold = server.add("a", 9, 3)
    server.drain()
    warm = server.add("a", 9, 3)
    server.drain()

    # Nine tokens and two of the three outputs need K and V; two whole pages are cached.
    costs = [
        (u.num_prompt_tokens, u.num_cached_tokens, u.num_computed_tokens)
        for u in (cold.usage, warm.usage)
    ]
    assert [(9, 0, 11), (9, 8, 3)] == costs
    assert [3, 3] == [u.num_output_tokens for u in (cold.usage, warm.usage)]


def test_a_retraction_costs_tokens_and_moves_neither_start_nor_first_token() -> None:
    gambler = Estimate(initial_ratio=0.01, min_ratio=0)
    server = Server(6, admission=gambler)
    server.add("a", 4, 16)
    request = server.add("b", 4, 12)
    server.update(server.schedule(at=1), at=2)
    before = times(request.usage)
    server.drain()
    usage = request.usage

    assert (1, 2, None) == before
    assert (1, 2) == (usage.queue_s, usage.first_token_s)
    assert usage.total_s is not None
    assert usage.total_s > 12
    assert 1 == usage.num_retractions
    assert 12 == usage.num_output_tokens
    # The prompt was not cached when the request first ran, and that is what counts.
    assert 0 == usage.num_cached_tokens
    recomputed = server.cache.stats().num_recomputed_tokens
    assert 4 + 12 - 1 + recomputed == usage.num_computed_tokens


def test_a_refused_request_has_an_end() -> None:
    server = Server()
    request = server.add("a", 40, 3)
    server.cache.resize(8)
    server.clock.now += 6

    assert server.scheduler.schedule() is None

    assert FinishReason.REFUSED is request.finish_reason
    assert (None, None, 6) == times(request.usage)


def test_a_step_that_is_prepared_ahead_ends_the_queue_when_it_is_scheduled() -> None:
    server = Server(overlap=True)
    server.add("a", 5, 9)
    first = server.schedule(at=1)
    late = server.add("b", 5, 9)
    second = server.schedule(at=4)
    server.update(first, at=6)
    server.update(second, at=8)

    # It was submitted one second after the first.
    assert (3, 7, None) == times(late.usage)


def test_the_clock_decides_nothing() -> None:
    outputs = []
    for clock in (Clock(), StrangeClock()):
        server = Server(clock=clock)
        requests = [server.add(name, 5, 6) for name in "abc"]
        server.drain()
        outputs.append([request.output_tokens for request in requests])

    assert outputs[0] == outputs[1]
