"""A sharded dictionary is a dictionary."""

from __future__ import annotations

from zlib import crc32

from hypothesis import given
from hypothesis import strategies as st

from radixkv.mem_cache.sharded_dict import ShardedDict, dicts_of

KEYS = st.integers(0, 2_000).map(lambda number: number.to_bytes(2, "little"))


@given(
    st.dictionaries(KEYS, st.integers()),
    st.lists(st.tuples(st.sampled_from(["set", "del"]), KEYS, st.integers())),
)
def test_it_holds_what_a_dictionary_holds(
    entries: dict[bytes, int], steps: list[tuple[str, bytes, int]]
) -> None:
    model = dict(entries)
    sharded = ShardedDict(entries, crc32)
    for step, key, value in steps:
        if step == "set":
            model[key] = sharded[key] = value
        elif step == "del" and key in model:
            del model[key], sharded[key]
        assert (key in model) == (key in sharded)
        assert model.get(key) == sharded.get(key)
        assert len(model) == len(sharded)

    assert model == dict(sharded.items())
    assert sorted(model) == sorted(sharded)
    assert sorted(model.values()) == sorted(sharded.values())
    assert all(value == sharded[key] for key, value in model.items())
    assert bool(model) == bool(sharded)
    assert len(model) == sum(map(len, dicts_of(sharded)))
    assert ([model] if model else []) == dicts_of(model)
