"""Which families read a field, of those that many configs carry without effect."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from .model_families import is_known

_MLA: Final = frozenset(
    [
        "deepseek_v2",
        "deepseek_v3",
        "deepseek_v32",
        "glm4_moe_lite",
        "glm_moe_dsa",
        "kimi_k2",
        "kimi_linear",
        "minicpm3",
    ]
)

_READERS: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "attention_chunk_size": frozenset({"llama4_text"}),
        "global_head_dim": frozenset({"gemma4_text", "gemma4_unified_text"}),
        "index_head_dim": frozenset({"deepseek_v32", "glm_moe_dsa"}),
        "kv_lora_rank": _MLA,
        "multi_query": frozenset(
            {"RefinedWeb", "RefinedWebModel", "falcon", "gpt_bigcode"}
        ),
        "num_kv_shared_layers": frozenset(
            {"gemma3n_text", "gemma4_text", "gemma4_unified_text"}
        ),
        "v_head_dim": frozenset(),  # of MLA, which keeps no V
    }
)
"""The only known families that read a field."""

_ONE_SIZE: Final = frozenset(
    ["bloom", "codegen", "gpt2", "gpt_neox", "gptj", "mpt", "opt"]
)
"""Families whose heads of K and V are those of the queries, and divide the width."""

_IGNORED: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "head_dim": _ONE_SIZE
        | {"dbrx", "falcon", "gpt_bigcode", "persimmon", "stablelm"},
        "num_key_value_heads": _ONE_SIZE | {"persimmon"},
    }
)
"""The known families that do not read a field that most others do."""


_SWITCHED: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {"use_mla": ("kv_lora_rank", "v_head_dim"), "use_mtp": ("num_mtp_layers",)}
)
"""Fields that count for nothing if another one is false."""


def without_unread(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config without those that its family does not read.

    Of a family that is not known, all are kept. What is switched off is null.

    Args:
        fields: The fields of the config, by their usual names.

    Example:
        >>> without_unread({"model_type": "gpt2", "head_dim": 80})
        {'model_type': 'gpt2'}
    """
    off = (names for switch, names in _SWITCHED.items() if fields.get(switch) is False)
    fields = {**fields, **{name: None for names in off for name in names}}
    family = str(fields.get("model_type") or "")
    if not is_known(family):
        return fields
    return {
        name: value
        for name, value in fields.items()
        if family in _READERS.get(name, {family})
        and family not in _IGNORED.get(name, ())
    }
