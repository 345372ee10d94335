"""The reference batch scheduler, which talks only to a prefix cache.

`TransformersRunner`, `load_model` and their kin import torch when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from .admission_policies import ADMISSION_POLICIES, Estimate, WorstCase
from .base import (
    INVALID_TOKEN,
    AdmissionPolicy,
    Drafter,
    ModelRunner,
    PooledRunner,
    QueueView,
    RetractionPolicy,
    SchedulingPolicy,
)
from .batch import Batch, BatchEntry
from .engine import Engine, StepReport
from .limits import SchedulerLimits
from .null_runner import NullRunner
from .prefix_orders import DFSWeight, LongestPrefixMatch
from .prompt_lookup import PromptLookup
from .request import FinishReason, Request, RequestStatus
from .request_output import ErrorMessage, OutputMessage, RequestOutput
from .retraction_policies import RETRACTION_POLICIES, LeastLoss, Newest
from .sampling_params import SamplingParams
from .scheduler import Scheduler
from .scheduling_policies import (
    SCHEDULING_POLICIES,
    FirstComeFirstServed,
    HighestPriorityFirst,
    HighestResponseRatioNext,
    LongestOutputFirst,
    RandomOrder,
    ShortestPrefillFirst,
)
from .stall import Shortage, StalledRequest, StallReason
from .usage import RequestUsage

if TYPE_CHECKING:
    from .attention_backends import AttentionBackend, PagedAttention
    from .attention_modules import get_kv_cache_spec
    from .available_memory import get_available_memory
    from .cpu_threads import use_num_threads
    from .flash_attention import FlashAttention
    from .flashinfer_attention import FlashInferAttention
    from .models import LoadedModel, load_model
    from .reference import generate_reference
    from .sampler import sample
    from .transformers_runner import TransformersRunner

__all__ = [
    "ADMISSION_POLICIES",
    "INVALID_TOKEN",
    "RETRACTION_POLICIES",
    "SCHEDULING_POLICIES",
    "AdmissionPolicy",
    "AttentionBackend",
    "Batch",
    "BatchEntry",
    "DFSWeight",
    "Drafter",
    "Engine",
    "ErrorMessage",
    "Estimate",
    "FinishReason",
    "FirstComeFirstServed",
    "FlashAttention",
    "FlashInferAttention",
    "HighestPriorityFirst",
    "HighestResponseRatioNext",
    "LeastLoss",
    "LoadedModel",
    "LongestOutputFirst",
    "LongestPrefixMatch",
    "ModelRunner",
    "Newest",
    "NullRunner",
    "OutputMessage",
    "PagedAttention",
    "PooledRunner",
    "PromptLookup",
    "QueueView",
    "RandomOrder",
    "Request",
    "RequestOutput",
    "RequestStatus",
    "RequestUsage",
    "RetractionPolicy",
    "SamplingParams",
    "Scheduler",
    "SchedulerLimits",
    "SchedulingPolicy",
    "Shortage",
    "ShortestPrefillFirst",
    "StallReason",
    "StalledRequest",
    "StepReport",
    "TransformersRunner",
    "WorstCase",
    "generate_reference",
    "get_available_memory",
    "get_kv_cache_spec",
    "load_model",
    "sample",
    "use_num_threads",
]

_NEED_TORCH = {
    "AttentionBackend": "attention_backends",
    "FlashAttention": "flash_attention",
    "FlashInferAttention": "flashinfer_attention",
    "LoadedModel": "models",
    "PagedAttention": "attention_backends",
    "TransformersRunner": "transformers_runner",
    "generate_reference": "reference",
    "get_available_memory": "available_memory",
    "get_kv_cache_spec": "attention_modules",
    "load_model": "models",
    "sample": "sampler",
    "use_num_threads": "cpu_threads",
}


def __getattr__(name: str) -> object:
    """Import what needs torch on first use."""
    if name not in _NEED_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_NEED_TORCH[name]}", __name__), name)
