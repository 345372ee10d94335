"""TransformersRunner over hand-made pages: the tokens are the plain model's own.

The pages come from no allocator and no tree here, so what fails is the worker side.
"""

from __future__ import annotations

import random
from typing import cast

import numpy as np
import pytest
import torch

from radixkv.mem_cache import (
    BatchRefusedError,
    ConfigError,
    KVCacheInfo,
    LengthError,
    PrefixCache,
)
from radixkv.scheduling.batch import Batch, BatchEntry
from radixkv.scheduling.models import (
    TransformersObject,
    import_transformers,
    load_model,
)
from radixkv.scheduling.reference import generate_reference
from radixkv.scheduling.request import Request
from radixkv.scheduling.sampler import sample
from radixkv.scheduling.sampling_params import SamplingParams
from radixkv.scheduling.transformers_runner import TransformersRunner

PROMPTS = [[5], [3, 1, 4, 1, 5, 9, 2], list(range(40, 60)), list(range(200, 167, -1))]
NUM_NEW_TOKENS = 8


class Pages:
    """Hands out scattered pages and writes the messages, as an engine would."""

    def __init__(self, page_size: int, num_pages: int) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self.free = list(range(1, num_pages + 1))
        random.Random(0).shuffle(self.free)
        self.rows: dict[Request, int] = {}
        self.pages: dict[Request, list[int]] = {}
        self.num_sent: dict[Request, int] = {}

    def admit(self, request: Request, prefix_pages: list[int] | None = None) -> None:
        # Rows are handed out from the last to the first, so that none is the index.
        self.rows[request] = 7 - len(self.rows)
        self.pages[request] = list(prefix_pages or [])
        self.num_sent[request] = 0

    def step(self, *spans: tuple[Request, int, int]) -> Batch:
        """Make the batch that computes the positions `[start, stop)` of requests."""
        page_starts: list[int] = []
        indptr = [0]
        new_pages: list[int] = []
        for request, _, stop in spans:
            pages, sent = self.pages[request], self.num_sent[request]
            while len(pages) * self.page_size < stop:
                pages.append(self.free.pop())
            page_starts.append(sent)
            new_pages += pages[sent:]
            indptr.append(len(new_pages))
            self.num_sent[request] = len(pages)
        info = KVCacheInfo.pack(
            rows=[self.rows[request] for request, _, _ in spans],
            starts=[start for _, start, _ in spans],
            stops=[stop for _, _, stop in spans],
            page_starts=page_starts,
            page_indptr=indptr,
            new_pages=np.array(new_pages, np.int32).tobytes(),
        )
        entries = tuple(
            BatchEntry(request, start, stop, int(stop == request.num_tokens))
            for request, start, stop in spans
        )
        # The runner asks the cache for its sizes only: the rest is in the message.
        return Batch(entries, info, cast(PrefixCache, self))

    @property
    def total_size(self) -> int:
        return self.num_pages * self.page_size


def make_runner(
    model: TransformersObject, page_size: int = 3, dtype: torch.dtype | None = None
) -> TransformersRunner:
    return TransformersRunner(
        model,
        num_pages=256,
        page_size=page_size,
        max_num_requests=7,
        max_context_len=64,
        dtype=dtype,
    )


class Server:
    """Serves prompts, one more in every step, so that prefill and decode mix."""

    def __init__(self, runner: TransformersRunner, prompts: list[list[int]]) -> None:
        self.pages = Pages(runner.pool.page_size, runner.pool.num_pages)
        self.requests = [Request(i, prompt) for i, prompt in enumerate(prompts)]
        self.waiting = list(self.requests)
        self.computed: dict[Request, int] = {}

    def next_batch(self, chunk: int) -> Batch | None:
        """Make a batch of the rest of each request, at most `chunk` tokens of it."""
        if self.waiting:
            request = self.waiting.pop(0)
            self.pages.admit(request)
            self.computed[request] = 0
        spans = [
            (request, start, min(start + chunk, request.num_tokens))
            for request, start in self.computed.items()
            if request.num_output_tokens < NUM_NEW_TOKENS
        ]
        return self.pages.step(*spans) if spans else None

    def finish(self, batch: Batch, tokens: list[int]) -> None:
        """Note what a batch has computed and sampled."""
        left = iter(tokens)
        for entry in batch.entries:
            self.computed[entry.request] = entry.stop
            if entry.num_samples:
                entry.request.append(next(left))


def serve(
    runner: TransformersRunner, prompts: list[list[int]], chunk: int
) -> list[list[int]]:
    server = Server(runner, prompts)
    while (batch := server.next_batch(chunk)) is not None:
        server.finish(batch, runner.run(batch).tolist())
    return [request.output_tokens for request in server.requests]


def plain_logits(model: TransformersObject, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits
    return logits[0, -1]


def make_model(kind: str, **options: object) -> TransformersObject:
    """Make a small random model of any kind that transformers has."""
    transformers = import_transformers()
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "initializer_range": 0.5,
        "pad_token_id": None,
    }
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **options})
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return transformers.AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture(scope="module")
def tiny() -> TransformersObject:
    return load_model("tiny").model


@pytest.fixture(scope="module")
def expected(tiny: TransformersObject) -> list[list[int]]:
    return [generate_reference(tiny, prompt, NUM_NEW_TOKENS) for prompt in PROMPTS]


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_tokens_equal_generate(
    tiny: TransformersObject, expected: list[list[int]], page_size: int, chunk: int
) -> None:
    actual = serve(make_runner(tiny, page_size), PROMPTS, chunk)

    assert expected == actual


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_logits_equal_the_plain_models(page_size: int) -> None:
    plain = load_model("tiny").model
    runner = make_runner(load_model("tiny").model, page_size)
    server = Server(runner, PROMPTS)

    while (batch := server.next_batch(chunk=5)) is not None:
        logits = runner.forward(batch)
        sampling = [entry for entry in batch.entries if entry.num_samples]
        assert len(sampling) == len(logits)
        for entry, actual in zip(sampling, logits, strict=True):
            expected = plain_logits(plain, entry.request.tokens.tolist())
            error = (actual - expected).abs().max() / expected.abs().max()
            assert error < 1e-5
        server.finish(batch, logits.argmax(-1).tolist())


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("Llama", {"num_key_value_heads": 2}),
        ("Qwen2", {"num_key_value_heads": 1}),
        ("Mistral", {"num_key_value_heads": 4, "sliding_window": None}),
        ("GPT2", {}),
        ("Mixtral", {"num_key_value_heads": 2, "num_local_experts": 4}),
    ],
)
def test_other_models_work_untouched(kind: str, options: dict[str, object]) -> None:
    model = make_model(kind, **options)
    prompts = [[1, 2, 3], list(range(30))]
    expected = [generate_reference(model, prompt, NUM_NEW_TOKENS) for prompt in prompts]

    assert expected == serve(make_runner(model), prompts, chunk=7)


WINDOWED: list[tuple[str, dict[str, object]]] = [
    ("Mistral", {"num_key_value_heads": 2, "sliding_window": 8}),
    (
        "Qwen3",
        {
            "num_key_value_heads": 2,
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
        },
    ),
    (
        "Gemma2",
        {
            "num_key_value_heads": 2,
            "head_dim": 8,
            "sliding_window": 8,
            "query_pre_attn_scalar": 2,
            "attn_logit_softcapping": 2.0,
        },
    ),
    (
        "Gemma3Text",
        {
            "num_key_value_heads": 1,
            "head_dim": 16,
            "sliding_window": 7,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 2,
        },
    ),
]

windowed = pytest.mark.parametrize(
    ("kind", "options"), WINDOWED, ids=[kind for kind, _ in WINDOWED]
)


@windowed
@pytest.mark.parametrize(("page_size", "chunk"), [(1, 64), (3, 7), (16, 1)])
def test_windows_and_soft_caps_give_the_logits_of_the_model(
    kind: str, options: dict[str, object], page_size: int, chunk: int
) -> None:
    plain = make_model(kind, **options)
    # Torch's own fast attention has no soft cap.
    plain.set_attn_implementation("eager")
    runner = make_runner(make_model(kind, **options), page_size)
    server = Server(runner, [[1, 2, 3], list(range(33))])

    while (batch := server.next_batch(chunk)) is not None:
        logits = runner.forward(batch)
        sampling = [entry for entry in batch.entries if entry.num_samples]
        for entry, actual in zip(sampling, logits, strict=True):
            expected = plain_logits(plain, entry.request.tokens.tolist())
            error = (actual - expected).abs().max() / expected.abs().max()
            assert error < 1e-5
        server.finish(batch, logits.argmax(-1).tolist())


@windowed
def test_windows_and_soft_caps_give_the_tokens_of_generate(
    kind: str, options: dict[str, object]
) -> None:
    model = make_model(kind, **options)
    prompts = [[1, 2, 3], list(range(33))]
    expected = [generate_reference(model, prompt, NUM_NEW_TOKENS) for prompt in prompts]

    assert expected == serve(make_runner(model), prompts, chunk=7)


@windowed
def test_a_window_matters_in_these_models(
    kind: str, options: dict[str, object]
) -> None:
    longer = {**options, "sliding_window": 64}

    logits = [
        plain_logits(make_model(kind, **each), list(range(33)))
        for each in (options, longer)
    ]

    assert (logits[0] - logits[1]).abs().max() > 1e-3 * logits[0].abs().max()


def test_layers_of_a_pool_are_named_as_the_modules_of_the_model(
    tiny: TransformersObject,
) -> None:
    pool = make_runner(tiny).pool

    assert ["model.layers.0.self_attn", "model.layers.1.self_attn"] == list(pool.layers)
    assert (257, 3, 2, 16) == pool.k_buffer(1).shape


def test_a_request_continues_on_pages_that_another_one_filled(
    tiny: TransformersObject,
) -> None:
    runner = make_runner(tiny, page_size=4)
    pages = Pages(4, 256)
    first = Request("first", [9, 8, 7, 6, 5, 4, 3, 2, 1])
    second = Request("second", [9, 8, 7, 6, 5, 4, 3, 2, 11, 12, 13])
    pages.admit(first)
    runner.run(pages.step((first, 0, 9)))
    pages.admit(second, prefix_pages=pages.pages[first][:2])

    tokens = runner.run(
        pages.step(
            (second, 8, 11),
        )
    )

    assert generate_reference(tiny, second.tokens, 1) == tokens.tolist()


def test_a_chunk_that_is_not_the_last_gives_no_token(tiny: TransformersObject) -> None:
    runner = make_runner(tiny)
    pages = Pages(3, 256)
    request = Request("a", [1, 2, 3, 4])
    pages.admit(request)

    tokens = runner.run(pages.step((request, 0, 2)))

    assert [] == tokens.tolist()


def test_sampling_options_of_each_request_are_used(tiny: TransformersObject) -> None:
    runner = make_runner(tiny)
    pages = Pages(3, 256)
    params = [SamplingParams(temperature=50.0, seed=seed) for seed in range(6)]
    requests = [Request(i, [1, 2, 3], params[i]) for i in range(6)]
    for request in requests:
        pages.admit(request)

    tokens = runner.run(pages.step(*[(request, 0, 3) for request in requests]))

    logits = plain_logits(load_model("tiny").model, [1, 2, 3]).expand(6, -1)
    assert sample(logits, params, [3] * 6).tolist() == tokens.tolist()
    assert len(set(tokens.tolist())) > 1


def test_two_runners_with_other_pages_share_a_model_and_take_turns(
    tiny: TransformersObject, expected: list[list[int]]
) -> None:
    runners = [make_runner(tiny, page_size=1), make_runner(tiny, page_size=16)]
    servers = [Server(runner, PROMPTS) for runner in runners]
    batches = [server.next_batch(chunk=5) for server in servers]

    while any(batches):
        for i, (runner, server) in enumerate(zip(runners, servers, strict=True)):
            if batch := batches[i]:
                server.finish(batch, runner.run(batch).tolist())
            batches[i] = server.next_batch(chunk=5)

    for server in servers:
        assert expected == [request.output_tokens for request in server.requests]


def test_the_model_may_be_used_plainly_between_two_steps(
    tiny: TransformersObject, expected: list[list[int]]
) -> None:
    runner = make_runner(tiny)
    server = Server(runner, PROMPTS)

    while (batch := server.next_batch(chunk=5)) is not None:
        server.finish(batch, runner.run(batch).tolist())
        tiny.set_attn_implementation("eager")

    assert expected == [request.output_tokens for request in server.requests]


def test_a_pool_of_lower_precision_holds_what_it_was_given(
    tiny: TransformersObject,
) -> None:
    runner = make_runner(tiny, dtype=torch.bfloat16)
    pages = Pages(3, 256)
    request = Request("a", PROMPTS[2])
    pages.admit(request)

    logits = runner.forward(pages.step((request, 0, 20)))[0]

    assert torch.bfloat16 == runner.pool.k_buffer(0).dtype
    cosine = torch.cosine_similarity(
        logits, plain_logits(load_model("tiny").model, PROMPTS[2]), 0
    )
    assert cosine > 0.999


def test_generate_reference_leaves_a_model_in_use_as_it_was(
    tiny: TransformersObject,
) -> None:
    runner = make_runner(tiny)
    serve(runner, [[1, 2]], chunk=64)
    defaults = tiny.generation_config

    generate_reference(tiny, [1, 2, 3], 2)

    assert "radixkv_paged" == tiny.config._attn_implementation
    assert defaults is tiny.generation_config


@pytest.mark.parametrize("use_cache", [False, True])
def test_generate_reference_takes_no_defaults_from_the_checkpoint(
    tiny: TransformersObject,
    expected: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    use_cache: bool,
) -> None:
    tokens = expected[1]
    defaults = import_transformers().GenerationConfig(
        eos_token_id=tokens[0], repetition_penalty=9.0
    )
    monkeypatch.setattr(tiny, "generation_config", defaults)

    whole = generate_reference(tiny, PROMPTS[1], NUM_NEW_TOKENS, use_cache=use_cache)
    cut = generate_reference(
        tiny,
        PROMPTS[1],
        NUM_NEW_TOKENS,
        eos_token_ids=[tokens[2]],
        use_cache=use_cache,
    )

    assert tokens == whole
    assert tokens[: tokens.index(tokens[2]) + 1] == cut


def test_a_model_in_use_says_so_when_it_is_called_plainly() -> None:
    model = load_model("tiny").model
    serve(make_runner(model), [[1, 2]], chunk=64)

    with pytest.raises(ConfigError, match="works only inside TransformersRunner"):
        plain_logits(model, [1, 2, 3])


def test_a_longer_request_than_the_table_has_room_for_is_refused(
    tiny: TransformersObject,
) -> None:
    pages = Pages(3, 256)
    request = Request("a", range(67))
    pages.admit(request)

    with pytest.raises(LengthError, match="<= 22 pages, got 23"):
        make_runner(tiny).run(pages.step((request, 0, 67)))


@pytest.mark.parametrize(
    ("kind", "options", "reason"),
    [
        ("GptOss", {"num_key_value_heads": 2, "head_dim": 8}, "attention sinks"),
        ("DeepseekV3", {"kv_lora_rank": 8}, "latent attention"),
        ("Mamba", {}, "recurrent layers"),
        ("BertGeneration", {}, "attention that is not causal"),
        (
            "Llama",
            {
                "rope_parameters": {
                    "rope_type": "dynamic",
                    "factor": 2.0,
                    "rope_theta": 1e4,
                }
            },
            "rope that depends on the batch",
        ),
        (
            "Gemma3Text",
            {
                "head_dim": 8,
                "rope_parameters": {
                    "full_attention": {
                        "rope_type": "dynamic",
                        "factor": 2.0,
                        "rope_theta": 1e4,
                    },
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
            },
            "rope that depends on the batch",
        ),
    ],
)
def test_a_model_kind_that_needs_what_a_runner_has_not_is_refused(
    kind: str, options: dict[str, object], reason: str
) -> None:
    with torch.device("meta"):
        model = make_model(kind, **options)

    with pytest.raises(ConfigError, match="or in windows, got") as refusal:
        make_runner(model)

    assert reason in str(refusal.value)


def test_a_loaded_model_is_not_the_model() -> None:
    with pytest.raises(ConfigError, match="takes the `model` of a LoadedModel"):
        make_runner(load_model("tiny"))


def test_a_model_with_an_attention_of_its_own_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"Bloom.* with \[0, 1\] kept and \[\] attend"
    ):
        make_runner(make_model("Bloom"))


def test_a_model_that_keeps_a_state_is_refused() -> None:
    model = make_model("Lfm2", layer_types=["conv", "full_attention"])

    with pytest.raises(ConfigError, match="got one with a state or an index"):
        make_runner(model)


def test_a_rope_without_a_type_is_no_error() -> None:
    model = make_model("Llama")
    model.config.rope_parameters = {"full_attention": None, "rope_type": None}

    assert make_runner(model)


@pytest.mark.parametrize(
    ("attribute", "reason"),
    [("_is_stateful", "recurrent layers"), ("training", "dropout")],
)
def test_a_model_in_a_state_that_no_pool_holds_is_refused(
    attribute: str, reason: str
) -> None:
    model = make_model("Llama")
    setattr(model, attribute, True)

    with pytest.raises(ConfigError, match=reason):
        make_runner(model)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("s_aux", r"got Qwen3Attention with \['s_aux'\]"),
        ("position_bias", r"got Qwen3Attention with \['position_bias'\]"),
    ],
)
def test_a_layer_that_asks_for_another_attention_is_refused(
    tiny: TransformersObject, option: str, message: str
) -> None:
    runner = make_runner(tiny)
    pages = Pages(3, 256)
    request = Request("a", [1, 2, 3])
    pages.admit(request)
    layer = tiny.model.layers[1].self_attn
    plain = layer.forward
    layer.forward = lambda *args, **kwargs: plain(*args, **{**kwargs, option: 8})

    try:
        with pytest.raises(ConfigError, match=message):
            runner.run(pages.step((request, 0, 3)))
    finally:
        del layer.forward


def test_a_layer_with_another_mask_than_when_it_was_tried_is_refused() -> None:
    kind, options = WINDOWED[0]
    model = make_model(kind, **options)
    runner = make_runner(model)
    pages = Pages(3, 256)
    request = Request("a", [1, 2, 3])
    pages.admit(request)
    model.config.sliding_window = 9

    with pytest.raises(ConfigError, match=r"Mistral.* with another one"):
        runner.run(pages.step((request, 0, 3)))


@pytest.mark.parametrize("pages", [Pages(4, 8), Pages(3, 257)], ids=["size", "number"])
def test_a_cache_with_other_pages_is_refused(
    tiny: TransformersObject, pages: Pages
) -> None:
    request = Request(0, [1, 2, 3])
    pages.admit(request)
    batch = pages.step((request, 0, 3))

    runner = make_runner(tiny, page_size=3)

    with pytest.raises(BatchRefusedError, match="the runner has 256 pages of 3 slots"):
        runner.run(batch)
    assert not runner.page_table.table.any()  # its message was not applied
