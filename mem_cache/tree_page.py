"""The tree view as one page of HTML that needs nothing but a browser."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from typing import Final

from .tree_picture import (
    CachePicture,
    HiddenNodes,
    NamespacePicture,
    NodePicture,
    RequestPicture,
    count,
)

_STYLE: Final = """\
:root {
  --ground: #fff; --panel: #f6f7f9; --line: #e2e6eb; --ink: #1b2430; --soft: #647184;
  --free: #d3d9e0; --evictable: #3b82c4; --protected: #cf8f12; --held: #9259c2;
  --stale: #c2403a; --recent: #bcd9f2;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #12161c; --panel: #1a2028; --line: #2c3541; --ink: #dfe6ee;
    --soft: #94a2b3; --free: #3d4755; --evictable: #5aa0e0; --protected: #e2ac45;
    --held: #b88ae0; --stale: #ee7a70; --recent: #2c4d70;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 78rem; padding: 2rem 1.25rem 4rem;
  background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
}
h1 { font-size: 1.5rem; margin: 0; }
h2 { font-size: 1.05rem; margin: 2.25rem 0 .6rem; }
small, p { color: var(--soft); font-size: .9rem; font-weight: normal; margin: 0; }
code { font: .92em/1.5 ui-monospace, Menlo, Consolas, monospace; }
.law { display: flex; gap: 2px; height: 1.3rem; margin: 1.25rem 0 .6rem; }
.law span { flex: var(--size) 0 0; border-radius: 3px; background: var(--colour); }
ul { display: flex; flex-wrap: wrap; gap: .3rem 1.8rem; margin: 0; padding: 0; }
li { list-style: none; }
li::before {
  content: ""; display: inline-block; width: .7rem; height: .7rem;
  margin-right: .5rem; border-radius: 2px; background: var(--colour);
}
.free { --colour: var(--free); }
.evictable { --colour: var(--evictable); }
.protected { --colour: var(--protected); }
.held { --colour: var(--held); }
.stale { --colour: var(--stale); }
.sheet { overflow-x: auto; border: 1px solid var(--line); border-radius: 8px; }
table { border-collapse: collapse; width: 100%; }
th {
  background: var(--panel); color: var(--soft); font-size: .8rem; font-weight: 600;
  text-align: left;
}
th, td { padding: .3rem .75rem; white-space: nowrap; }
td { border-top: 1px solid var(--line); font-variant-numeric: tabular-nums; }
.chained td { border-top-color: transparent; }
.number { text-align: right; }
.tokens {
  width: 60%; padding-left: calc(.75rem + var(--depth) * 1.5rem);
  background: repeating-linear-gradient(
    90deg, transparent 0 calc(1.5rem - 1px), var(--line) 0 1.5rem
  ) no-repeat 0 0 / calc(var(--depth) * 1.5rem) 100%;
}
.tokens code { border-left: 3px solid var(--colour); padding-left: .6rem; }
.bar {
  display: block; width: 6rem; height: .45rem; border-radius: 2px;
  background: linear-gradient(90deg, var(--colour) var(--share), var(--line) 0);
}
.recency { background: color-mix(in srgb, var(--recent) var(--share), transparent); }
.tag {
  display: inline-block; padding: 0 .5rem; margin-left: .5rem; border-radius: 9px;
  color: var(--colour); border: 1px solid; font-size: .8rem; font-weight: normal;
}
.hidden td { color: var(--soft); font-style: italic; }
"""

_HEAD: Final = f"""\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>Prefix cache</title>
<style>
{_STYLE}</style>
</head>
<body>
"""

_NODE_COLUMNS: Final = (
    ("Tokens", "The first of them; the colour tells evictable from protected", ""),
    ("Positions", "Where they are in the sequence", "number"),
    ("Size", "In tokens, as a share of the largest node shown", ""),
    ("Pages", "Whole pages", "number"),
    ("Locks", "Leases on the node, plus its protected children", "number"),
    ("Last use", "Logical time of the last release", "number"),
    ("Hits", "Admissions that used the node", "number"),
    ("Priority", "Highest of those who published through it", "number"),
    ("Requests", "Running requests whose prefix passes here", "number"),
)

_REQUEST_COLUMNS: Final = (
    ("Row", "In the request table", "number"),
    ("Namespace", "What separates its prefix from others'", ""),
    ("Protected", "Positions in pages of the tree", "number"),
    ("Committed", "Positions with computed K and V", "number"),
    ("Allocated", "Positions with a slot", "number"),
    ("Priority", "Raises what it publishes", "number"),
)


def tree_page(picture: CachePicture) -> str:
    """Return the page; whatever comes from outside is escaped.

    Args:
        picture: What to show.
    """
    return f"{_HEAD}{chr(10).join(_body(picture))}\n</body>\n</html>\n"


def _body(picture: CachePicture) -> Iterator[str]:
    yield "<h1>Prefix cache</h1>"
    yield f"<p>{picture.total_size:,} tokens in pages of {picture.page_size}</p>"
    yield from _law(picture)
    if not picture.namespaces:
        yield "<h2>Nothing is cached</h2>"
    scale = _Scale(picture)
    for namespace in picture.namespaces:
        yield from _namespace(namespace, scale)
    if picture.requests:
        yield "<h2>Running requests</h2>"
        rows = [_request_row(request) for request in picture.requests]
        if picture.num_hidden_requests:
            rows.append(_more_row(f"and {picture.num_hidden_requests:,} more"))
        yield from _sheet(_REQUEST_COLUMNS, rows)


def _law(picture: CachePicture) -> Iterator[str]:
    parts = {
        "free": picture.available_size,
        "evictable": picture.evictable_size,
        "protected": picture.protected_size,
        "held": picture.held_size,
    }
    shares = {name: size / picture.total_size for name, size in parts.items()}
    yield '<div class="law">'
    for name, size in parts.items():
        if size:
            yield f'<span class="{name}" style="--size: {size}"></span>'
    yield "</div>\n<ul>"
    for name, size in parts.items():
        yield f'<li class="{name}">{name} <b>{size:,}</b> ({shares[name]:.0%})</li>'
    yield "</ul>"


class _Scale:
    """What a full bar stands for: the most of all nodes that are shown."""

    def __init__(self, picture: CachePicture) -> None:
        self.size = 1
        self.last_use = 1
        for namespace in picture.namespaces:
            for node in namespace.nodes:
                if isinstance(node, NodePicture):
                    self.size = max(self.size, node.stop - node.start)
                    self.last_use = max(self.last_use, node.last_use)


def _namespace(namespace: NamespacePicture, scale: _Scale) -> Iterator[str]:
    stale = _tag("stale", "stale: goes first") if namespace.is_stale else ""
    yield (
        f"<h2>Namespace <code>{escape(namespace.name)}</code> "
        f"<small>{count(namespace.num_nodes, 'node')}, {namespace.size:,} tokens"
        "</small>"
        f"{stale}</h2>"
    )
    if namespace.nodes:
        rows = [_node_row(node, scale) for node in namespace.nodes]
        yield from _sheet(_NODE_COLUMNS, rows)


def _sheet(columns: tuple[tuple[str, str, str], ...], rows: list[str]) -> Iterator[str]:
    yield '<div class="sheet"><table>\n<thead><tr>'
    for name, meaning, kind in columns:
        yield f'<th class="{kind}" title="{escape(meaning)}">{name}</th>'
    yield "</tr></thead>\n<tbody>"
    yield from rows
    yield "</tbody>\n</table></div>"


def _node_row(node: NodePicture | HiddenNodes, scale: _Scale) -> str:
    depth = f'style="--depth: {node.depth - 1}"'
    if isinstance(node, HiddenNodes):
        return _more_row(node.text, depth)
    tags = [_tag("held", f"row {row}") for row in node.leased_by[:8]]
    if len(node.leased_by) > len(tags):
        tags.append(_tag("held", f"{len(node.leased_by) - len(tags):,} more"))
    if node.is_next:
        tags.append(_tag("stale", "goes next"))
    share = (node.stop - node.start) / scale.size
    state = "protected" if node.lock_ref else "evictable"
    chained = " chained" if node.is_chained else ""
    cells = [
        f'<td class="tokens" {depth}><code>{escape(node.text)}</code>',
        *tags,
        "</td>",
        _number(f"{node.start:,}..{node.stop:,}"),
        f'<td><span class="bar" style="--share: {share:.0%}"></span></td>',
        _number(node.num_pages),
        _number(node.lock_ref or ""),
        _recency(node, scale),
        _number(node.num_hits or ""),
        _number(node.priority or ""),
        _number(node.num_users or ""),
    ]
    return f'<tr class="{state}{chained}">{"".join(cells)}</tr>'


def _request_row(request: RequestPicture) -> str:
    cells = [
        _number(request.row),
        f"<td><code>{escape(request.namespace)}</code></td>",
        _number(request.protected_len),
        _number(request.committed_len),
        _number(request.allocated_len),
        _number(request.priority),
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _more_row(text: str, depth: str = 'style="--depth: 0"') -> str:
    return f'<tr class="hidden"><td class="tokens" colspan="9" {depth}>{text}</td></tr>'


def _number(value: int | str) -> str:
    text = f"{value:,}" if isinstance(value, int) else value
    return f'<td class="number">{text}</td>'


def _recency(node: NodePicture, scale: _Scale) -> str:
    if node.lock_ref:
        return _number("in use")
    share = f"--share: {node.last_use / scale.last_use:.0%}"
    return f'<td class="number recency" style="{share}">{node.last_use:,}</td>'


def _tag(kind: str, text: str) -> str:
    return f'<span class="tag {kind}">{escape(text)}</span>'
