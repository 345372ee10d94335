"""The attention slot of `TransformersRunner`: the library's kernels, or others."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from radixkv.mem_cache import KVPool
from radixkv.mem_cache.device_step import DeviceStep
from radixkv.mem_cache.errors import BackendUnavailableError, ConfigError
from radixkv.mem_cache.kv_layer import KVLayer
from radixkv.scheduling.attention_backends import AttentionFactory, PagedAttention
from radixkv.scheduling.flash_attention import FlashAttention
from radixkv.scheduling.flashinfer_attention import FlashInferAttention
from radixkv.scheduling.models import TransformersObject
from radixkv.scheduling.request import Request
from radixkv.scheduling.transformers_runner import TransformersRunner

from .attention_libraries import make_flash_attn, make_flashinfer
from .test_transformers_runner import (
    NUM_NEW_TOKENS,
    WINDOWED,
    Pages,
    Server,
    make_model,
    plain_logits,
)

PROMPTS = [[1, 2, 3], list(range(33)), list(range(50, 30, -1))]
MODELS: list[tuple[str, dict[str, object]]] = [
    ("Llama", {"num_key_value_heads": 1}),
    *WINDOWED,
]

each_model = pytest.mark.parametrize(
    ("kind", "options"), MODELS, ids=[kind for kind, _ in MODELS]
)


def make_runner(
    model: TransformersObject,
    attention: AttentionFactory,
    page_size: int,
    dtype: torch.dtype | None = None,
) -> TransformersRunner:
    return TransformersRunner(
        model,
        num_pages=64,
        page_size=page_size,
        max_num_requests=7,
        max_context_len=64,
        attention=attention,
        dtype=dtype,
        self_check=False,  # it would use the libraries, too
    )


def check_logits(
    kind: str,
    options: dict[str, object],
    make: Callable[[TransformersObject], TransformersRunner],
    chunk: int,
    tolerance: float = 1e-5,
) -> None:
    """Serve prompts, and compare all logits with those of the model alone."""
    plain, model = make_model(kind, **options), make_model(kind, **options)
    plain.set_attn_implementation("eager")
    runner = make(model)
    server = Server(runner, PROMPTS)
    while (batch := server.next_batch(chunk)) is not None:
        logits = runner.forward(batch)
        sampling = [entry for entry in batch.entries if entry.num_samples]
        for entry, actual in zip(sampling, logits, strict=True):
            expected = plain_logits(plain, entry.request.tokens.tolist())
            error = (actual - expected).abs().max() / expected.abs().max()
            assert error < tolerance
        server.finish(batch, logits.argmax(-1).tolist())
    assert all(NUM_NEW_TOKENS == x.num_output_tokens for x in server.requests)


@pytest.mark.parametrize("chunk", [1, 7, 64])
@each_model
def test_flashinfer_gives_the_logits_of_the_model(
    kind: str,
    options: dict[str, object],
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, wrappers = make_flashinfer()
    monkeypatch.setitem(sys.modules, "flashinfer", module)

    check_logits(
        kind, options, lambda model: make_runner(model, FlashInferAttention, 3), chunk
    )

    # A plan a step serves all layers that are alike, whatever the number of layers.
    kinds = {type(wrapper).__name__ for wrapper in wrappers}
    num_windows = 2 if kind in ("Gemma2", "Gemma3Text", "Qwen3") else 1
    assert len(wrappers) == len(kinds) * num_windows
    assert "BatchDecodeWithPagedKVCacheWrapper" in kinds
    assert len({wrapper.num_plans for wrapper in wrappers}) <= len(kinds)


def test_scales_of_a_float8_pool_go_in_and_come_out_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", make_flashinfer()[0])
    logits: list[torch.Tensor] = []
    for attention, scale in (
        (PagedAttention, 1.0),
        (PagedAttention, 1 / 8),
        (FlashInferAttention, 1 / 8),
    ):
        runner = make_runner(make_model("Llama"), attention, 4, torch.float8_e4m3fn)
        for layer in runner.pool.layers.values():
            layer.set_scales(scale, scale / 2)
        pages, request = Pages(4, 64), Request("a", list(range(9)))
        pages.admit(request)
        logits.append(runner.forward(pages.step((request, 0, 9)))[0])

    # A power of two changes no digit but those of the smallest numbers.
    for other, tolerance in ((logits[0], 1e-2), (logits[2], 1e-5)):
        assert (logits[1] - other).abs().max() < tolerance * other.abs().max()


@pytest.mark.parametrize("chunk", [1, 7, 64])
@each_model
def test_flash_attention_gives_the_logits_of_the_model(
    kind: str,
    options: dict[str, object],
    chunk: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, called = make_flash_attn()
    monkeypatch.setitem(sys.modules, "flash_attn", module)

    check_logits(
        kind,
        options,
        lambda model: make_runner(model, FlashAttention, 256, torch.bfloat16),
        chunk,
        tolerance=0.1,
    )

    if chunk == 1:  # as many new tokens of each request in every step
        assert {"flash_attn_with_kvcache"} == set(called)
    else:
        assert {"flash_attn_with_kvcache", "flash_attn_varlen_func"} == set(called)


def test_drafts_go_where_flash_attention_decodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module, called = make_flash_attn()
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    runner = make_runner(make_model("Llama"), FlashAttention, 256, torch.bfloat16)
    pages, requests = Pages(256, 64), [Request(i, list(range(9))) for i in range(2)]
    for request in requests:
        pages.admit(request)

    runner.forward(pages.step((requests[0], 0, 3), (requests[1], 0, 3)))
    assert ["flash_attn_with_kvcache"] * 2 == called
    runner.forward(pages.step((requests[0], 3, 4), (requests[1], 3, 6)))
    assert ["flash_attn_varlen_func"] * 2 == called[2:]


@pytest.mark.parametrize("kind", ["Llama", "Gemma3Text"])
@pytest.mark.parametrize(
    ("attention", "page_size", "dtype"),
    [(FlashInferAttention, 3, torch.float32), (FlashAttention, 256, torch.bfloat16)],
)
def test_a_runner_proves_itself_with_a_library_as_well(
    kind: str,
    attention: AttentionFactory,
    page_size: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", make_flashinfer()[0])
    monkeypatch.setitem(sys.modules, "flash_attn", make_flash_attn()[0])
    model = make_model(kind, **dict(MODELS)[kind])

    runner = TransformersRunner(
        model,
        num_pages=4,
        page_size=page_size,
        max_num_requests=2,
        max_context_len=8,
        attention=attention,
        dtype=dtype,
    )

    assert dtype == runner.pool.k_buffer(0).dtype


@pytest.mark.parametrize(
    ("attention", "module"),
    [(FlashInferAttention, "flashinfer"), (FlashAttention, "flash_attn")],
)
def test_a_library_that_is_not_installed_is_named(
    attention: AttentionFactory, module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    model = make_model("Llama")

    with pytest.raises(BackendUnavailableError, match="needs the package flash"):
        make_runner(model, attention, 256)


@pytest.mark.parametrize(
    ("page_size", "dtype", "message"),
    [
        (16, torch.bfloat16, "page_size that is a multiple of 256, got 16"),
        (256, torch.float32, r"K and V in one of .* got model.* in torch\.float32"),
        (256, torch.float8_e4m3fn, r"got model.* in torch\.float8_e4m3fn"),
    ],
)
def test_flash_attention_refuses_a_pool_that_it_cannot_read(
    page_size: int,
    dtype: torch.dtype,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", ModuleType("flash_attn"))

    with pytest.raises(ConfigError, match=message):
        make_runner(make_model("Llama"), FlashAttention, page_size, dtype)


class Spy:
    """An attention of the user's own: it looks on and lets another one work."""

    can_capture = False

    def __init__(self, pool: KVPool) -> None:
        self.pool = pool
        self.inner = PagedAttention(pool)
        self.calls: list[str] = []
        spies.append(self)

    def begin_step(self, step: DeviceStep) -> None:
        self.calls.append("begin_step")
        self.inner.begin_step(step)

    def attend(
        self,
        q: torch.Tensor,
        layer: KVLayer,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        self.calls.append(f"{layer.name} {window} {softcap}")
        return self.inner.attend(q, layer, scale=scale, window=window, softcap=softcap)


spies: list[Spy] = []


def test_an_attention_of_the_users_own_is_asked_in_each_layer() -> None:
    kind, options = WINDOWED[2]
    assert "Gemma2" == kind
    check_logits(kind, options, lambda model: make_runner(model, Spy, 4), chunk=64)

    spy = spies.pop()
    steps = [*spy.calls[:3]] * (len(spy.calls) // 3)
    assert [
        "begin_step",
        "model.layers.0.self_attn 8 2.0",
        "model.layers.1.self_attn None 2.0",
    ] == spy.calls[:3]
    assert steps == spy.calls
    assert 4 == spy.pool.page_size


def test_an_attention_that_cannot_be_captured_is_given_no_graphs() -> None:
    model = make_model("Llama")

    with pytest.raises(
        ConfigError, match=r"Spy cannot run Llama.* in CUDA graphs, got .*\[2\]"
    ):
        TransformersRunner(
            model,
            num_pages=8,
            page_size=4,
            max_num_requests=2,
            max_context_len=8,
            attention=Spy,
            graph_sizes=[2],
        )
    spies.clear()


def test_a_decode_step_and_one_with_more_tokens_come_in_any_order() -> None:
    model, plain = make_model("Llama"), make_model("Llama")
    runner = make_runner(model, PagedAttention, 4)
    pages = Pages(4, 64)
    first, second = Request("a", [1, 2, 3]), Request("b", list(range(9)))
    pages.admit(first)
    pages.admit(second)

    for spans in (
        [(first, 0, 2)],
        [(first, 2, 3), (second, 0, 1)],
        [(second, 1, 9)],
    ):
        logits = runner.forward(pages.step(*spans))

    expected = plain_logits(plain, list(range(9)))
    assert (logits[0] - expected).abs().max() < 1e-5 * expected.abs().max()
