"""In which dtype a model keeps K and V, by what its config says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, cast

from ..errors import ConfigError
from .kv_quantisation import QuantisedKV

_COMPUTE_DTYPES: Final = ("float32", "float16", "bfloat16")
"""What models compute K and V in; their weights may be in fewer bits."""

_KV_DTYPES: Final = (*_COMPUTE_DTYPES, "float8_e4m3fn")
"""What K and V can be stored as."""

_COMPUTE_FIELDS: Final = ("bnb_4bit_compute_dtype", "compute_dtype")
"""Where a `quantization_config` says what is computed in."""


def plain_dtype(dtype: object) -> object:
    """Return the name of a dtype without "torch.", be it text or torch's own.

    Args:
        dtype: A dtype, or anything else, which stays as it is.

    Example:
        >>> plain_dtype("torch.bfloat16"), plain_dtype(None)
        ('bfloat16', None)
    """
    text = str(dtype)
    return text.removeprefix("torch.") if text.startswith("torch.") else dtype


def compute_dtype(fields: Mapping[str, Any]) -> str | None:
    """Return the dtype that a model computes in; None, if its config does not say.

    That of quantised weights is none: K and V are not kept in it.

    Args:
        fields: The fields of the config, by their usual names.
    """
    quantisation: object = fields.get("quantization_config")
    inner: Mapping[str, Any] = {}
    if isinstance(quantisation, Mapping):
        inner = cast("Mapping[str, Any]", quantisation)
    named = (fields.get("dtype"), *(inner.get(name) for name in _COMPUTE_FIELDS))
    plain = map(plain_dtype, named)
    return next((str(dtype) for dtype in plain if dtype in _COMPUTE_DTYPES), None)


def kv_dtype(
    given: object,
    computed: str | None,
    weights: str | None,
    quantised: QuantisedKV | None = None,
) -> str:
    """Return the dtype of K and V.

    Args:
        given: What the caller wants, its torch name or torch's own; None, as computed.
        computed: What the model computes in; None, if unknown.
        weights: What the config calls its dtype, for the message.
        quantised: How the checkpoint wants K and V to be kept; None, if it does not
            say.

    Raises:
        ConfigError: K and V cannot be stored as it, or nobody says it.

    Example:
        >>> kv_dtype("torch.float16", None, None), kv_dtype(None, "bfloat16", "int8")
        ('float16', 'bfloat16')
    """
    allowed = ", ".join(_KV_DTYPES)
    if given is None:
        if quantised is not None:
            if quantised.dtype is None:
                raise ConfigError(
                    f"dtype (--dtype) of K and V must be given as one of {allowed}: "
                    f"{quantised.field} of the config is {quantised.value}"
                )
            return quantised.dtype
        if computed is None:
            raise ConfigError(
                f"dtype (--dtype) of K and V must be given as one of {allowed}: the "
                f"config names {weights or 'none'}"
            )
        return computed
    dtype = plain_dtype(given)
    if dtype not in _KV_DTYPES:
        raise ConfigError(f"dtype must be one of {allowed}, got {dtype!r}")
    return str(dtype)
