"""Output marks: what requests generated goes before what they were asked."""

from __future__ import annotations

from typing import Final

from .errors import IntegrityError
from .radix_node import PAGE_ID_BYTES, RadixNode
from .radix_tree import RadixTree

OUTPUT_LEVEL: Final = -1
"""The level of eviction of marked nodes; all others have 0 or more."""


class OutputMarks:
    """Which nodes hold output only, that nobody has used as a prompt yet.

    All pages of a node are marked or none, and what comes before an unmarked node is
    unmarked, so that no parent must go before its child. Marks change only on nodes
    that are protected: these are in no eviction index.
    """

    def __init__(self) -> None:
        """Start without marks."""
        self._marked: set[RadixNode] = set()

    def listen(self, tree: RadixTree) -> None:
        """Follow what happens in a tree; its leaves must not grow in place."""
        tree.on_used.append(self._on_used)
        tree.on_split.append(self._on_split)
        tree.on_evicted.append(self._on_evicted)

    def level(self, node: RadixNode) -> int:
        """Return the level of eviction of a node."""
        return OUTPUT_LEVEL if node in self._marked else 0

    def see_output(self, end: RadixNode, num_new_pages: int) -> None:
        """Mark what is new of an output that was published.

        Args:
            end: The node that it ends with.
            num_new_pages: Pages at its end that the tree did not have.
        """
        while num_new_pages > 0:
            self._marked.add(end)
            num_new_pages -= len(end.pages) // PAGE_ID_BYTES
            end = end.parent

    def see_prompt(self, end: RadixNode, num_new_pages: int = 0) -> None:
        """Unmark what others had generated of a prompt.

        Args:
            end: The node that it ends with.
            num_new_pages: Pages at its end that the tree did not have.

        Complexity: O(nodes that are new or marked).
        """
        while num_new_pages > 0:
            num_new_pages -= len(end.pages) // PAGE_ID_BYTES
            end = end.parent
        while end in self._marked:
            self._marked.remove(end)
            end = end.parent

    def state(self) -> dict[str, object]:
        """Return all marks, as plain values to compare."""
        return {"output marks": set(self._marked)}

    def check_integrity(self, tree: RadixTree) -> None:
        """Check all marks. Costs O(nodes).

        Raises:
            IntegrityError: A mark is on a node that is gone, or before an unmarked one.
        """
        nodes = list(tree.nodes())
        faults = [
            f"{node!r} is prompt, but what comes before it is output"
            for node in nodes
            if node not in self._marked and node.parent in self._marked
        ]
        num_gone = len(self._marked) - sum(node in self._marked for node in nodes)
        if num_gone:
            faults.append(f"{num_gone} nodes are output, but gone")
        if faults:
            raise IntegrityError("\n".join(["the output marks are wrong:", *faults]))

    def _on_used(self, path: list[RadixNode]) -> None:
        if path:
            self.see_prompt(path[-1])

    def _on_split(self, upper: RadixNode, lower: RadixNode) -> None:
        if lower in self._marked:
            self._marked.add(upper)

    def _on_evicted(self, node: RadixNode, key: bytes, pages: bytes) -> None:
        if not node.key:
            self._marked.discard(node)
