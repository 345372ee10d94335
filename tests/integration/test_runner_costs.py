"""What a step of `TransformersRunner` costs: one upload, and no wait for the device.

The model and the pool are on torch's meta device, whose tensors have no content: what
has to read one fails. Kernels only count.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.utils._python_dispatch import TorchDispatchMode

from radixkv.scheduling.batch import Batch
from radixkv.scheduling.mask_rules import Reach
from radixkv.scheduling.request import Request
from radixkv.scheduling.transformers_runner import TransformersRunner

from .test_transformers_runner import WINDOWED, Pages, make_model

KERNELS = [
    "attention_decode",
    "attention_extend",
    "attention_indices",
    "kv_store",
    "page_table",
    "pages",
    "slot_mapping",
]
OPS = [
    "attention_decode",
    "attention_extend",
    "attention_indices",
    "kv_store",
    "page_copy",
    "page_table",
    "slot_mapping",
]
NUM_LAYERS = 2


@dataclass
class Costs:
    """What was done since the step began."""

    num_uploads: int = 0
    launches: list[str] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)


class Watch(TorchDispatchMode):
    """Fails when torch copies between the host and the device."""

    def __torch_dispatch__(
        self,
        func: Any,  # noqa: ANN401 - of torch, untyped
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        for value in (*args, *kwargs.values()):
            if isinstance(value, torch.Tensor):
                assert value.device.type == "meta", func
        assert torch.device("meta") == (kwargs.get("device") or torch.device("meta"))
        return func(*args, **kwargs)


class Launches:
    """A kernel that only counts."""

    def __init__(self, name: str, costs: Costs) -> None:
        self.name = name
        self.costs = costs

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(0 < size < 2**31 for size in grid)

        def launch(*args: object, **options: object) -> None:
            self.costs.launches.append(self.name)
            self.costs.options = options

        return launch


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch) -> Costs:
    counted = Costs()

    def upload(numbers: NDArray[np.int32], device: torch.device) -> torch.Tensor:
        counted.num_uploads += 1
        return torch.empty(len(numbers), dtype=torch.int32, device=device)

    for name in KERNELS:
        module = import_module(f"radixkv.kernels.triton.{name}")
        for kernel in [each for each in vars(module) if each.endswith("_kernel")]:
            monkeypatch.setattr(module, kernel, Launches(kernel, counted))
    for name in OPS:
        module = import_module(f"radixkv.kernels.{name}")
        monkeypatch.setattr(module, "pick_backend", lambda backend, device: "triton")
    for name in ("kernels.page_copy", "mem_cache.page_table"):
        monkeypatch.setattr(import_module(f"radixkv.{name}"), "upload", upload)
    # Nor can it be asked what its masks let it see.
    monkeypatch.setattr(
        "radixkv.scheduling.model_trial.reach_of",
        lambda rule, device: Reach(window=rule.local_size),
    )
    return counted


def make_runner(
    kind: str, options: dict[str, object], graph_sizes: Sequence[int] = ()
) -> TransformersRunner:
    with torch.device("meta"):
        model = make_model(kind, **options)
    return TransformersRunner(
        model,
        num_pages=256,
        page_size=4,
        max_num_requests=65,
        max_context_len=64,
        graph_sizes=graph_sizes,
        self_check=False,  # a model without numbers proves nothing
    )


def make_batch(lengths: list[int], computed: list[int]) -> Batch:
    """Make a batch of requests of which some tokens are computed already."""
    pages = Pages(4, 256)
    spans: list[tuple[Request, int, int]] = []
    for i, (length, start) in enumerate(zip(lengths, computed, strict=True)):
        request = Request(i, [1] * length)
        pages.rows[request], pages.pages[request], pages.num_sent[request] = (
            i + 1,
            [],
            0,
        )
        spans.append((request, start, length))
    return pages.step(*spans)


@pytest.mark.parametrize("num_reqs", [1, 2, 33])
@pytest.mark.parametrize(
    ("computed", "mapping", "attention"),
    [
        (8, "slot_mapping_decode_kernel", "attention_decode_kernel"),
        (6, "slot_mapping_decode_kernel", "attention_extend_kernel"),
        (None, "slot_mapping_extend_kernel", "attention_extend_kernel"),
    ],
    ids=["decode", "drafts", "extend"],
)
def test_a_step_is_one_upload_and_waits_for_nothing(
    costs: Costs, num_reqs: int, computed: int | None, mapping: str, attention: str
) -> None:
    runner = make_runner("Qwen3", {"num_key_value_heads": 2, "head_dim": 8})
    starts = [(i % 4 if computed is None else computed) for i in range(num_reqs)]
    batch = make_batch([9] * num_reqs, starts)
    if num_reqs == 1 and computed is None:
        mapping = "slot_mapping_decode_kernel"

    with Watch():
        logits = runner.forward(batch)

    assert (num_reqs, 64) == logits.shape
    assert 1 == costs.num_uploads
    expected = Counter({"page_table_delta_kernel": 1, mapping: 1})
    expected += {"aligned_kernel": NUM_LAYERS, attention: NUM_LAYERS}
    if attention == "attention_decode_kernel":
        expected["attention_reduce_kernel"] = NUM_LAYERS
    assert expected == Counter(costs.launches)


@pytest.mark.parametrize(
    ("kind", "options"), WINDOWED, ids=[kind for kind, _ in WINDOWED]
)
def test_windows_and_soft_caps_wait_for_nothing_either(
    costs: Costs, kind: str, options: dict[str, object]
) -> None:
    runner = make_runner(kind, options)

    with Watch():
        runner.forward(make_batch([9, 3], [2, 0]))

    assert 1 == costs.num_uploads


def test_a_padded_step_waits_for_nothing_once_it_was_captured(costs: Costs) -> None:
    options: dict[str, object] = {"num_key_value_heads": 2, "head_dim": 8}
    runner = make_runner("Qwen3", options, graph_sizes=[4])
    runner.forward(make_batch([9, 3], [8, 2]))
    costs.num_uploads = 0
    costs.launches.clear()

    with Watch():
        logits = runner.forward(make_batch([9, 3, 5], [8, 2, 4]))

    assert (3, 64) == logits.shape
    assert 1 == costs.num_uploads
    assert NUM_LAYERS == Counter(costs.launches)["attention_decode_kernel"]


@pytest.mark.parametrize(("num_new", "block"), [(3, 16), (40, 64)])
def test_few_tokens_a_request_take_small_programs(
    costs: Costs, num_new: int, block: int
) -> None:
    runner = make_runner("Qwen3", {"num_key_value_heads": 2, "head_dim": 8})

    runner.forward(make_batch([40, 40], [40 - num_new] * 2))

    assert "attention_extend_kernel" == costs.launches[-1]
    assert block == costs.options["BLOCK_M"]


def test_page_copies_are_one_upload_and_one_launch_more(costs: Costs) -> None:
    runner = make_runner("Qwen3", {"num_key_value_heads": 2, "head_dim": 8})
    batch = make_batch([9, 3], [2, 0])
    with_copies = Batch(
        batch.entries, batch.kv_cache_info.with_copies({100: 101}), batch.cache
    )

    with Watch():
        runner.forward(with_copies)

    assert 2 == costs.num_uploads
    assert "copy_pages_kernel" == costs.launches[0]


@pytest.mark.parametrize(
    "wait",
    [
        lambda x: x.item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: bool(x),
        lambda x: x.nonzero(),
        lambda x: torch.tensor([0], device="meta") + torch.tensor([0]),
    ],
)
def test_these_tests_notice_who_waits(wait: Callable[[torch.Tensor], object]) -> None:
    content = torch.zeros(1, device="meta")

    with pytest.raises((RuntimeError, NotImplementedError, AssertionError)), Watch():
        wait(content)
