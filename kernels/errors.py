"""The errors that kernels raise too, and the base of all; they need no torch.

`radixkv.mem_cache.errors` has them as well, and draws the whole tree.
"""

from __future__ import annotations


class RadixKVError(Exception):
    """Base of all errors of this library."""


class ConfigError(RadixKVError, ValueError):
    """A size or an option is out of range."""


class BackendUnavailableError(RadixKVError, RuntimeError):
    """The backend that was asked for cannot run here."""
