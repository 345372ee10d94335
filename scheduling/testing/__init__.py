"""Tools for the tests of those who write scheduling policies or schedulers.

They need `hypothesis`, which comes with ``radixkv[testing]``; without it, the import is
a `MissingExtraError`. Nothing else in the library imports this package.
"""

from importlib import import_module as _import_module

from radixkv.mem_cache import MissingExtraError as _MissingExtraError

try:
    _import_module("hypothesis")  # asked for here, so that it is named
except ImportError as error:
    raise _MissingExtraError("these tools", "hypothesis", "testing") from error

from .checked_scheduler import CheckedScheduler, SchedulerOptions
from .label_runner import LabelRunner, serial_output
from .policy_checks import check_scheduling_policy
from .scheduler_machine import SchedulerMachine

__all__ = [
    "CheckedScheduler",
    "LabelRunner",
    "SchedulerMachine",
    "SchedulerOptions",
    "check_scheduling_policy",
    "serial_output",
]
