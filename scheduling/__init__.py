"""The reference batch scheduler, which talks only to a prefix cache.

`TransformersRunner`, `load_model` and their kin import torch when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .base import ModelRunner
from .batch import Batch, BatchEntry
from .engine import Engine, StepReport
from .limits import SchedulerLimits
from .null_runner import NullRunner
from .request import FinishReason, Request, RequestStatus
from .sampling_params import SamplingParams
from .scheduler import RequestOutput, Scheduler

if TYPE_CHECKING:
    from .models import LoadedModel, load_model
    from .reference import generate_reference
    from .sampler import sample
    from .transformers_runner import TransformersRunner

__all__ = [
    "Batch",
    "BatchEntry",
    "Engine",
    "FinishReason",
    "LoadedModel",
    "ModelRunner",
    "NullRunner",
    "Request",
    "RequestOutput",
    "RequestStatus",
    "SamplingParams",
    "Scheduler",
    "SchedulerLimits",
    "StepReport",
    "TransformersRunner",
    "generate_reference",
    "load_model",
    "sample",
]

_NEED_TORCH = {
    "LoadedModel": "models",
    "TransformersRunner": "transformers_runner",
    "generate_reference": "reference",
    "load_model": "models",
    "sample": "sampler",
}


def __getattr__(name: str) -> object:
    """Import what needs torch on first use."""
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_NEED_TORCH[name]}", __name__), name)
