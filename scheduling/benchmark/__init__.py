"""Benchmarks that run a real batch on a real model.

All but `BenchConfig` import torch when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .config import BenchConfig

if TYPE_CHECKING:
    from .comparison import Comparison, compare_with_model
    from .one_batch import (
        BatchMeasurement,
        BenchResult,
        RequestMeasurement,
        bench_one_batch,
    )
    from .prompts import PromptSet, load_prompts, synthetic_prompts

__all__ = [
    "BatchMeasurement",
    "BenchConfig",
    "BenchResult",
    "Comparison",
    "PromptSet",
    "RequestMeasurement",
    "bench_one_batch",
    "compare_with_model",
    "load_prompts",
    "synthetic_prompts",
]

_NEED_TORCH = {
    "BatchMeasurement": "one_batch",
    "BenchResult": "one_batch",
    "Comparison": "comparison",
    "PromptSet": "prompts",
    "RequestMeasurement": "one_batch",
    "bench_one_batch": "one_batch",
    "compare_with_model": "comparison",
    "load_prompts": "prompts",
    "synthetic_prompts": "prompts",
}


def __getattr__(name: str) -> object:
    """Import what needs torch on first use."""
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_NEED_TORCH[name]}", __name__), name)
