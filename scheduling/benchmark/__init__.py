"""Benchmarks that run a real batch on a real model.

All but `BenchConfig` import torch when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .config import BenchConfig

if TYPE_CHECKING:
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
    "PromptSet",
    "RequestMeasurement",
    "bench_one_batch",
    "load_prompts",
    "synthetic_prompts",
]

_NEED_TORCH = {
    "BatchMeasurement": "one_batch",
    "BenchResult": "one_batch",
    "PromptSet": "prompts",
    "RequestMeasurement": "one_batch",
    "bench_one_batch": "one_batch",
    "load_prompts": "prompts",
    "synthetic_prompts": "prompts",
}


def __getattr__(name: str) -> object:
    """Import what needs torch on first use."""
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_NEED_TORCH[name]}", __name__), name)
