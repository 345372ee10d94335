"""In how many bits a checkpoint asks K and V to be kept, as quantisers write it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, cast

import msgspec

_PARTS: Final = (
    "quantization_config",
    "compression_config",
    "hf_quant_config",
    "quantization",
)
"""Where configs say how a checkpoint was quantised."""

_PREFIXES: Final = ("kv_cache", "kv_quant")
"""How the fields begin that say it of K and V, such as `kv_cache_scheme`."""

_WHERE_NOT_HOW: Final = frozenset({"kv_cache_post_rope", "kv_cache_quant_targets"})
"""Such fields that say which tensors were meant, if any were."""

_DTYPES: Final[Mapping[str, str]] = {
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "fp16": "float16",
    "float8_e4m3fn": "float8_e4m3fn",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
}
"""What quantisers call the dtypes that K and V can be stored as."""


class QuantisedKV(msgspec.Struct, frozen=True):
    """What a checkpoint says of K and V.

    Attributes:
        field: The field of the config that says it.
        value: What it says, in words.
        dtype: The torch name of the dtype; None, if K and V cannot be stored as it.
    """

    field: str
    value: str
    dtype: str | None


def quantised_kv(fields: Mapping[str, Any]) -> QuantisedKV | None:
    """Return how a checkpoint wants K and V to be kept; None, if it does not say.

    Reads what compressed-tensors, ModelOpt and others write, however deep it is nested.

    Args:
        fields: The fields of the config.

    Example:
        >>> quantised_kv({"quantization_config": {"kv_cache_quant_algo": "FP8"}})
        QuantisedKV(field='kv_cache_quant_algo', value="'FP8'", dtype='float8_e4m3fn')
    """
    parts = {name: fields[name] for name in _PARTS if name in fields}
    own = {name: fields[name] for name in fields if name.startswith(_PREFIXES)}
    found = [
        QuantisedKV(name, repr(value), _dtype(value))
        for name, value in _nested({**own, **parts})
        if _says_something(value)
    ]
    # What cannot be stored is told before anything else is taken for the whole truth.
    return min(found, key=lambda each: each.dtype is not None, default=None)


def _nested(fields: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    """Yield the fields about K and V, at any depth."""
    waiting: list[Mapping[str, Any]] = [fields]
    while waiting:
        for name, value in waiting.pop().items():
            if str(name).startswith(_PREFIXES):
                if name not in _WHERE_NOT_HOW:
                    yield name, value
            elif isinstance(value, Mapping):
                waiting.append(cast("Mapping[str, Any]", value))


def _says_something(value: object) -> bool:
    if isinstance(value, str):
        return value.lower() not in ("", "auto", "none")
    return value is not None and value is not False and value not in ([], {}, ())


def _dtype(value: object) -> str | None:
    if isinstance(value, str):
        return _DTYPES.get(value.lower().removeprefix("torch."))
    if isinstance(value, Mapping):
        scheme = cast("Mapping[str, Any]", value)
        if (scheme.get("num_bits"), scheme.get("type")) == (8, "float"):
            return "float8_e4m3fn"
    return None
