"""An object that takes attributes of its users', also where it is compiled."""

from __future__ import annotations


class OpenObject:
    """Lets a test put a spy in the place of a method of one cache.

    A compiled class has no room for attributes that it does not know, unless it
    inherits from one that is not compiled, such as this.
    """
