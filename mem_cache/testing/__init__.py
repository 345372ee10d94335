"""Tools for the tests of those who write policies, caches or schedulers.

They need `hypothesis`, which comes with ``radixkv[testing]``; without it, the import is
a `MissingExtraError`. Nothing else in the library imports this package.
"""

from importlib import import_module as _import_module

from radixkv.mem_cache.errors import MissingExtraError as _MissingExtraError

try:
    _import_module("hypothesis")  # asked for here, so that it is named
except ImportError as error:
    raise _MissingExtraError("these tools", "hypothesis", "testing") from error

from .cache_machine import CacheMachine
from .checked_cache import CheckedCache, Live, Refusal
from .label_worker import LabelWorker
from .oracle import CachedPage, CacheOracle, ModelRequest, NoRoomError, PastEpoch
from .policy_checks import check_policy
from .strategies import prompts

__all__ = [
    "CacheMachine",
    "CacheOracle",
    "CachedPage",
    "CheckedCache",
    "LabelWorker",
    "Live",
    "ModelRequest",
    "NoRoomError",
    "PastEpoch",
    "Refusal",
    "check_policy",
    "prompts",
]
