"""A runner proves itself before it works: what is wrong is refused, with the layer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from radixkv.mem_cache import ConfigError, KVPool
from radixkv.mem_cache.device_step import DeviceStep
from radixkv.mem_cache.kv_layer import KVLayer
from radixkv.scheduling.attention_backends import PagedAttention, longest_new_len
from radixkv.scheduling.models import TransformersObject, load_model
from radixkv.scheduling.transformers_runner import TransformersRunner

from .model_families import tiny_model
from .test_transformers_runner import serve


def make_runner(
    model: TransformersObject,
    *,
    page_size: int = 4,
    attention: Callable[[KVPool], PagedAttention] = PagedAttention,
    dtype: torch.dtype | None = None,
    self_check: bool = True,
) -> TransformersRunner:
    return TransformersRunner(
        model,
        num_pages=64,
        page_size=page_size,
        max_num_requests=7,
        max_context_len=64,
        attention=attention,
        dtype=dtype,
        self_check=self_check,
    )


class Wrong(PagedAttention):
    """Attends as it should, but for one layer and one kind of steps."""

    layer = ".1."
    decodes = True

    def begin_step(self, step: DeviceStep) -> None:
        self.is_wrong_step = (longest_new_len(step) == 1) == self.decodes
        super().begin_step(step)

    def attend(
        self,
        q: torch.Tensor,
        layer: KVLayer,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> torch.Tensor:
        if self.layer in layer.name and self.is_wrong_step:
            return super().attend(q, layer, scale=scale, window=1, softcap=softcap)
        return super().attend(q, layer, scale=scale, window=window, softcap=softcap)


class WrongInExtend(Wrong):
    layer = ".0."
    decodes = False


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("attention", "layer"), [(Wrong, r"layers\.1\."), (WrongInExtend, r"layers\.0\.")]
)
def test_the_first_layer_that_computes_something_else_is_named(
    attention: type[Wrong], layer: str, dtype: torch.dtype
) -> None:
    model = load_model("tiny", dtype=dtype).model

    with pytest.raises(ConfigError, match=rf"Qwen3.* but model\.{layer}self_attn is"):
        make_runner(model, attention=attention)


def test_the_check_can_be_switched_off() -> None:
    model = load_model("tiny").model

    runner = make_runner(model, attention=Wrong, self_check=False)

    assert 1 == len(serve(runner, [[1, 2, 3]], chunk=64))


def test_a_model_that_counts_positions_by_itself_is_refused() -> None:
    model = load_model("tiny").model
    embed = model.model.embed_tokens
    plain = embed.forward

    def counting(ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(ids.shape[1])
        return plain((ids + places) % embed.num_embeddings)

    embed.forward = counting

    with pytest.raises(ConfigError, match=r"no layer .* is: .* counts positions"):
        make_runner(model)


def test_a_model_that_drops_its_cache_is_refused() -> None:
    model = load_model("tiny").model
    layer = model.model.layers[1].self_attn
    plain = layer.forward
    caches = ("cache", "past_key_values")
    layer.forward = lambda *args, **kwargs: plain(
        *args, **{name: kwargs[name] for name in kwargs if name not in caches}
    )

    with pytest.raises(ConfigError, match="got Qwen3Attention with 9 positions of"):
        make_runner(model)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_all_page_sizes_pass(page_size: int) -> None:
    model = load_model("tiny").model

    assert page_size == make_runner(model, page_size=page_size).pool.page_size


@pytest.mark.parametrize("longest", [4, 5, 12, 18])
def test_a_model_that_reads_only_short_texts_is_checked_with_such(longest: int) -> None:
    model = tiny_model("gpt2", max_position_embeddings=longest, n_positions=longest)

    assert make_runner(model)


def test_a_pool_in_float8_is_checked_in_the_dtype_of_the_model() -> None:
    model = load_model("tiny").model

    runner = make_runner(model, dtype=torch.float8_e4m3fn)

    assert torch.float8_e4m3fn == runner.pool.k_buffer(0).dtype


def test_the_model_keeps_its_own_attention_until_the_first_step() -> None:
    model = load_model("tiny").model
    before = model.config._attn_implementation
    parts = [module for module in model.modules() if module._forward_hooks]

    make_runner(model)

    assert before == model.config._attn_implementation
    assert parts == [module for module in model.modules() if module._forward_hooks]


def test_a_model_keeps_its_own_attention_after_a_refusal_too() -> None:
    model = load_model("tiny").model
    before = model.config._attn_implementation

    with pytest.raises(ConfigError):
        make_runner(model, attention=Wrong)

    assert before == model.config._attn_implementation
