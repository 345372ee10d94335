"""Proves on a few short requests that a model computes in pages what it does alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import Final

import numpy as np
import torch

from radixkv.mem_cache import KVCacheInfo, KVPool, PageTable
from radixkv.mem_cache.errors import ConfigError
from radixkv.mem_cache.sizes import num_pages_for

from .attention_backends import AttentionFactory
from .model_call import attention_kept
from .model_trial import ModelTrial
from .models import TransformersObject
from .module_watch import ModuleWatch, States
from .paged_model import PagedModel
from .runner_plan import lay_out

_TOLERANCES: Final = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.1}
"""What rounding may do to the output of one layer, as a part of how far it spreads."""

_LOGITS_TOLERANCES: Final = {torch.float32: 1e-3}
_HALF_TOLERANCE: Final = 0.7
"""What rounding may do to most logits, as a part of their standard deviation.

In half precision it adds up, layer by layer, and lets routers choose other experts.
What has nothing to do with the text is off by 1.4.
"""


def check_model(
    model: TransformersObject,
    trial: ModelTrial,
    attention: AttentionFactory,
    *,
    page_size: int,
    dtype: torch.dtype,
) -> None:
    """Compare a paged model with the model's own forward: logits, and layer by layer.

    Three requests run in a small pool of their own: two side by side, one of them in
    chunks, a third that begins on pages of the second, and a decode of all. Once more,
    each layer that attends is given what it was given in the model's own forward, so
    that only its own rounding counts. What begins late, such as a window of thousands
    of tokens, this does not see.

    Args:
        model: A transformers causal language model, in evaluation mode.
        trial: What it was seen to do.
        attention: Makes what attends.
        page_size: Slots a page.
        dtype: Dtype of K and V. Float8 is left out: its scales are to be set yet.

    Raises:
        ConfigError: They differ by more than rounding. It names the first layer that
            does.
    """
    if dtype not in _TOLERANCES:
        dtype = model.dtype
    dtypes = dtype, model.dtype
    texts = _texts(model, page_size)
    paged = _small(model, trial, attention, page_size, dtype, texts)
    with attention_kept(model), ModuleWatch.over(model, trial.modules) as watch:
        model.set_attn_implementation("eager")
        alone = [_alone(model, tokens, watch) for tokens in texts.tokens]
        free = _in_pages(paged, texts, watch)
        forced = _in_pages(paged, texts, watch, [each.inputs for each in alone])
    # Who begins with a hit has nothing before it.
    tolerance = max(_TOLERANCES.get(each, 0.0) for each in dtypes)
    for name in trial.modules:
        error = max(
            _worst_error(
                own.outputs[name][-len(got.outputs[name]) :], got.outputs[name]
            )
            for own, got in zip(alone, forced, strict=True)
        )
        if not error <= tolerance:
            raise _refusal(model, f"{name} is off by {error:.2g}, allowed {tolerance}")
    tolerance = max(_LOGITS_TOLERANCES.get(each, _HALF_TOLERANCE) for each in dtypes)
    error = max(
        _typical_error(own.logits[-len(got.logits) :], got.logits)
        for own, got in zip(alone, free, strict=True)
    )
    if not error <= tolerance:
        raise _refusal(
            model,
            f"logits are off by {error:.2g}, allowed {tolerance}, though no layer of "
            f"{list(trial.modules)} is: what lies between them mixes requests, or "
            "counts positions by itself",
        )


def _refusal(model: TransformersObject, what: str) -> ConfigError:
    return ConfigError(
        f"TransformersRunner must compute what {type(model).__name__} does alone, but "
        f"{what} (self_check=False runs it all the same)"
    )


@dataclass(frozen=True, slots=True)
class _Result:
    """What came out of a request.

    Attributes:
        inputs: What each watched layer took.
        outputs: What each made of it.
        logits: `[num_tokens, vocab_size]`.
    """

    inputs: States
    outputs: States
    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Texts:
    """What the check computes.

    Attributes:
        tokens: Of each request.
        pages: Of each request; the last has some in common with the one before.
        steps: Lists of ``(request, start, stop)``.
    """

    tokens: list[list[int]]
    pages: list[list[int]]
    steps: list[list[tuple[int, int, int]]]


def _texts(model: TransformersObject, page_size: int) -> _Texts:
    """Make two texts, and a third that continues the first pages of the second."""
    config = model.config.get_text_config()
    bound = getattr(config, "max_position_embeddings", None) or 2**31
    c = max(min(max(page_size, 16) + 3, bound), 3)
    a, b = min(11, c), max(c - 2, 3)
    num_shared = (b - 1) // page_size
    hit = num_shared * page_size
    rng = np.random.default_rng(0)
    first, second, third = (
        rng.integers(0, config.vocab_size, length).tolist() for length in (a, b, c)
    )
    steps = [
        [(0, 0, a - 2), (1, 0, b // 2)],
        [(0, a - 2, a - 1), (1, b // 2, b - 1)],
        [(2, hit, c - 1)],
        [(0, a - 1, a), (1, b - 1, b), (2, c - 1, c)],
    ]
    num_a, num_b, num_c = (num_pages_for(each, page_size) for each in (a, b, c))
    # Backwards, so that no page is where its place in the text would have it.
    pages = list(range(num_a + num_b + num_c - num_shared, 0, -1))
    of_second = pages[num_a : num_a + num_b]
    return _Texts(
        tokens=[first, second, second[:hit] + third[hit:]],
        pages=[
            pages[:num_a],
            of_second,
            of_second[:num_shared] + pages[num_a + num_b :],
        ],
        steps=[
            [(request, start, stop) for request, start, stop in step if start < stop]
            for step in steps
        ],
    )


def _small(
    model: TransformersObject,
    trial: ModelTrial,
    attention: AttentionFactory,
    page_size: int,
    dtype: torch.dtype,
    texts: _Texts,
) -> PagedModel:
    """Make a paged model with as many pages as the texts need."""
    num_pages = max(map(max, texts.pages))
    config = lay_out(trial, num_pages, page_size, dtype)
    pool = KVPool(config, device=model.device)
    table = PageTable(
        max_num_requests=len(texts.pages),
        max_pages_per_request=num_pages,
        device=model.device,
    )
    return PagedModel(
        model, trial, pool=pool, page_table=table, attention=attention(pool)
    )


def _in_pages(
    paged: PagedModel,
    texts: _Texts,
    watch: ModuleWatch,
    forced: Sequence[States] | None = None,
) -> list[_Result]:
    """Compute all steps in pages; returns what came out, by request."""
    parts: list[list[_Result]] = [[] for _ in texts.tokens]
    for step in filter(None, texts.steps):
        if forced is not None:
            watch.forced = {
                name: torch.cat([forced[i][name][a:b] for i, a, b in step])
                for name in forced[0]
            }
        tokens = [texts.tokens[i][a:b] for i, a, b in step]
        positions = [range(a, b) for _, a, b in step]
        logits = paged.forward(
            _message(texts, step),
            np.array([*chain(*tokens)], np.int32),
            np.array([*chain(*positions)], np.int32),
            np.arange(sum(map(len, tokens))),
        )
        end = 0
        for (request, _, _), each in zip(step, tokens, strict=True):
            begin, end = end, end + len(each)
            parts[request].append(
                _Result(
                    {name: x[begin:end] for name, x in watch.inputs.items()},
                    {name: x[begin:end] for name, x in watch.outputs.items()},
                    logits[begin:end],
                )
            )
        watch.clear()
    watch.forced = None
    return [_joined(each) for each in parts]


def _message(texts: _Texts, step: Sequence[tuple[int, int, int]]) -> KVCacheInfo:
    """Write the message of a step; it lists all pages of its requests again."""
    pages = [texts.pages[request] for request, _, _ in step]
    return KVCacheInfo.pack(
        rows=[request + 1 for request, _, _ in step],
        starts=[start for _, start, _ in step],
        stops=[stop for _, _, stop in step],
        page_starts=[0] * len(step),
        page_indptr=[0, *accumulate(map(len, pages))],
        new_pages=np.array([*chain(*pages)], np.int32).tobytes(),
    )


def _joined(parts: Sequence[_Result]) -> _Result:
    """Put the steps of a request one behind the other."""
    first = parts[0]
    return _Result(
        {
            name: torch.cat([part.inputs[name] for part in parts])
            for name in first.inputs
        },
        {
            name: torch.cat([part.outputs[name] for part in parts])
            for name in first.outputs
        },
        torch.cat([part.logits for part in parts]),
    )


def _alone(
    model: TransformersObject, tokens: Sequence[int], watch: ModuleWatch
) -> _Result:
    """Compute a text as the model does by itself; returns what came out."""
    ids = torch.tensor([tokens], device=model.device)
    with torch.inference_mode():
        logits = model(input_ids=ids, use_cache=False).logits[0]
    result = _Result(watch.inputs, watch.outputs, logits)
    watch.clear()
    return result


def _worst_error(expected: torch.Tensor, got: torch.Tensor) -> float:
    """Return the largest error, as a part of how far what is expected spreads."""
    expected, got = expected.float(), got.float()
    spread = (expected - expected.mean()).abs().max()
    return float((expected - got).abs().max() / spread)


def _typical_error(expected: torch.Tensor, got: torch.Tensor) -> float:
    """Return the error of the median token, as a part of the standard deviation."""
    expected, got = expected.float(), got.float()
    errors = (expected - got).square().mean(-1).sqrt()
    return float(errors.median() / expected.std())
