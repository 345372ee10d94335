"""The tree view: what is cached and who uses it, for eyes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from rich.text import Text
from rich.tree import Tree

from .prefix_cache import PrefixCache
from .sizes import as_size
from .tree_page import tree_page
from .tree_picture import (
    Decode,
    HiddenNodes,
    NamespacePicture,
    NodePicture,
    RequestPicture,
    count,
    take_picture,
)

MAX_NUM_NODES: Final = 200
"""Nodes of a view that was not told another bound."""

_MAX_NUM_ROWS_NAMED: Final = 6


class TreeView:
    """A picture of what a cache holds: for the terminal, for Graphviz, for a browser.

    It shows the namespaces, below them their nodes with tokens, size, locks, recency,
    hits and priority, and the running requests with what they lease. A node that is its
    parent's only child stands right below it, so that depth follows branching.

    The picture is of the moment when it was made. Making it changes nothing, but only
    the thread that owns the cache may; any thread may show it.

    Example:
        >>> from rich.console import Console
        >>> from radixkv.mem_cache import MemoryManager, RadixCache, TreeView
        >>> memory = MemoryManager(8, 2, max_num_requests=2, max_context_len=32)
        >>> cache = RadixCache(memory)
        >>> request = cache.admit([7, 8, 9])
        >>> info = cache.alloc_for_extend([request], [3])
        >>> cache.commit(request, 3)
        >>> cache.cache_unfinished_req(request, [7, 8, 9])
        >>> Console(width=88).print(TreeView(cache).rich())
        16 tokens in pages of 2: 12 free, 0 evictable, 2 protected, 2 held
        ├── namespace None  1 node, 2 tokens
        │   └── 7 8  0..2  1 page, lock 1  ← row 1
        └── running requests
            └── row 1 in None  protected 2, committed 3, allocated 3, priority 0
    """

    def __init__(
        self,
        cache: PrefixCache,
        *,
        max_num_nodes: int = MAX_NUM_NODES,
        decode: Decode | None = None,
    ) -> None:
        """Take the picture. Costs O(nodes).

        Args:
            cache: What to look at.
            max_num_nodes: Nodes to show, at least 1. Those near the roots come first;
                how many are missing, and where, is said. So for requests.
            decode: Turns token ids into text, as the `decode` of a tokenizer; ``None``
                shows the ids.

        Raises:
            ConfigError: `max_num_nodes` is out of range.
            WrongThreadError: Another thread owns the cache.
        """
        max_num_nodes = as_size("max_num_nodes", max_num_nodes)
        self._picture = take_picture(cache, max_num_nodes, decode)

    def rich(self) -> Tree:
        """Return a tree that rich prints."""
        picture = self._picture
        tree = Tree(
            Text.assemble(
                (f"{picture.total_size:,} tokens", "bold"),
                f" in pages of {picture.page_size}: ",
                (f"{picture.available_size:,} free", "dim"),
                ", ",
                (f"{picture.evictable_size:,} evictable", "cyan"),
                ", ",
                (f"{picture.protected_size:,} protected", "yellow"),
                ", ",
                (f"{picture.held_size:,} held", "magenta"),
            ),
            guide_style="dim",
        )
        for namespace in picture.namespaces:
            _add_namespace(tree, namespace)
        if picture.requests:
            branch = tree.add(Text("running requests", "bold"))
            for request in picture.requests:
                branch.add(_request_text(request))
            if picture.num_hidden_requests:
                more = f"and {picture.num_hidden_requests:,} more"
                branch.add(Text(more, "dim italic"))
        return tree

    def dot(self) -> str:
        """Return a graph in the DOT language of Graphviz."""
        return "\n".join([*_dot_lines(self._picture.namespaces), ""])

    def html(self) -> str:
        """Return a page that needs nothing but a browser, light or dark."""
        return tree_page(self._picture)


# The terminal -----------------------------------------------------------------


def _add_namespace(tree: Tree, namespace: NamespacePicture) -> None:
    label = Text.assemble(
        ("namespace ", "bold"),
        (namespace.name, "bold green"),
        f"  {count(namespace.num_nodes, 'node')}, {namespace.size:,} tokens",
    )
    if namespace.is_stale:
        label.append("  stale: matches nobody, goes first", "bold red")
    branches = [tree.add(label)]
    for node in namespace.nodes:
        if isinstance(node, HiddenNodes):
            text = Text(node.text, "dim italic")
        else:
            text = _node_text(node)
        if node.is_chained:
            # One more line of the same label; rich draws the guides beside it.
            above = branches[node.depth].label
            assert isinstance(above, Text)  # it was made here
            above.append("\n").append(text)
        else:
            del branches[node.depth :]
            branches.append(branches[-1].add(text))


def _node_text(node: NodePicture) -> Text:
    text = Text(node.text, "yellow" if node.lock_ref else "cyan")
    text.append(f"  {node.start:,}..{node.stop:,}", "bold")
    text.append(f"  {', '.join(_facts(node))}", "not bold")
    if node.leased_by:
        text.append(f"  ← {_rows_text(node.leased_by)}", "magenta")
    if node.is_next:
        text.append("  goes next", "red")
    return text


def _facts(node: NodePicture) -> Iterator[str]:
    """Say what is known of a node; not what is 0."""
    yield count(node.num_pages, "page")
    if node.lock_ref:
        yield f"lock {node.lock_ref}"
    else:
        yield f"last use {node.last_use:,}"
    if node.num_hits:
        yield count(node.num_hits, "hit")
    if node.priority:
        yield f"priority {node.priority}"


def _request_text(request: RequestPicture) -> Text:
    return Text.assemble(
        (f"row {request.row}", "magenta"),
        " in ",
        (request.namespace, "green"),
        f"  protected {request.protected_len:,}, committed {request.committed_len:,}, "
        f"allocated {request.allocated_len:,}, priority {request.priority}",
    )


def _rows_text(rows: tuple[int, ...]) -> str:
    named = ", ".join(map(str, rows[:_MAX_NUM_ROWS_NAMED]))
    rest = len(rows) - _MAX_NUM_ROWS_NAMED
    more = f" and {rest:,} more" if rest > 0 else ""
    return f"row{'s' if len(rows) > 1 else ''} {named}{more}"


# Graphviz ---------------------------------------------------------------------

_DOT_STYLES: Final = {
    "namespace": 'shape=folder, fillcolor="#e4e7eb"',
    "stale": 'shape=folder, fillcolor="#f6d5d5"',
    "evictable": 'shape=box, fillcolor="#d6e9f8"',
    "protected": 'shape=box, fillcolor="#fbe3b3"',
    "request": 'shape=oval, fillcolor="#ead9f5"',
    "hidden": 'shape=plaintext, fillcolor="#ffffff"',
}


def _dot_lines(namespaces: tuple[NamespacePicture, ...]) -> Iterator[str]:
    yield "digraph cache {"
    yield '  graph [rankdir=LR]; node [fontname="sans-serif", style=filled];'
    number = 0
    for namespace in namespaces:
        kind = "stale" if namespace.is_stale else "namespace"
        size = f"{count(namespace.num_nodes, 'node')}, {namespace.size:,} tokens"
        stale = "\nstale: goes first" if namespace.is_stale else ""
        yield _dot_node(f"n{number}", kind, f"{namespace.name}\n{size}{stale}")
        # The last node of each depth: what comes next hangs on it.
        path = [f"n{number}"]
        for node in namespace.nodes:
            number += 1
            parent = path[node.depth if node.is_chained else node.depth - 1]
            del path[node.depth :]
            path.append(f"n{number}")
            yield from _dot_child(node, f"n{number}", parent)
        number += 1
    yield "}"


def _dot_child(
    node: NodePicture | HiddenNodes, name: str, parent: str
) -> Iterator[str]:
    if isinstance(node, HiddenNodes):
        yield _dot_node(name, "hidden", node.text)
    else:
        where = f"{node.start:,}..{node.stop:,}"
        goes_next = ["goes next"] if node.is_next else []
        facts = ", ".join([*_facts(node), *goes_next])
        kind = "protected" if node.lock_ref else "evictable"
        yield _dot_node(name, kind, f"{node.text}\n{where}\n{facts}")
        for row in node.leased_by:
            yield _dot_node(f"r{row}", "request", f"row {row}")
            yield f"  r{row} -> {name} [style=dashed];"
    yield f"  {parent} -> {name};"


def _dot_node(name: str, kind: str, label: str) -> str:
    escaped = label.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'  {name} [label="{escaped}", {_DOT_STYLES[kind]}];'
