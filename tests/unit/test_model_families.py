"""Plans of the families that people run, against figures computed by hand."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import pytest

from radixkv.mem_cache import (
    ChunkedLocalAttentionSpec,
    ConfigError,
    FullAttentionSpec,
    MambaSpec,
    MLASpec,
    SlidingWindowSpec,
    specs_from_model_config,
)

FILE = Path(__file__).parents[1] / "data" / "model_configs" / "families.jsonl"
FAMILIES: dict[str, dict[str, Any]] = {
    line["model"]: line for line in map(json.loads, FILE.read_text().splitlines())
}
"""A model of each: its fields, and its bytes as layers, heads, numbers, bytes."""

KINDS = {
    FullAttentionSpec: "full",
    MLASpec: "full",
    SlidingWindowSpec: "local",
    ChunkedLocalAttentionSpec: "local",
    MambaSpec: "state",
}


def computed(text: str) -> int:
    """Return the value of a sum of products such as "2*3+4"."""
    return sum(prod(map(int, term.split("*"))) for term in text.split("+") if term)


@pytest.mark.parametrize("model", FAMILIES)
def test_a_model_keeps_the_bytes_computed_by_hand_or_is_refused(model: str) -> None:
    line = FAMILIES[model]
    if "refused" in line:
        with pytest.raises(ConfigError, match=line["refused"]):
            specs_from_model_config(line["config"], dtype=line["dtype"])
        return

    specs = specs_from_model_config(line["config"], dtype=line["dtype"])

    got: dict[str, int] = {"full": 0, "local": 0, "state": 0}
    for spec in specs.values():
        kind = KINDS[type(spec)]
        # Of K and V, the bytes of a token; of a state, all of them.
        num_bytes = sum(part.size_bytes for part in spec.parts)
        got[kind] += num_bytes if kind == "state" else num_bytes // spec.page_size
    assert {kind: computed(line[kind]) for kind in got} == got
