"""Specs: what a page holds, how many a request needs, what a cache can do."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.mem_cache import (
    ChunkedLocalAttentionSpec,
    ConfigError,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLASpec,
    Rewind,
    SlidingWindowSpec,
    is_kv_cache_type_uniform,
)
from radixkv.mem_cache.planning import AnyKVCacheSpec

HEADS: dict[str, Any] = {
    "page_size": 16,
    "num_kv_heads": 8,
    "head_dim": 128,
    "dtype": "bfloat16",
}


def heads(**changes: Any) -> dict[str, Any]:  # noqa: ANN401
    return HEADS | changes


FULL = FullAttentionSpec(**HEADS)
SLIDING = SlidingWindowSpec(window_size=128, **HEADS)
CHUNKED = ChunkedLocalAttentionSpec(chunk_size=64, **HEADS)
MLA = MLASpec(page_size=16, latent_dim=512, rope_dim=64, dtype="bfloat16")
MAMBA = MambaSpec(
    page_size=16, shapes=((10240, 3), (128, 64, 128)), dtypes=("bfloat16", "float32")
)
SPECS = [FULL, SLIDING, CHUNKED, MLA, MAMBA]


def num_pages(tokens: range, page_size: int) -> int:
    """Count the pages that tokens lie in, one by one."""
    return len({token // page_size for token in tokens})


def test_a_page_of_attention_holds_k_then_v() -> None:
    k, v = FULL.parts

    assert ("k", (16, 8, 128), "bfloat16", 0) == (k.name, k.shape, k.dtype, k.offset)
    assert ("v", (16, 8, 128), "bfloat16", 32768) == (
        v.name,
        v.shape,
        v.dtype,
        v.offset,
    )
    assert 2 * 16 * 8 * 128 * 2 == FULL.page_bytes


def test_v_may_have_another_width() -> None:
    spec = FullAttentionSpec(**HEADS, v_head_dim=64)

    assert (16, 8, 64) == spec.parts[1].shape
    assert 16 * 8 * (128 + 64) * 2 == spec.page_bytes


@pytest.mark.parametrize(
    ("dtype", "page_bytes"),
    [("float32", 131072), ("float16", 65536), ("float8_e4m3fn", 32768)],
)
def test_a_page_takes_the_bytes_of_its_dtype(dtype: str, page_bytes: int) -> None:
    assert page_bytes == FullAttentionSpec(**heads(dtype=dtype)).page_bytes


def test_s3_18_a_page_of_mla_holds_one_vector_a_token() -> None:
    (latent,) = MLA.parts

    assert ("latent", (16, 1, 576)) == (latent.name, latent.shape)
    assert 16 * 576 * 2 == MLA.page_bytes


def test_an_index_lies_behind_the_vectors() -> None:
    spec = MLASpec(
        page_size=64, latent_dim=512, rope_dim=64, dtype="bfloat16", index_dim=128
    )

    assert [("latent", 0), ("index", 64 * 576 * 2)] == [
        (part.name, part.offset) for part in spec.parts
    ]
    assert 64 * (576 + 128) * 2 == spec.page_bytes


def test_a_page_of_a_state_holds_one_state() -> None:
    conv, ssm = MAMBA.parts

    assert (0, 61440) == (conv.offset, ssm.offset)
    assert 61440 + 4194304 == MAMBA.page_bytes


def test_parts_begin_at_multiples_of_16_bytes() -> None:
    spec = MambaSpec(page_size=1, shapes=((3,), (5,)), dtypes=("int8", "float32"))

    assert [0, 16] == [part.offset for part in spec.parts]
    assert 48 == spec.page_bytes


def test_full_attention_keeps_every_token() -> None:
    assert [1, 1, 2, 7] == [FULL.max_num_pages(length) for length in (1, 16, 17, 100)]
    assert 7 * 65536 == FULL.max_memory_bytes(100)


def test_s3_18_a_window_keeps_a_step_and_the_tokens_before_it() -> None:
    # 127 tokens before the step and 16 of it; the first may end its page.
    assert 10 == SLIDING.max_num_pages(4096, chunked_prefill_size=16)
    assert 10 * 65536 == SLIDING.max_memory_bytes(4096, chunked_prefill_size=16)


def test_a_window_keeps_no_more_than_the_request() -> None:
    assert 2 == SLIDING.max_num_pages(32, chunked_prefill_size=2048)


@given(
    page_size=st.integers(1, 9),
    window_size=st.integers(1, 40),
    step_size=st.integers(1, 20),
    max_len=st.integers(1, 60),
)
def test_the_pages_of_a_window_are_those_of_the_worst_step(
    page_size: int, window_size: int, step_size: int, max_len: int
) -> None:
    spec = SlidingWindowSpec(**heads(page_size=page_size), window_size=window_size)
    steps = [
        range(max(0, start - window_size + 1), start + size)
        for start in range(max_len)
        for size in range(1, min(step_size, max_len - start) + 1)
    ]
    worst = max(num_pages(step, page_size) for step in steps)

    got = spec.max_num_pages(max_len, chunked_prefill_size=step_size)

    # Which offsets occur depends on the length; at most one page is for one that does
    # not.
    assert worst <= got <= worst + 1
    long_len = 400
    longest = range(long_len - step_size, long_len)
    offsets = [
        range(start - window_size + 1, start + step_size)
        for start in range(longest.start - page_size, longest.start)
    ]
    assert max(num_pages(step, page_size) for step in offsets) == spec.max_num_pages(
        long_len, chunked_prefill_size=step_size
    )


@given(
    page_size=st.integers(1, 9),
    chunk_size=st.integers(1, 40),
    step_size=st.integers(1, 20),
    max_len=st.integers(1, 60),
)
def test_the_pages_of_a_chunk_hold_every_step(
    page_size: int, chunk_size: int, step_size: int, max_len: int
) -> None:
    spec = ChunkedLocalAttentionSpec(
        **heads(page_size=page_size), chunk_size=chunk_size
    )
    steps = [
        range(start // chunk_size * chunk_size, start + size)
        for start in range(max_len)
        for size in range(1, min(step_size, max_len - start) + 1)
    ]
    worst = max(num_pages(step, page_size) for step in steps)

    got = spec.max_num_pages(max_len, chunked_prefill_size=step_size)

    assert worst <= got <= worst + 1


def test_a_chunk_that_begins_with_its_page_needs_no_page_more() -> None:
    # 63 tokens of the chunk and 1 of the step, in 4 whole pages.
    assert 4 == CHUNKED.max_num_pages(4096, chunked_prefill_size=1)


@given(
    spec=st.sampled_from(SPECS),
    lengths=st.tuples(st.integers(1, 9999), st.integers(1, 9999)),
)
def test_a_longer_request_never_needs_fewer_pages(
    spec: KVCacheSpec, lengths: tuple[int, int]
) -> None:
    shorter, longer = sorted(lengths)

    assert spec.max_num_pages(shorter) <= spec.max_num_pages(longer)


def test_a_state_is_of_one_size_whatever_the_length() -> None:
    kept = msgspec.structs.replace(MAMBA, checkpoint_size=512)

    assert (1, 1) == (MAMBA.max_num_pages(1), MAMBA.max_num_pages(2**30))
    assert 2 == kept.max_num_pages(2**30)  # the newest, and the one it began with


def test_every_spec_says_what_it_can_do() -> None:
    said = [
        (
            type(spec).__name__,
            spec.capabilities.prefix_reuse,
            spec.capabilities.rewind,
            spec.capabilities.hit_granularity,
        )
        for spec in [*SPECS, msgspec.structs.replace(MAMBA, checkpoint_size=512)]
    ]

    assert [
        ("FullAttentionSpec", True, Rewind.ANY, 16),
        ("SlidingWindowSpec", True, Rewind.STEP, 16),
        ("ChunkedLocalAttentionSpec", True, Rewind.STEP, 16),
        ("MLASpec", True, Rewind.ANY, 16),
        ("MambaSpec", False, Rewind.NONE, None),
        ("MambaSpec", True, Rewind.NONE, 512),
    ] == said


def specs() -> st.SearchStrategy[AnyKVCacheSpec]:
    sizes = st.integers(1, 3)
    dtypes = st.sampled_from(["bfloat16", "float16"])
    heads: dict[str, Any] = {
        "page_size": sizes,
        "num_kv_heads": sizes,
        "head_dim": sizes,
        "v_head_dim": st.integers(0, 3),
        "dtype": dtypes,
    }
    return st.one_of(
        st.builds(FullAttentionSpec, **heads),
        st.builds(SlidingWindowSpec, window_size=sizes, **heads),
        st.builds(ChunkedLocalAttentionSpec, chunk_size=sizes, **heads),
        st.builds(
            MLASpec, page_size=sizes, latent_dim=sizes, rope_dim=sizes, dtype=dtypes
        ),
        st.builds(
            MambaSpec,
            page_size=st.just(1),
            shapes=st.tuples(st.tuples(sizes, sizes)),
            dtypes=st.tuples(dtypes),
            checkpoint_size=st.none() | sizes,
        ),
    )


@given(one=specs(), other=specs())
def test_s3_6_specs_are_of_one_type_if_and_only_if_their_caches_are_alike(
    one: AnyKVCacheSpec, other: AnyKVCacheSpec
) -> None:
    lengths = range(1, 20)
    alike = one.is_same_type(other)

    assert alike == (one.type_id == other.type_id) == other.is_same_type(one)
    assert alike == (one == other)
    if alike:
        assert one.parts == other.parts
        assert one.capabilities == other.capabilities
        assert all(one.max_num_pages(n) == other.max_num_pages(n) for n in lengths)
    elif type(one) is type(other) is FullAttentionSpec:
        assert one.parts != other.parts


def test_s3_6_a_type_id_is_the_same_in_every_process() -> None:
    assert (
        "FullAttentionSpec(page_size=16, num_kv_heads=8, head_dim=128, v_head_dim=128, "
        "dtype='bfloat16')" == FULL.type_id
    )


def test_s3_6_a_width_of_v_that_is_that_of_k_needs_no_name() -> None:
    assert FULL.is_same_type(FullAttentionSpec(**HEADS, v_head_dim=128))


def test_s3_5_layers_are_uniform_if_all_have_one_type() -> None:
    assert is_kv_cache_type_uniform({"a": FULL, "b": FullAttentionSpec(**HEADS)})
    assert is_kv_cache_type_uniform({})
    assert not is_kv_cache_type_uniform({"a": FULL, "b": SLIDING})
    assert not is_kv_cache_type_uniform(
        {"a": SLIDING, "b": msgspec.structs.replace(SLIDING, window_size=64)}
    )


@given(spec=specs())
def test_a_spec_survives_msgspec(spec: AnyKVCacheSpec) -> None:
    as_json = msgspec.json.decode(msgspec.json.encode(spec), type=AnyKVCacheSpec)
    packed = msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=AnyKVCacheSpec)

    assert spec == as_json == packed
    assert type(spec) is type(as_json) is type(packed)


def test_numpy_sizes_become_plain_ones() -> None:
    spec = FullAttentionSpec(**heads(page_size=np.int64(16)))

    assert type(spec.page_size) is int
    assert spec == FULL


def test_a_spec_is_frozen() -> None:
    with pytest.raises(AttributeError):
        FULL.page_size = 32  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 0}, "page_size must be >= 1"),
        ({"page_size": True}, "page_size must be an integer, got True"),
        ({"page_size": 1.0}, "page_size must be an integer"),
        ({"num_kv_heads": -1}, "num_kv_heads must be >= 1"),
        ({"num_kv_heads": 2**31}, "num_kv_heads must be >= 1 and < 2"),
        ({"head_dim": "128"}, "head_dim must be an integer"),
        ({"v_head_dim": -1}, "v_head_dim must be >= 0"),
        ({"dtype": "float64"}, "dtype must be one of float32"),
        ({"dtype": None}, "dtype must be one of float32"),
        ({"window_size": 0}, "window_size must be >= 1"),
    ],
)
def test_a_spec_refuses_what_no_layer_has(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SlidingWindowSpec(**heads(window_size=8) | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latent_dim": 0}, "latent_dim must be >= 1"),
        ({"rope_dim": -1}, "rope_dim must be >= 0"),
        ({"index_dim": -1}, "index_dim must be >= 0"),
        ({"dtype": "bf16"}, "dtype must be one of"),
    ],
)
def test_mla_refuses_what_no_layer_has(change: dict[str, Any], message: str) -> None:
    fields: dict[str, Any] = {
        "page_size": 16,
        "latent_dim": 4,
        "rope_dim": 2,
        "dtype": "float16",
    }
    with pytest.raises(ConfigError, match=message):
        MLASpec(**fields | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shapes": ()}, "got 0 shapes and 1 dtypes"),
        ({"shapes": ((2,), (3,))}, "got 2 shapes and 1 dtypes"),
        ({"shapes": ((2, 0),)}, "a dimension of shapes must be >= 1"),
        ({"dtypes": ("complex64",)}, "dtypes must be one of"),
        ({"checkpoint_size": 0}, "checkpoint_size must be >= 1"),
        ({"checkpoint_size": 24}, "must be a multiple of page_size .16., got 24"),
    ],
)
def test_a_state_refuses_what_no_layer_has(
    change: dict[str, Any], message: str
) -> None:
    fields: dict[str, Any] = {
        "page_size": 16,
        "shapes": ((2, 3),),
        "dtypes": ("float32",),
    }
    with pytest.raises(ConfigError, match=message):
        MambaSpec(**fields | change)


@pytest.mark.parametrize("spec", SPECS)
def test_a_length_must_be_one(spec: KVCacheSpec) -> None:
    with pytest.raises(ConfigError, match="max_len must be >= 1"):
        spec.max_memory_bytes(0)
    with pytest.raises(ConfigError, match="chunked_prefill_size must be >= 1"):
        spec.max_memory_bytes(1, chunked_prefill_size=0)


def test_a_spec_of_a_message_is_checked_as_well() -> None:
    encoded = msgspec.json.encode(FULL).replace(b'"head_dim":128', b'"head_dim":0')

    with pytest.raises(msgspec.ValidationError, match="head_dim must be >= 1"):
        msgspec.json.decode(encoded, type=AnyKVCacheSpec)


@pytest.mark.parametrize("what", ["parts", "capabilities"])
def test_a_class_of_specs_must_say_everything(what: str) -> None:
    class Silent(KVCacheSpec, frozen=True):
        """Says nothing."""

    with pytest.raises(NotImplementedError, match="Silent does not say"):
        getattr(Silent(page_size=1), what)
    with pytest.raises(NotImplementedError, match="Silent does not count"):
        Silent(page_size=1).max_num_pages(1)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"shapes": None}, "shapes must be a sequence, got None"),
        ({"shapes": (3,)}, "a shape of shapes must be a sequence, got 3"),
        ({"shapes": ("ab",)}, "a shape of shapes must be a sequence, got 'ab'"),
        ({"dtypes": None}, "dtypes must be a sequence, got None"),
        ({"dtypes": "float32"}, "dtypes must be a sequence, got 'float32'"),
    ],
)
def test_a_state_of_something_else_is_refused(
    fields: dict[str, Any], message: str
) -> None:
    right = {"page_size": 16, "shapes": ((3,),), "dtypes": ("float32",)}

    with pytest.raises(ConfigError, match=message):
        MambaSpec(**{**right, **fields})
