"""Benchmarks that run a real batch on a real model."""

from .config import BenchConfig
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
