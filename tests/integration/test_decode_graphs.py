"""Decode batches that are padded, and captured where there is a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from radixkv.mem_cache.errors import ConfigError
from radixkv.scheduling.decode_graphs import (
    NUM_INPUTS,
    CapturedGraph,
    DecodeGraphs,
    default_sizes,
    padded_inputs,
)
from radixkv.scheduling.models import TransformersObject, load_model
from radixkv.scheduling.reference import generate_reference
from radixkv.scheduling.request import Request
from radixkv.scheduling.transformers_runner import TransformersRunner

from .test_transformers_runner import (
    NUM_NEW_TOKENS,
    PROMPTS,
    WINDOWED,
    Pages,
    Server,
    make_model,
    serve,
)


@pytest.fixture(scope="module")
def tiny() -> TransformersObject:
    return load_model("tiny").model


def make_runner(
    model: TransformersObject,
    graph_sizes: Sequence[int] | None,
    page_size: int = 3,
) -> TransformersRunner:
    return TransformersRunner(
        model,
        num_pages=256,
        page_size=page_size,
        max_num_requests=7,
        max_context_len=64,
        graph_sizes=graph_sizes,
    )


@pytest.mark.parametrize("graph_sizes", [[1, 2, 4], [3], [7], [1], [16, 8]])
@pytest.mark.parametrize("page_size", [1, 16])
def test_padded_batches_give_the_tokens_of_generate(
    tiny: TransformersObject, graph_sizes: list[int], page_size: int
) -> None:
    runner = make_runner(tiny, graph_sizes, page_size)
    expected = [generate_reference(tiny, prompt, NUM_NEW_TOKENS) for prompt in PROMPTS]

    assert expected == serve(runner, PROMPTS, chunk=64)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("Llama", {}), ("GPT2", {}), *WINDOWED],
    ids=["Llama", "GPT2", *(kind for kind, _ in WINDOWED)],
)
def test_a_padded_batch_gives_the_logits_of_one_that_is_not(
    kind: str, options: dict[str, object]
) -> None:
    model = make_model(kind, **options)
    runners = [make_runner(model, sizes) for sizes in ((), (2, 8))]
    servers = [Server(runner, PROMPTS[:3]) for runner in runners]

    while all(batches := [server.next_batch(chunk=16) for server in servers]):
        plain, padded = (
            runner.forward(batch)
            for runner, batch in zip(runners, batches, strict=True)
            if batch
        )
        assert plain.shape == padded.shape
        assert (plain - padded).abs().max() < 1e-5 * plain.abs().max()
        for server, batch in zip(servers, batches, strict=True):
            assert batch
            server.finish(batch, plain.argmax(-1).tolist())

    assert all(x.num_output_tokens == NUM_NEW_TOKENS for x in servers[0].requests)


def test_padding_writes_to_the_hold_page_only(tiny: TransformersObject) -> None:
    runner = make_runner(tiny, [8])
    pages, request = Pages(3, 256), Request("a", [1, 2, 3])
    pages.admit(request)
    runner.forward(pages.step((request, 0, 2)))
    layers = list(runner.pool.layers.values())
    own = pages.pages[request][0]
    before = [layer.k.clone() for layer in layers]

    runner.forward(pages.step((request, 2, 3)))

    for was, layer in zip(before, layers, strict=True):
        changed = (was != layer.k).flatten(2).any(-1)
        assert {(0, 0), (own, 2)} == {tuple(x) for x in changed.nonzero().tolist()}


def test_inputs_are_padded_with_row_0_and_position_0() -> None:
    pages, requests = Pages(4, 8), [Request(i, [5 + i] * (i + 1)) for i in range(2)]
    for request in requests:
        pages.admit(request)
    batch = pages.step((requests[0], 0, 1), (requests[1], 1, 2))

    tokens, starts, rows, stops = padded_inputs(batch, 4).reshape(4, 4).tolist()

    assert [5, 6, 0, 0] == tokens
    assert [0, 1, 0, 0] == starts
    assert [7, 6, 0, 0] == rows
    assert [1, 2, 1, 1] == stops


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([(0, 1)], 2),
        ([(0, 1), (0, 1)], 2),
        ([(0, 1)] * 3, 4),
        ([(0, 1)] * 5, None),
        ([(0, 2)], None),
        ([(0, 1), (0, 2)], None),
    ],
)
def test_the_next_size_is_taken_for_one_token_a_request(
    spans: list[tuple[int, int]], expected: int | None
) -> None:
    graphs = DecodeGraphs(lambda inputs: inputs, [4, 2, 4], torch.device("cpu"))
    pages, requests = Pages(4, 64), [Request(i, [1, 2]) for i in range(len(spans))]
    for request in requests:
        pages.admit(request)

    batch = pages.step(*((r, *span) for r, span in zip(requests, spans, strict=True)))

    assert [2, 4] == graphs.sizes
    assert expected == graphs.size_for(batch)


def test_chunks_that_sample_nothing_give_no_logits(tiny: TransformersObject) -> None:
    runner = make_runner(tiny, [4])
    pages, request = Pages(3, 256), Request("a", [1, 2, 3])
    pages.admit(request)

    logits = runner.forward(pages.step((request, 0, 1)))

    assert (0, 512) == logits.shape


def test_logits_are_those_of_the_requests_that_sample(
    tiny: TransformersObject,
) -> None:
    logits = []
    for sizes in ((), (4,)):
        runner = make_runner(tiny, sizes)
        pages, requests = Pages(3, 256), [Request(i, [5 + i] * 3) for i in range(3)]
        for request in requests:
            pages.admit(request)
        first, second, third = requests
        runner.forward(pages.step((second, 0, 2), (third, 0, 2)))
        batch = pages.step((first, 0, 1), (second, 2, 3), (third, 2, 3))
        logits.append(runner.forward(batch))

    assert (2, 512) == logits[0].shape == logits[1].shape
    assert (logits[0] - logits[1]).abs().max() < 1e-5 * logits[0].abs().max()


@pytest.mark.parametrize("sizes", [[0], [-1], [True], [2.5], [2, 0]])
def test_sizes_out_of_range_are_refused(
    tiny: TransformersObject, sizes: list[int]
) -> None:
    with pytest.raises(ConfigError, match="graph_sizes must be"):
        make_runner(tiny, sizes)


@pytest.mark.parametrize(
    ("max_num_requests", "expected"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (9, [1, 2, 4, 8, 9]),
        (24, [1, 2, 4, 8, 16, 24]),
    ],
)
def test_default_sizes_end_with_the_largest_batch(
    max_num_requests: int, expected: list[int]
) -> None:
    assert expected == default_sizes(max_num_requests)


def test_default_sizes_are_no_more_than_256() -> None:
    assert 256 == max(default_sizes(10_000)) == max(default_sizes(256))
    assert 35 == len(default_sizes(10_000))


class FakeCuda:
    """Captures like CUDA: what runs in a graph runs again, into the same memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.capturing: Any = None
        for name in ("CUDAGraph", "Stream", "current_stream", "stream", "graph"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name), raising=False)

    class CUDAGraph:
        """What was captured."""

        def __init__(self) -> None:
            self.work: Callable[[], None] = lambda: None

        def pool(self) -> str:
            return "memory"

        def replay(self) -> None:
            self.work()

    class Stream:
        """Has nothing to wait for."""

        def wait_stream(self, stream: object) -> None:
            pass

    def current_stream(self) -> FakeCuda.Stream:
        return self.Stream()

    @contextmanager
    def stream(self, stream: object) -> Iterator[None]:
        self.log.append("stream")
        yield

    @contextmanager
    def graph(
        self, graph: FakeCuda.CUDAGraph, *, pool: object, capture_error_mode: str
    ) -> Iterator[None]:
        self.log.append(f"graph {pool} {capture_error_mode}")
        self.capturing = graph
        yield
        self.capturing = None


def test_a_captured_graph_computes_what_lies_in_its_inputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = FakeCuda(monkeypatch)
    inputs, output = torch.zeros(3), torch.zeros(3)

    def compute() -> torch.Tensor:
        def work() -> None:
            output[:] = inputs * 2

        if cuda.capturing is None:
            work()
        else:
            cuda.capturing.work = work
        cuda.log.append("compute")
        return output

    first = CapturedGraph(compute, None)
    second = CapturedGraph(compute, first.memory)
    inputs[:] = torch.tensor([1.0, 2.0, 3.0])

    assert [2, 4, 6] == first().tolist()
    inputs[1] = 5
    assert [2, 10, 6] == second().tolist()
    assert ["stream", "compute", "graph None thread_local", "compute"] == cuda.log[:4]
    assert "graph memory thread_local" == cuda.log[6]


def test_sizes_are_captured_once_each_where_there_is_a_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, zeros = FakeCuda(monkeypatch), torch.zeros

    def zeros_here(
        *shape: int, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        assert "cuda" == device.type
        return zeros(*shape, dtype=dtype)

    monkeypatch.setattr(torch, "zeros", zeros_here)
    computed: list[list[int]] = []

    def compute(inputs: torch.Tensor) -> torch.Tensor:
        computed.append(inputs[0].tolist())
        return inputs

    graphs = DecodeGraphs(compute, [2, 4], torch.device("cuda"))
    for size in (2, 4, 2, 4):
        inputs = torch.arange(NUM_INPUTS * size, dtype=torch.int32)
        assert inputs.tolist() == graphs.run(inputs).flatten().tolist()

    # Each twice, of padded requests only: once to warm up, and once to capture.
    assert [[0] * 2] * 2 + [[0] * 4] * 2 == computed
    captures = [entry for entry in cuda.log if entry.startswith("graph")]
    assert ["graph None thread_local", "graph memory thread_local"] == captures


def test_a_resize_forgets_what_was_captured(
    tiny: TransformersObject, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[int] = []
    replay_of = DecodeGraphs._replay_of  # pyright: ignore[reportPrivateUsage]

    def count(self: DecodeGraphs, inputs: torch.Tensor) -> Callable[[], torch.Tensor]:
        captured.append(inputs.shape[1])
        return replay_of(self, inputs)

    monkeypatch.setattr(DecodeGraphs, "_replay_of", count)
    runner = make_runner(tiny, [2, 4])
    expected = [generate_reference(tiny, prompt, NUM_NEW_TOKENS) for prompt in PROMPTS]

    assert expected == serve(runner, PROMPTS, chunk=64)
    assert [2, 4] == captured
    runner.pool.resize(300)
    assert expected == serve(runner, PROMPTS, chunk=64)
    assert [2, 4, 2, 4] == captured
