"""What families call the fields of a config, and what most of them call each."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final, cast

_OTHER_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        # Of two that have a value, the later counts: Zamba2 has both of these.
        "kv_channels": "head_dim",
        "attention_head_dim": "head_dim",
        "conv_kernel": "mamba_d_conv",
        "d_model": "hidden_size",
        "dim": "hidden_size",
        "expand": "mamba_expand",
        "hidden_size_per_head": "head_dim",
        "kv_n_heads": "num_key_value_heads",
        "layers_block_type": "layer_types",
        "linear_head_dim": "linear_key_head_dim",
        "linear_num_heads": "linear_num_key_heads",
        "mtp_num_hidden_layers": "num_mtp_layers",
        "mtp_num_layers": "num_mtp_layers",
        "num_mtp_modules": "num_mtp_layers",
        "num_nextn_predict_layers": "num_mtp_layers",
        "mamba_head_dim": "mamba_d_head",
        "mamba_headdim": "mamba_d_head",
        "mamba_ngroups": "mamba_n_groups",
        "mamba_num_heads": "mamba_n_heads",
        "mamba_ssm_cache_dtype": "mamba_ssm_dtype",
        "max_position_embedding": "max_position_embeddings",
        "max_seq_len": "max_position_embeddings",
        "max_sequence_length": "max_position_embeddings",
        "model_max_length": "max_position_embeddings",
        "n_embd": "hidden_size",
        "n_embed": "hidden_size",
        "n_groups": "mamba_n_groups",
        "n_head": "num_attention_heads",
        "n_head_kv": "num_key_value_heads",
        "n_heads": "num_attention_heads",
        "n_kv_heads": "num_key_value_heads",
        "n_layer": "num_hidden_layers",
        "n_layers": "num_hidden_layers",
        "n_mamba_heads": "mamba_n_heads",
        "n_positions": "max_position_embeddings",
        "num_attention_groups": "num_key_value_heads",
        "num_key_value_heads_per_layer": "num_key_value_heads",
        "num_kv_heads": "num_key_value_heads",
        "num_layers": "num_hidden_layers",
        "num_query_heads": "num_attention_heads",
        "seq_length": "max_position_embeddings",
        "ssm_state_size": "mamba_d_state",
        "state_size": "mamba_d_state",
        "torch_dtype": "dtype",
    }
)
"""What a few families call a field that most call otherwise."""


def by_usual_names(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a config by the names that most families use.

    A field that is null stays so: its family has no default for it then. Where a
    field has two names, one with a value counts, and of two values that of the usual
    name.

    Args:
        values: The fields as the config has them.

    Example:
        >>> by_usual_names({"n_layer": 2, "n_kv_heads": 4})["num_key_value_heads"]
        4
    """
    renamed = {
        usual: values[name] for name, usual in _OTHER_NAMES.items() if name in values
    }
    renamed |= {
        usual: values[name]
        for name, usual in _OTHER_NAMES.items()
        if values.get(name) is not None
    }
    renamed |= _nested_kv_heads(values)
    own = {
        name: value
        for name, value in values.items()
        if value is not None or name not in renamed
    }
    return {**renamed, **own}


def _nested_kv_heads(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the number of K/V heads where another field says whether it counts."""
    if values.get("multi_query_attention") is True:
        names = ("multi_query_group_num", "n_kv_heads")
        named = [values[name] for name in names if values.get(name) is not None]
        return {"num_key_value_heads": named[0] if named else 1}
    attention = values.get("attn_config")
    if isinstance(attention, Mapping):
        inner = cast("Mapping[str, Any]", attention)
        if inner.get("kv_n_heads") is not None:
            return {"num_key_value_heads": inner["kv_n_heads"]}
        if inner.get("attn_type") == "multiquery_attention":
            return {"num_key_value_heads": 1}
    return {}
