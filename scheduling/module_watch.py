"""Watches modules of a model while it runs: what they take, and what they give."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self, TypeAlias

import torch

from .models import TransformersObject

States: TypeAlias = dict[str, torch.Tensor]
"""By name of a module, `[num_tokens, width]`; if it is called more than once in a
forward, what it takes or gives stands side by side."""


@dataclass(slots=True, eq=False)
class ModuleWatch:
    """What passed through some modules in the last forward.

    Attributes:
        inputs: The hidden states that they took.
        outputs: What they made of them.
        forced: What they take instead; nothing, if not given.
    """

    inputs: States = field(default_factory=States)
    outputs: States = field(default_factory=States)
    forced: Mapping[str, torch.Tensor] | None = None

    @classmethod
    @contextmanager
    def over(cls, model: TransformersObject, names: Sequence[str]) -> Generator[Self]:
        """Watch for as long as the context is open.

        Args:
            model: A model.
            names: Names of its modules; each gets its hidden states as a tensor
                `[1, num_tokens, width]`, by the name `hidden_states` or first.
        """
        watch = cls()
        with ExitStack() as stack:
            for name in names:
                module = model.get_submodule(name)
                before = module.register_forward_pre_hook(
                    partial(watch.take, name), with_kwargs=True
                )
                after = module.register_forward_hook(partial(watch.give, name))
                stack.callback(before.remove)
                stack.callback(after.remove)
            yield watch

    def clear(self) -> None:
        """Forget what passed."""
        self.inputs = {}
        self.outputs = {}

    def take(
        self, name: str, module: object, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Note what a module is called with; torch calls this before the module.

        Args:
            name: Its name.
            module: The module.
            args: What it is called with.
            kwargs: The same, by name.

        Returns:
            What it is called with instead; None for the same.
        """
        is_named = "hidden_states" in kwargs
        states: torch.Tensor = kwargs["hidden_states"] if is_named else args[0]
        place = self.inputs[name].shape[1] if name in self.inputs else 0
        _put_beside(self.inputs, name, states[0])
        if self.forced is None:
            return None
        forced = self.forced[name][:, place : place + states.shape[-1]][None]
        if is_named:
            return args, {**kwargs, "hidden_states": forced}
        return (forced, *args[1:]), kwargs

    def give(self, name: str, module: object, args: object, output: Any) -> None:  # noqa: ANN401
        """Note what a module returns; torch calls this after the module.

        Args:
            name: Its name.
            module: The module.
            args: What it was called with.
            output: Hidden states, or a tuple that begins with them.
        """
        states: torch.Tensor = output if torch.is_tensor(output) else output[0]
        _put_beside(self.outputs, name, states[0])


def _put_beside(states: States, name: str, new: torch.Tensor) -> None:
    earlier = states.get(name)
    states[name] = new if earlier is None else torch.cat([earlier, new], dim=-1)
