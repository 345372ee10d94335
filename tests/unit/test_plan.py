"""Planning: groups, one buffer, the smallest number of pages, what is refused."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from radixkv.mem_cache import (
    ChunkCache,
    ConfigError,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheMemoryError,
    KVCacheSpec,
    KVCacheTensor,
    MambaSpec,
    MemoryManager,
    MLASpec,
    OutOfPagesError,
    Rewind,
    SlidingWindowSpec,
    SpecConflictError,
    UnknownSpecError,
    bind_kv_cache,
    check_enough_kv_cache_memory,
    group_layers,
    longest_len,
    make_kv_cache_config,
    num_pages_of_request,
    plan_kv_cache,
    report_plan,
    specs_from_model_config,
)
from radixkv.mem_cache.planning import (
    GROUPING_RULES,
    AnyKVCacheSpec,
    BufferOrder,
    GroupingRule,
)

ORDERS: list[BufferOrder] = ["pages_outermost", "layers_outermost"]
HEADS: dict[str, Any] = {
    "page_size": 16,
    "num_kv_heads": 1,
    "head_dim": 8,
    "dtype": "float16",
}
FULL = FullAttentionSpec(**HEADS)  # 512 bytes a page
WIDE = msgspec.structs.replace(FULL, head_dim=16, v_head_dim=16)  # 1024 bytes a page
SLIDING = SlidingWindowSpec(window_size=16, **HEADS)
STATE = MambaSpec(page_size=16, shapes=((512,),), dtypes=("float32",))  # 2048 bytes


def layers(spec: AnyKVCacheSpec, *numbers: int) -> dict[str, AnyKVCacheSpec]:
    return {f"layers.{number}": spec for number in numbers}


def names(groups: tuple[KVCacheGroup, ...]) -> list[tuple[str, ...]]:
    return [group.layer_names for group in groups]


# Grouping


def test_s3_11_layers_with_the_same_spec_are_one_group() -> None:
    groups = group_layers([layers(FULL, 0, 1, 2)], max_len=64)

    assert [("layers.0", "layers.1", "layers.2")] == names(groups)
    assert FULL == groups[0].spec
    assert {} == groups[0].other_specs


def test_layers_that_keep_all_tokens_share_a_page_table_whatever_their_size() -> None:
    mla = MLASpec(page_size=16, latent_dim=24, rope_dim=8, dtype="float16")
    specs = {**layers(mla, 0, 1), "draft.0": FULL}

    (group,) = group_layers([specs], max_len=64)

    assert ("layers.0", "layers.1", "draft.0") == group.layer_names
    assert (mla, {"draft.0": FULL}) == (group.spec, group.other_specs)
    assert 2 * mla.page_bytes + FULL.page_bytes == group.page_bytes


def test_many_layers_with_a_window_are_split_into_groups_as_large_as_the_others() -> (
    None
):
    specs = layers(SLIDING, 0, 1, 2, 3, 4) | layers(FULL, 5)
    specs |= layers(SLIDING, 6, 7, 8, 9, 10) | layers(FULL, 11)

    groups = group_layers([specs], max_len=4096, chunked_prefill_size=16)

    # The group that keeps all tokens is first.
    assert ("layers.5", "layers.11") == groups[0].layer_names
    assert [2] * 6 == [len(group.layer_names) for group in groups]


def test_layers_are_dealt_out_so_that_each_stage_has_some_of_each_group() -> None:
    stages = [
        layers(FULL, 0) | layers(SLIDING, 1, 2),
        layers(FULL, 3) | layers(SLIDING, 4, 5),
    ]

    configs = plan_kv_cache(stages, [2**20] * 2, max_len=1024, chunked_prefill_size=16)

    assert [[1, 1, 1], [1, 1, 1]] == [
        [len(group.layer_names) for group in config.groups] for config in configs
    ]


def test_a_window_with_another_size_is_another_group() -> None:
    narrow = msgspec.structs.replace(SLIDING, window_size=8)

    groups = group_layers([layers(SLIDING, 0, 1) | layers(narrow, 2, 3)], max_len=64)

    assert [("layers.0", "layers.1"), ("layers.2", "layers.3")] == names(groups)


@pytest.mark.parametrize("order", ORDERS)
def test_groups_do_not_depend_on_the_memory(order: BufferOrder) -> None:
    specs = layers(FULL, 0, 3) | layers(SLIDING, 1, 2, 4, 5)
    small, large = (
        plan_kv_cache([specs], [memory], max_len=256, order=order)[0].groups
        for memory in (2**18, 2**28)
    )

    assert small == large


def test_s3_8_a_class_of_specs_without_a_rule_is_refused_by_its_name() -> None:
    class OddSpec(KVCacheSpec, frozen=True, tag="odd"):
        """Of a kind that nobody knows."""

    with pytest.raises(UnknownSpecError, match=r"got OddSpec$"):
        plan_kv_cache([{"a": OddSpec(page_size=16)}], [2**20], max_len=1)  # type: ignore[dict-item]


def test_s3_8_a_class_of_ones_own_can_be_given_a_rule() -> None:
    class SinkSpec(SlidingWindowSpec, frozen=True, tag="sink"):
        """A window that also keeps the first tokens."""

    sink = SinkSpec(window_size=16, **HEADS)
    rules: dict[type[KVCacheSpec], GroupingRule] = {
        **GROUPING_RULES,
        SinkSpec: lambda spec: ("sink", spec.window_size),
    }
    specs = layers(SLIDING, 0) | layers(sink, 1)

    inherited = group_layers([specs], max_len=64)
    own = group_layers([specs], max_len=64, rules=rules)

    assert [("layers.0", "layers.1")] == names(inherited)  # as its base
    assert [("layers.0",), ("layers.1",)] == names(own)


# Workers


def test_s3_9_ranks_with_different_specs_are_refused() -> None:
    ranks = [layers(FULL, 0, 1), layers(FULL, 0) | layers(WIDE, 1)]

    with pytest.raises(
        SpecConflictError, match=r"layers\.1, got .*head_dim=8.* on worker 0.*=16.* 1$"
    ):
        plan_kv_cache(ranks, [2**20] * 2, max_len=1)


def test_s3_9_layers_of_one_rank_may_differ() -> None:
    specs = layers(FULL, 0) | layers(WIDE, 1)

    configs = plan_kv_cache([specs, specs], [2**20] * 2, max_len=1)

    assert configs[0] == configs[1]


def test_workers_that_share_some_layers_are_neither_ranks_nor_stages() -> None:
    with pytest.raises(
        SpecConflictError,
        match=r"0 and 1 both have layers\.1, but only 1 has layers\.2",
    ):
        plan_kv_cache([layers(FULL, 1), layers(FULL, 1, 2)], [2**20] * 2, max_len=1)


def test_s3_10_stages_may_differ_and_get_the_same_pages() -> None:
    stages = [layers(FULL, 0, 1, 2), layers(WIDE, 3)]

    first, second = plan_kv_cache(stages, [100 * 1536, 100 * 1024], max_len=16)

    assert (99, 99) == (first.num_pages, second.num_pages)
    assert (100 * 1536, 100 * 1024) == (first.buffer_bytes, second.buffer_bytes)


@pytest.mark.parametrize("order", ORDERS)
def test_s4_16_all_ranks_get_the_smallest_number_of_pages(order: BufferOrder) -> None:
    specs = layers(FULL, 0, 1)

    configs = plan_kv_cache(
        [specs] * 3, [101 * 1024, 61 * 1024, 81 * 1024], max_len=16, order=order
    )

    # Planned again, not cut off: strides fit the smaller buffer.
    assert [61 * 1024] * 3 == [config.buffer_bytes for config in configs]
    assert configs[0] == configs[1] == configs[2]


def test_b143_ranks_that_offer_different_pages_use_the_fewest() -> None:
    specs = layers(FULL, 0)
    offered = [(num_pages + 1) * FULL.page_bytes for num_pages in (100, 60, 80)]

    configs = plan_kv_cache([specs] * 3, offered, max_len=16)

    assert [60, 60, 60] == [config.num_pages for config in configs]


def test_b142_heads_of_few_are_copied_to_more_ranks() -> None:
    model = {
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "dtype": "float16",
    }
    specs = specs_from_model_config(model, tensor_parallel_size=4)

    configs = plan_kv_cache([specs] * 4, [1_000_000] * 4, max_len=16)

    assert {1} == {spec.num_kv_heads for spec in specs.values()}  # type: ignore[union-attr]
    assert [128] * 4 == [
        report_plan(config, request_len=16).token_bytes for config in configs
    ]
    assert [488] * 4 == [config.num_pages + 1 for config in configs]  # with page 0


def test_a_stage_without_cache_takes_as_many_pages_as_the_others() -> None:
    configs = plan_kv_cache([layers(FULL, 0), {}], [10 * 512, 0], max_len=16)

    assert [9, 9] == [config.num_pages for config in configs]
    assert (0, ()) == (configs[1].buffer_bytes, configs[1].tensors)
    assert [()] == names(configs[1].groups)
    assert 0.0 == report_plan(configs[1], request_len=16).padding_percent


def test_s3_22_one_worker_is_planned_as_many_are() -> None:
    specs = layers(FULL, 0, 1) | layers(SLIDING, 2, 3)

    (alone,) = plan_kv_cache([specs], [2**20], max_len=64)
    ranks = plan_kv_cache([specs] * 4, [2**20] * 4, max_len=64)

    assert [alone] * 4 == ranks


# Memory


def test_s3_7_too_little_memory_says_what_would_fit() -> None:
    specs = layers(FULL, 0, 1)

    with pytest.raises(KVCacheMemoryError) as error:
        plan_kv_cache([specs], [5 * 1024 + 1023], max_len=80)

    assert "at most 64 tokens fit" in str(error.value)
    assert (6 * 1024, 6143, 80, 64) == (
        error.value.needed_bytes,
        error.value.available_bytes,
        error.value.max_len,
        error.value.longest_len,
    )
    plan_kv_cache([specs], [5 * 1024 + 1023], max_len=64)  # it does fit


def test_s3_7_memory_for_no_token_at_all_says_so() -> None:
    with pytest.raises(KVCacheMemoryError, match="got 0: at most 0 tokens fit"):
        plan_kv_cache([layers(FULL, 0)], [0], max_len=80)


def b162_stages() -> list[dict[str, AnyKVCacheSpec]]:
    spec = FullAttentionSpec(
        page_size=16, num_kv_heads=2, head_dim=64, dtype="bfloat16"
    )
    return [layers(spec, 0), layers(spec, 1, 2, 3)]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_b162_the_advice_is_that_of_the_worst_stage(order: tuple[int, int]) -> None:
    stages = [b162_stages()[i] for i in order]

    with pytest.raises(KVCacheMemoryError, match="at most 656 tokens fit") as error:
        plan_kv_cache(stages, [2**20] * 2, max_len=2**20)

    # The three layers: 24,576 bytes a page, 65,536 pages and page 0.
    assert 65537 * 24576 == error.value.needed_bytes
    plan_kv_cache(stages, [2**20] * 2, max_len=656)
    with pytest.raises(KVCacheMemoryError):
        plan_kv_cache(stages, [2**20] * 2, max_len=657)


def test_b164_the_advice_knows_that_a_shorter_request_is_grouped_otherwise() -> None:
    heads: dict[str, Any] = {
        "page_size": 64,
        "num_kv_heads": 2,
        "head_dim": 64,
        "dtype": "float16",
    }
    full, window = (
        FullAttentionSpec(**heads),
        SlidingWindowSpec(window_size=256, **heads),
    )
    specs = {f"layers.{i}": full if i % 6 == 5 else window for i in range(13)}

    def plan(max_len: int) -> None:
        plan_kv_cache([specs], [17_315_520], max_len=max_len)

    with pytest.raises(KVCacheMemoryError, match="at most 3840 tokens fit"):
        plan(2**20)
    plan(3840)
    with pytest.raises(KVCacheMemoryError, match="at most 3840 tokens fit"):
        plan(3841)


def test_s3_7_the_check_is_a_step_of_its_own() -> None:
    groups = group_layers([layers(FULL, 0)], max_len=80)

    check_enough_kv_cache_memory(groups, 6 * 512, max_len=80)
    with pytest.raises(KVCacheMemoryError):
        check_enough_kv_cache_memory(groups, 6 * 512 - 1, max_len=80)


def test_the_check_counts_the_pages_of_layers_on_other_workers() -> None:
    stages = [layers(FULL, 0), layers(SLIDING, 1)]

    # 2 pages of the window, 2 of the full layer, and page 0: ids are common to all.
    with pytest.raises(KVCacheMemoryError):
        plan_kv_cache(stages, [5 * 512, 5 * 512 - 1], max_len=32)
    configs = plan_kv_cache(stages, [5 * 512] * 2, max_len=32)

    assert [4, 4] == [config.num_pages for config in configs]


def test_o_the_longest_request_is_the_one_that_just_fits() -> None:
    (config,) = plan_kv_cache([layers(FULL, 0)], [10 * 512], max_len=16)

    longest = longest_len(config.groups, config.num_pages)

    assert 9 * 16 == longest
    assert 9 == num_pages_of_request(config.groups, longest)
    assert 10 == num_pages_of_request(config.groups, longest + 1)


def test_o_the_longest_request_really_runs_and_no_longer_one() -> None:
    (config,) = plan_kv_cache([layers(FULL, 0, 1)], [10 * 1024], max_len=16)
    longest = longest_len(config.groups, config.num_pages)
    cache = ChunkCache(
        MemoryManager(
            num_pages=config.num_pages,
            page_size=config.page_size,
            max_num_requests=1,
            max_context_len=2 * longest,
        )
    )
    request = cache.admit([7] * 2 * longest)
    assert request is not None

    with pytest.raises(OutOfPagesError):
        cache.alloc_for_extend([request], [longest + 1])
    cache.alloc_for_extend([request], [longest])

    assert longest == request.allocated_len


def test_a_state_fits_a_request_of_any_length() -> None:
    (config,) = plan_kv_cache([layers(STATE, 0)], [4 * 2048], max_len=16)

    assert 2**31 - 1 == longest_len(config.groups, config.num_pages)
    assert 0 == longest_len(config.groups, 0)


# Layout


def test_s3_4_the_number_of_pages_is_an_attribute_of_the_config() -> None:
    (config,) = plan_kv_cache([layers(FULL, 0)], [10 * 512], max_len=16)

    assert 9 == config.num_pages


def test_pages_outermost_puts_the_layers_of_a_page_side_by_side() -> None:
    group = KVCacheGroup(layer_names=("a", "b"), spec=FULL)

    config = make_kv_cache_config([group], num_pages=3)

    assert [
        KVCacheTensor(
            size_bytes=4096,
            layer_names=("a", "b"),
            offset=0,
            layer_stride=512,
            page_stride=1024,
        )
    ] == list(config.tensors)
    assert 512 + 2 * 1024 == config.tensor_of("b").address("b", 2)


def test_layers_outermost_puts_the_pages_of_a_layer_side_by_side() -> None:
    group = KVCacheGroup(layer_names=("a", "b"), spec=FULL)

    config = make_kv_cache_config([group], num_pages=3, order="layers_outermost")

    assert [
        KVCacheTensor(
            size_bytes=4096,
            layer_names=("a", "b"),
            offset=0,
            layer_stride=2048,
            page_stride=512,
        )
    ] == list(config.tensors)
    assert 2048 + 2 * 512 == config.tensor_of("b").address("b", 2)


@pytest.mark.parametrize("order", ORDERS)
def test_s3_19_layers_of_different_sizes_fit_the_budget(order: BufferOrder) -> None:
    specs = layers(FULL, 0, 1) | layers(WIDE, 2)  # 2 x 512 + 1024

    (config,) = plan_kv_cache([specs], [2048 * 10 + 5], max_len=16, order=order)

    assert 2048 * 10 == config.buffer_bytes
    assert {"layers.0": 5120, "layers.2": 10240} == {
        tensor.layer_names[0]: tensor.size_bytes // len(tensor.layer_names)
        for tensor in config.tensors
    }


@pytest.mark.parametrize("order", ORDERS)
def test_s3_20_groups_alias_one_buffer_and_agree_on_where_a_page_is(
    order: BufferOrder,
) -> None:
    specs = layers(FULL, 0, 1) | layers(SLIDING, 2, 3)

    (config,) = plan_kv_cache([specs], [10 * 1024], max_len=16, order=order)

    full, sliding = config.tensors
    assert ("layers.0", "layers.1") == full.layer_names
    assert ("layers.2", "layers.3") == sliding.layer_names
    assert [full.address("layers.1", page) for page in range(10)] == [
        sliding.address("layers.3", page) for page in range(10)
    ]


def test_with_layers_outermost_a_column_is_as_wide_as_its_widest_layer() -> None:
    groups = [
        KVCacheGroup(
            layer_names=("a", "b"), spec=FULL, other_specs={"b": WIDE}
        ),  # 1024, 512
        KVCacheGroup(layer_names=("c",), spec=SLIDING),  # 512
    ]

    config = make_kv_cache_config(groups, num_pages=1, order="layers_outermost")

    assert 2 * (1024 + 512) == config.buffer_bytes
    assert {"b": (0, 1024), "a": (2048, 512), "c": (0, 1024)} == {
        tensor.layer_names[0]: (tensor.offset, tensor.page_stride)
        for tensor in config.tensors
    }


@pytest.mark.parametrize("order", ORDERS)
def test_s3_3_a_config_survives_msgspec(order: BufferOrder) -> None:
    specs = layers(FULL, 0, 1) | layers(SLIDING, 2) | layers(STATE, 3)
    (config,) = plan_kv_cache([specs], [2**20], max_len=64, order=order)

    as_json = msgspec.json.decode(msgspec.json.encode(config), type=KVCacheConfig)
    packed = msgspec.msgpack.decode(msgspec.msgpack.encode(config), type=KVCacheConfig)

    assert config == as_json == packed


def test_a_config_knows_the_spec_and_the_tensor_of_a_layer() -> None:
    (config,) = plan_kv_cache([layers(FULL, 0) | layers(WIDE, 1)], [2**20], max_len=64)

    assert (FULL, WIDE) == (config.spec_of("layers.0"), config.spec_of("layers.1"))
    assert ("layers.1",) == config.tensor_of("layers.1").layer_names
    with pytest.raises(ConfigError, match=r"layer must be one of .*, got layers\.2"):
        config.spec_of("layers.2")
    with pytest.raises(ConfigError, match=r"layer must be one of .*, got layers\.2"):
        config.tensor_of("layers.2")


def test_a_config_can_do_what_all_its_groups_can() -> None:
    often = msgspec.structs.replace(STATE, checkpoint_size=32)
    rarely = msgspec.structs.replace(STATE, checkpoint_size=48)
    (hybrid,) = plan_kv_cache(
        [layers(FULL, 0) | layers(often, 1) | layers(rarely, 2)], [2**20], max_len=64
    )
    (window,) = plan_kv_cache(
        [layers(FULL, 0) | layers(SLIDING, 1)], [2**20], max_len=64
    )
    (lost,) = plan_kv_cache([layers(FULL, 0) | layers(STATE, 1)], [2**20], max_len=64)

    assert (True, Rewind.NONE, 96) == msgspec.structs.astuple(hybrid.capabilities)
    assert (True, Rewind.STEP, 16) == msgspec.structs.astuple(window.capabilities)
    assert (False, Rewind.NONE, None) == msgspec.structs.astuple(lost.capabilities)


# Figures


def test_the_report_counts_what_fits() -> None:
    specs = layers(FULL, 0, 1) | layers(SLIDING, 2, 3)
    (config,) = plan_kv_cache([specs], [21 * 1024], max_len=64, chunked_prefill_size=1)

    report = report_plan(config, request_len=64, chunked_prefill_size=1)

    assert 20 == report.num_pages
    assert 1024 == report.page_bytes
    assert 2 * 32 == report.token_bytes  # of the two full layers
    assert (4 + 2) * 1024 == report.request_bytes
    assert 3 == report.num_requests
    assert 18 * 16 == report.longest_len
    assert (2, 0.0, 16) == (
        report.num_groups,
        report.padding_percent,
        report.hit_granularity,
    )


def test_the_report_says_which_share_of_a_requests_pages_is_padding() -> None:
    specs = layers(FULL, 0) | layers(STATE, 1)
    (config,) = plan_kv_cache([specs], [2**20], max_len=64)

    report = report_plan(config, request_len=64)

    # 4 pages with 512 bytes of 2048, 1 page with a state.
    assert 2048 == report.page_bytes
    assert 100 * (1 - (4 * 512 + 2048) / (5 * 2048)) == report.padding_percent


# Refusals


def config_of(**changes: object) -> KVCacheConfig:
    group = KVCacheGroup(layer_names=("a", "b"), spec=FULL)
    return msgspec.structs.replace(
        make_kv_cache_config([group], num_pages=3), **changes
    )


def tensor(**changes: object) -> KVCacheTensor:
    (whole,) = config_of().tensors
    return msgspec.structs.replace(whole, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_pages": 0}, "num_pages must be >= 1"),
        ({"page_size": 8}, r"page_size must be that of all specs \(8\), got 16"),
        ({"buffer_bytes": -1}, "buffer_bytes must be >= 0"),
        ({"buffer_bytes": 1.5}, "buffer_bytes must be an integer"),
        (
            {"buffer_bytes": 4095},
            r"buffer_bytes must be a multiple of num_pages \+ 1 \(4\), got 4095",
        ),
        ({"groups": None}, "groups must be a sequence, got None"),
        ({"groups": (3,)}, "groups must hold KVCacheGroups, got 3"),
        ({"tensors": None}, "tensors must be a sequence, got None"),
        ({"tensors": "ab"}, "tensors must be a sequence, got 'ab'"),
        ({"order": "heads_outermost"}, "order must be one of"),
        (
            {"tensors": ()},
            r"each layer must be in a group and a tensor, got \['a', 'b'",
        ),
        ({"tensors": (tensor(), tensor())}, "a layer must be in one tensor"),
        ({"tensors": (tensor(size_bytes=4095),)}, "size_bytes must be 4096"),
        ({"tensors": (tensor(layer_stride=511),)}, "a and b overlap at byte 511"),
        ({"tensors": (tensor(offset=1),)}, "b must lie in bytes 0..1024, got 513"),
        ({"tensors": (tensor(offset=-1),)}, "a must lie in bytes 0..1024, got -1"),
        ({"tensors": (tensor(page_stride=512),)}, "page_stride must be 1024, "),
    ],
)
def test_a_config_that_contradicts_itself_is_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(**changes)


def test_a_tensor_has_layers_of_one_spec() -> None:
    groups = (
        KVCacheGroup(layer_names=("a",), spec=FULL),
        KVCacheGroup(layer_names=("b",), spec=SLIDING),
    )

    with pytest.raises(ConfigError, match="layers of a tensor must have one spec"):
        config_of(groups=groups)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_stride": 511}, "pages of a overlap"),
        ({"layer_stride": 2047}, "a and b overlap at byte 2047"),
        ({"layer_stride": 2049}, "b must lie in bytes 0..4096"),
    ],
)
def test_columns_that_overlap_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    group = KVCacheGroup(layer_names=("a", "b"), spec=FULL)
    config = make_kv_cache_config([group], num_pages=3, order="layers_outermost")
    wrong = msgspec.structs.replace(config.tensors[0], **changes)

    with pytest.raises(ConfigError, match=message):
        msgspec.structs.replace(config, tensors=(wrong,))


def test_groups_that_disagree_on_where_a_page_is_are_refused() -> None:
    groups = [
        KVCacheGroup(layer_names=("a",), spec=FULL),
        KVCacheGroup(layer_names=("b",), spec=SLIDING),
    ]
    config = make_kv_cache_config(groups, num_pages=3, order="layers_outermost")
    a, b = config.tensors
    wide = msgspec.structs.replace(b, page_stride=1024)

    with pytest.raises(ConfigError, match="overlap at byte 0"):
        msgspec.structs.replace(config, tensors=(a, wide), buffer_bytes=4096)


def test_a_group_names_each_layer_once() -> None:
    with pytest.raises(ConfigError, match="layer_names must differ"):
        KVCacheGroup(layer_names=("a", "a"), spec=FULL)
    with pytest.raises(ConfigError, match=r"other_specs must be of .*, got \['b'\]"):
        KVCacheGroup(layer_names=("a",), spec=FULL, other_specs={"b": WIDE})


def test_s3_2_a_layer_in_two_groups_is_refused() -> None:
    group = KVCacheGroup(layer_names=("a",), spec=FULL)

    with pytest.raises(ConfigError, match=r"in one group, got two for \['a'\]"):
        make_kv_cache_config([group, group], num_pages=1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_len": 0}, "max_len must be >= 1"),
        ({"chunked_prefill_size": 0}, "chunked_prefill_size must be >= 1"),
        ({"order": "rows"}, "order must be one of pages_outermost, layers_outermost"),
        ({"available_bytes_per_worker": []}, "got 0 for 1 workers"),
        ({"available_bytes_per_worker": [-1]}, "available_bytes must be >= 0, got -1"),
        ({"available_bytes_per_worker": [0.5]}, "available_bytes must be an integer"),
        ({"specs_per_worker": [{}]}, "must name at least one layer, got none"),
        (
            {
                "specs_per_worker": [
                    {"a": FULL, "b": msgspec.structs.replace(STATE, page_size=8)}
                ]
            },
            r"page_size must be the same of all specs, got \[8, 16\]",
        ),
    ],
)
def test_a_plan_refuses_wrong_arguments(
    arguments: dict[str, Any], message: str
) -> None:
    right = {
        "specs_per_worker": [layers(FULL, 0)],
        "available_bytes_per_worker": [2**20],
        "max_len": 16,
    }

    with pytest.raises(ConfigError, match=message):
        plan_kv_cache(**right | arguments)


def test_a_config_needs_a_group() -> None:
    with pytest.raises(ConfigError, match="groups must hold at least one"):
        make_kv_cache_config([], num_pages=1)
    with pytest.raises(ConfigError, match="num_pages must be >= 1"):
        make_kv_cache_config([KVCacheGroup(layer_names=(), spec=FULL)], num_pages=0)
    with pytest.raises(ConfigError, match="order must be one of"):
        make_kv_cache_config(
            [KVCacheGroup(layer_names=(), spec=FULL)],
            num_pages=1,
            order="rows",  # type: ignore[arg-type]
        )


# Binding


def test_s3_13_binding_gives_each_layer_its_own_cache() -> None:
    modules = {f"layers.{i}.attn": SimpleNamespace() for i in (10, 2, 0)}
    caches = {name: object() for name in modules}

    ordered = bind_kv_cache(modules, caches)

    assert all(modules[name].kv_cache is caches[name] for name in modules)
    assert [caches[f"layers.{i}.attn"] for i in (0, 2, 10)] == ordered


def test_s3_14_two_layers_with_one_index_are_refused_with_both_names() -> None:
    modules = {"decoder.1.attn": SimpleNamespace(), "draft.1.attn": SimpleNamespace()}

    with pytest.raises(
        ConfigError, match=r"got 1 for both decoder\.1\.attn and draft\.1\.attn"
    ):
        bind_kv_cache(modules, dict.fromkeys(modules, "KV"))

    assert not any(hasattr(module, "kv_cache") for module in modules.values())


@pytest.mark.parametrize(
    ("modules", "caches", "message"),
    [
        (["layers.0"], ["layers.0", "layers.1"], r"one without: \['layers\.1'\]"),
        (["layers.0", "layers.1"], ["layers.0"], r"one without: \['layers\.1'\]"),
        (["layers.0", "norm"], ["layers.0", "norm"], "one number .*, got 'norm'"),
        (["layers.0.heads.1"], ["layers.0.heads.1"], "must have one number"),
    ],
)
def test_a_binding_that_is_refused_binds_nothing(
    modules: list[str], caches: list[str], message: str
) -> None:
    holders = {name: SimpleNamespace() for name in modules}

    with pytest.raises(ConfigError, match=message):
        bind_kv_cache(holders, dict.fromkeys(caches, "KV"))

    assert not any(hasattr(holder, "kv_cache") for holder in holders.values())


def test_s3_12_planning_and_binding_import_neither_torch_nor_the_scheduler() -> None:
    code = (
        "import sys, radixkv.mem_cache.planning.bind\n"
        "print([n for n in sys.modules if 'torch' in n or 'scheduling' in n])"
    )

    printed = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )

    assert "[]\n" == printed.stdout


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_names": None}, "layer_names must be a sequence, got None"),
        ({"layer_names": "ab"}, "layer_names must be a sequence, got 'ab'"),
        ({"layer_names": (1, 2)}, "layer_names must hold strs, got 1"),
        ({"spec": None}, "spec must hold KVCacheSpecs, got None"),
        ({"other_specs": None}, "other_specs must name the spec of each layer"),
        ({"other_specs": {"a": 3}}, "other_specs must hold specs by layer, got 'a': 3"),
    ],
)
def test_a_group_of_something_else_is_refused(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        KVCacheGroup(**{"layer_names": ("a",), "spec": FULL, **fields})


@pytest.mark.parametrize(
    ("specs_per_worker", "message"),
    [
        ([[FULL]], r"specs_per_worker\[0\] must name the spec of each layer, got list"),
        ([None], "must name the spec of each layer, got NoneType"),
        ([{"a": 3}], r"specs_per_worker\[0\] must hold specs by layer, got 'a': 3"),
        ([{1: FULL}], "must hold specs by layer, got 1"),
        ({"a": FULL}, "specs_per_worker must be a sequence"),
        (None, "specs_per_worker must be a sequence, got None"),
    ],
)
def test_what_is_no_spec_is_refused(
    specs_per_worker: Any,  # noqa: ANN401
    message: str,
) -> None:
    with pytest.raises(ConfigError, match=message):
        plan_kv_cache(specs_per_worker, [4096], max_len=16)


def test_memory_that_is_no_sequence_is_refused() -> None:
    memory: Any = 4096

    with pytest.raises(ConfigError, match="available_bytes_per_worker must be a seq"):
        plan_kv_cache([layers(FULL, 1)], memory, max_len=16)
