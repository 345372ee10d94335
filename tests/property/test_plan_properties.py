"""Plans of random layers on random workers keep their promises."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.mem_cache import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheMemoryError,
    MambaSpec,
    MLASpec,
    SlidingWindowSpec,
    check_enough_kv_cache_memory,
    num_pages_of_request,
    plan_kv_cache,
)
from radixkv.mem_cache.planning import AnyKVCacheSpec, BufferOrder

ORDERS: list[BufferOrder] = ["pages_outermost", "layers_outermost"]
Specs = dict[str, AnyKVCacheSpec]

HEADS: dict[str, Any] = {
    "page_size": st.just(4),
    "num_kv_heads": st.integers(1, 3),
    "head_dim": st.sampled_from([1, 8, 24]),
    "dtype": st.sampled_from(["float16", "float32", "float8_e4m3fn"]),
}
SPECS: st.SearchStrategy[AnyKVCacheSpec] = st.one_of(
    st.builds(FullAttentionSpec, **HEADS),
    st.builds(FullAttentionSpec, v_head_dim=st.integers(0, 9), **HEADS),
    st.builds(SlidingWindowSpec, window_size=st.sampled_from([5, 16]), **HEADS),
    st.builds(ChunkedLocalAttentionSpec, chunk_size=st.sampled_from([8, 9]), **HEADS),
    st.builds(
        MLASpec,
        page_size=st.just(4),
        latent_dim=st.integers(1, 40),
        rope_dim=st.integers(0, 9),
        dtype=st.just("bfloat16"),
        index_dim=st.integers(0, 5),
    ),
    st.builds(
        MambaSpec,
        page_size=st.just(4),
        shapes=st.tuples(
            st.tuples(st.integers(1, 9)), st.tuples(st.integers(1, 9), st.just(16))
        ),
        dtypes=st.just(("bfloat16", "float32")),
        checkpoint_size=st.sampled_from([None, 8]),
    ),
)


@st.composite
def workers(draw: st.DrawFn) -> list[Specs]:
    """Draw the specs of the workers: stages with layers of few kinds, each on ranks."""
    kinds = draw(st.lists(SPECS, min_size=1, max_size=4))
    drawn = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=12))
    num_stages = draw(st.integers(1, 3))
    stages: list[Specs] = [{} for _ in range(num_stages)]
    for i, spec in enumerate(drawn):
        stages[draw(st.integers(0, num_stages - 1))][f"layers.{i}"] = spec
    return [stage for stage in stages for _ in range(draw(st.integers(1, 2)))]


@dataclass(frozen=True)
class Question:
    """Workers that can hold a request, and how long that may be."""

    specs: list[Specs]
    memories: list[int]
    max_len: int
    step_size: int
    order: BufferOrder

    def plan(self, more: int = 0) -> list[KVCacheConfig]:
        """Plan it, with `more` bytes on each worker."""
        return plan_kv_cache(
            self.specs,
            [memory + more for memory in self.memories],
            max_len=self.max_len,
            chunked_prefill_size=self.step_size,
            order=self.order,
        )

    def pages(self, spec: AnyKVCacheSpec, length: int | None = None) -> int:
        """Return the pages that a layer alone would need for a request."""
        length = self.max_len if length is None else length
        return spec.max_num_pages(length, chunked_prefill_size=self.step_size)


@st.composite
def questions(draw: st.DrawFn, max_spare: int = 50_000) -> Question:
    """Draw workers that have a bit more memory than they need."""
    specs = draw(workers())
    question = Question(
        specs=specs,
        memories=[2**40] * len(specs),
        max_len=draw(st.integers(1, 60)),
        step_size=draw(st.sampled_from([1, 7, 64])),
        order=draw(st.sampled_from(ORDERS)),
    )
    plenty = question.plan()
    num_pages = 1 + num_pages_of_request(
        plenty[0].groups, question.max_len, chunked_prefill_size=question.step_size
    )
    return replace(
        question,
        memories=[
            config.page_bytes * num_pages + draw(st.integers(0, max_spare))
            for config in plenty
        ],
    )


def spans(config: KVCacheConfig) -> Iterator[tuple[int, int, str, int]]:
    """Yield begin, end, layer and page of everything in the buffer."""
    for tensor in config.tensors:
        for layer in tensor.layer_names:
            num_bytes = config.spec_of(layer).page_bytes
            for page in range(config.num_pages + 1):
                start = tensor.address(layer, page)
                yield start, start + num_bytes, layer, page


@given(question=questions())
def test_s3_2_every_layer_is_in_one_group_and_in_one_tensor(
    question: Question,
) -> None:
    configs = question.plan()

    for own, config in zip(question.specs, configs, strict=True):
        placed = Counter(n for tensor in config.tensors for n in tensor.layer_names)
        assert Counter(dict.fromkeys(own, 1)) == Counter(config.layer_names) == placed
        assert own == {name: config.spec_of(name) for name in own}


@given(question=questions())
def test_layers_of_a_group_keep_the_same_tokens(
    question: Question,
) -> None:
    configs = question.plan()

    for config in configs:
        for group in config.groups:
            for length in (1, 5, question.max_len):
                expected = question.pages(group.spec, length)
                assert all(
                    expected == question.pages(config.spec_of(name), length)
                    for name in group.layer_names
                )


@given(question=questions())
def test_s3_20_nothing_overlaps_that_may_be_in_use_together(
    question: Question,
) -> None:
    configs = question.plan()

    for config in configs:
        group_of = {n: i for i, g in enumerate(config.groups) for n in g.layer_names}
        owners: dict[int, int] = {}  # byte: page
        for i in range(len(config.groups)):
            taken: set[int] = set()
            for start, end, layer, page in spans(config):
                if group_of[layer] != i:
                    continue
                assert 0 <= start < end <= config.buffer_bytes
                for byte in range(start, end, 16):  # all parts begin at multiples
                    assert byte not in taken
                    taken.add(byte)
                    # A page id is one group's at a time, so groups may share its bytes,
                    # but no bytes with another page.
                    assert owners.setdefault(byte, page) == page


@given(question=questions())
def test_s3_19_the_buffer_and_its_tensors_stay_within_the_budget(
    question: Question,
) -> None:
    configs = question.plan()

    for config, memory in zip(configs, question.memories, strict=True):
        assert config.buffer_bytes <= memory
        assert config.buffer_bytes == config.page_bytes * (config.num_pages + 1)
        for group in config.groups:
            own = [t for t in config.tensors if t.layer_names[0] in group.layer_names]
            assert sum(t.size_bytes for t in own) <= config.buffer_bytes
    # One page more would not fit on all of them.
    assert any(
        config.buffer_bytes + config.page_bytes > memory
        for config, memory in zip(configs, question.memories, strict=True)
    )


@given(question=questions())
def test_s4_16_all_workers_have_the_same_pages_and_page_tables(
    question: Question,
) -> None:
    configs = question.plan()

    assert 1 == len({config.num_pages for config in configs})
    assert 1 == len({len(config.groups) for config in configs})
    for groups in zip(*(config.groups for config in configs), strict=True):
        assert 1 == len({question.pages(group.spec) for group in groups})
    for i, own in enumerate(question.specs):
        assert configs[question.specs.index(own)] == configs[i]  # ranks are alike


@given(question=questions(), more=st.integers(0, 9_000))
def test_more_memory_never_makes_fewer_pages(question: Question, more: int) -> None:
    first, second = question.plan(), question.plan(more)

    assert first[0].num_pages <= second[0].num_pages
    assert first[0].groups == second[0].groups


@given(question=questions())
def test_s3_3_every_plan_survives_msgspec(
    question: Question,
) -> None:
    configs = question.plan()

    encoded = msgspec.msgpack.encode(configs)

    assert configs == msgspec.msgpack.decode(encoded, type=list[KVCacheConfig])
    as_json = msgspec.json.encode(configs)
    assert configs == msgspec.json.decode(as_json, type=list[KVCacheConfig])


@given(question=questions())
def test_groups_cost_at_most_5_percent_more_than_a_group_a_layer(
    question: Question,
) -> None:
    configs = question.plan()
    merged = {name: spec for own in question.specs for name, spec in own.items()}
    largest = max(spec.page_bytes for spec in merged.values())
    alone = largest * sum(question.pages(spec) for spec in merged.values())

    cost = max(config.page_bytes for config in configs) * num_pages_of_request(
        configs[0].groups, question.max_len, chunked_prefill_size=question.step_size
    )

    assert cost * 100 <= alone * 105


@given(question=questions())
def test_layers_that_all_keep_every_token_are_one_group_without_padding(
    question: Question,
) -> None:
    configs = question.plan()
    merged = [spec for own in question.specs for spec in own.values()]

    if all(isinstance(spec, FullAttentionSpec | MLASpec) for spec in merged):
        assert all(len(config.groups) == 1 for config in configs)
        assert all(c.page_bytes == c.groups[0].page_bytes for c in configs)


@given(question=questions(max_spare=0), share=st.floats(0, 1))
def test_o_a_refusal_names_the_longest_request_that_would_fit(
    question: Question, share: float
) -> None:
    config = max(question.plan(), key=lambda config: config.page_bytes)
    limit = question.memories[question.plan().index(config)] - 1
    memory = int(share * limit)

    with pytest.raises(KVCacheMemoryError) as error:
        check_enough_kv_cache_memory(
            config.groups,
            memory,
            max_len=question.max_len,
            chunked_prefill_size=question.step_size,
            order=question.order,
        )

    fits = [
        length
        for length in range(1, question.max_len + 1)
        if config.page_bytes
        * (1 + sum(question.pages(group.spec, length) for group in config.groups))
        <= memory
    ]
    assert max(fits, default=0) == error.value.longest_len < question.max_len


@dataclass(frozen=True)
class TightQuestion(Question):
    """Workers that may be too small, and how long a request may be."""

    def fits(self, length: int) -> bool:
        """Tell whether a request of a length can be planned."""
        try:
            replace(self, max_len=length).plan()
        except KVCacheMemoryError:
            return False
        return True


@st.composite
def tight_questions(draw: st.DrawFn, longest: int) -> TightQuestion:
    """Draw workers whose memory is near to what a request needs."""
    specs = draw(workers())
    question = TightQuestion(
        specs=specs,
        memories=[2**45] * len(specs),
        max_len=draw(st.integers(1, longest)),
        step_size=draw(st.sampled_from([1, 7, 64])),
        order=draw(st.sampled_from(ORDERS)),
    )
    plenty = question.plan()
    num_pages = 1 + num_pages_of_request(
        plenty[0].groups, question.max_len, chunked_prefill_size=question.step_size
    )
    shares = st.floats(0, 1.05)
    return replace(
        question,
        memories=[int(c.page_bytes * num_pages * draw(shares)) for c in plenty],
    )


@given(question=tight_questions(longest=60))
def test_b162_b164_the_advice_is_the_longest_request_that_a_plan_accepts(
    question: TightQuestion,
) -> None:
    fits = [n for n in range(1, question.max_len + 1) if question.fits(n)]

    if question.max_len in fits:
        question.plan()
        return
    with pytest.raises(KVCacheMemoryError) as error:
        question.plan()

    assert max(fits, default=0) == error.value.longest_len


@given(question=tight_questions(longest=2**31 - 1))
def test_b162_b164_the_advised_length_plans_and_one_more_does_not(
    question: TightQuestion,
) -> None:
    try:
        question.plan()
    except KVCacheMemoryError as error:
        advised = error.longest_len
    else:
        return

    assert advised == 0 or question.fits(advised)
    assert not question.fits(advised + 1)
