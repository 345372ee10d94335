"""The tree view: the terminal, Graphviz and the browser show what is there."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from radixkv.mem_cache import ChunkCache, ConfigError, PrefixCache, TreeView
from radixkv.mem_cache.tree_picture import (
    CachePicture,
    HiddenNodes,
    NodePicture,
    take_picture,
)

from .driver import admit, compute, insert, make_cache, make_memory, run, span

ODD_NAME = "</td><script>alert('\"\\\n&amp;\u202e')</script>[bold]"


def shown(cache: PrefixCache, **options: int) -> str:
    """What the terminal shows, without colours."""
    file = StringIO()
    view = TreeView(cache, **options)  # type: ignore[arg-type]
    Console(file=file, width=200).print(view.rich())
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines())


def make_busy_cache() -> PrefixCache:
    """Two branches of one prompt, a tenant, and three requests."""
    cache = make_cache(32, 4)
    insert(cache, [*span(1, 8), *span(20, 31)])
    insert(cache, [*span(1, 8), *span(40, 43)], priority=3)
    insert(cache, span(1, 8), namespace="tenant")
    request = run(cache, [*span(1, 8), *span(40, 49)])
    cache.cache_unfinished_req(request, [*span(1, 8), *span(40, 49)])
    run(cache, [*span(1, 8), *span(40, 43), 99])
    admit(cache, [7], namespace="tenant")
    return cache


# The terminal -----------------------------------------------------------------


def test_the_terminal_shows_who_has_what() -> None:
    cache = make_busy_cache()

    assert shown(cache).splitlines() == [
        "128 tokens in pages of 4: 84 free, 20 evictable, 16 protected, 8 held",
        "├── namespace None  4 nodes, 28 tokens",
        "│   └── 1 2 3 4 5 6 …  0..8  2 pages, lock 1, 3 hits, priority 3",
        "│       ├── 20 21 22 23 24 25 …  8..20  3 pages, last use 2  goes next",
        "│       └── 40 41 42 43  8..12  1 page, lock 2, 2 hits, priority 3  ← row 2",
        "│           44 45 46 47  12..16  1 page, lock 1, 1 hit, priority 3  ← row 1",
        "├── namespace 'tenant'  1 node, 8 tokens",
        "│   └── 1 2 3 4 5 6 …  0..8  2 pages, last use 7",
        "└── running requests",
        "    ├── row 1 in None  protected 16, committed 18, allocated 18, priority 0",
        "    ├── row 2 in None  protected 12, committed 13, allocated 13, priority 0",
        "    └── row 3 in 'tenant'  protected 0, committed 0, allocated 0, priority 0",
    ]


def test_an_empty_cache_shows_its_sizes() -> None:
    cache = make_cache()

    assert shown(cache) == (
        "64 tokens in pages of 4: 64 free, 0 evictable, 0 protected, 0 held"
    )
    assert "Nothing is cached" in TreeView(cache).html()


def test_what_is_stale_is_marked() -> None:
    cache = make_cache()
    insert(cache, span(1, 8), namespace="a")
    cache.bump_epoch("a")
    view = TreeView(cache)

    assert "namespace 'a'  1 node, 8 tokens  stale: matches nobody" in shown(cache)
    assert "stale: goes first" in view.html()
    assert "stale: goes first" in view.dot()


def test_a_cache_without_a_tree_shows_its_requests() -> None:
    cache = ChunkCache(make_memory())
    run(cache, span(1, 5))

    assert shown(cache).splitlines() == [
        "64 tokens in pages of 4: 56 free, 0 evictable, 0 protected, 8 held",
        "└── running requests",
        "    └── row 1 in None  protected 0, committed 5, allocated 5, priority 0",
    ]


def test_many_requests_on_one_node_are_counted() -> None:
    cache = make_cache(max_num_requests=12)
    insert(cache, span(1, 4))
    for _ in range(9):
        admit(cache, span(1, 5))
    view = TreeView(cache, max_num_nodes=5)
    text = shown(cache, max_num_nodes=5)

    assert "lock 9, 9 hits  ← rows 1, 2, 3, 4, 5, 6 and 3 more" in text
    assert text.splitlines()[-1] == "    └── and 4 more"
    assert "and 4 more" in view.html()
    assert ">1 more</span>" in view.html()


def test_text_stands_for_tokens_if_somebody_decodes_them() -> None:
    cache = make_cache()
    insert(cache, [ord(letter) for letter in "one\ntwo\tthree"])
    view = TreeView(cache, decode=lambda ids: "".join(map(chr, ids)))
    file = StringIO()
    Console(file=file, width=200).print(view.rich())

    assert "one\\ntwo\\tthre  0..12" in file.getvalue()


def test_long_text_is_cut() -> None:
    cache = make_cache(page_size=16)
    insert(cache, span(1, 32))
    long = TreeView(cache, decode=lambda ids: "x" * 99)
    short = TreeView(cache, decode=lambda ids: str(len(ids)))

    assert f">{'x' * 60}…<" in long.html()
    assert ">24…<" in short.html()


# Bounds -----------------------------------------------------------------------


def test_the_bound_must_be_positive() -> None:
    with pytest.raises(ConfigError, match="max_num_nodes must be >= 1"):
        TreeView(make_cache(), max_num_nodes=0)


def test_what_is_not_shown_is_told_where_it_is_missing() -> None:
    cache = make_busy_cache()

    assert shown(cache, max_num_nodes=3).splitlines()[1:6] == [
        "├── namespace None  4 nodes, 28 tokens",
        "│   └── 1 2 3 4 5 6 …  0..8  2 pages, lock 1, 3 hits, priority 3",
        "│       ├── 20 21 22 23 24 25 …  8..20  3 pages, last use 2  goes next",
        "│       └── and 2 more nodes, 8 tokens",
        "├── namespace 'tenant'  1 node, 8 tokens",
    ]


def total(picture: CachePicture) -> tuple[int, int, int]:
    """Nodes that are shown; all nodes and their tokens, shown or not."""
    rows = [node for name in picture.namespaces for node in name.nodes]
    nodes = [row for row in rows if isinstance(row, NodePicture)]
    hidden = [row for row in rows if isinstance(row, HiddenNodes)]
    num_nodes = len(nodes) + sum(row.num_nodes for row in hidden)
    size = sum(row.stop - row.start for row in nodes) + sum(row.size for row in hidden)
    return len(nodes), num_nodes, size


def check_places(picture: CachePicture) -> None:
    """Each node starts where the one that it hangs on stops."""
    for namespace in picture.namespaces:
        stops = [0]
        for node in namespace.nodes:
            above = stops[node.depth if node.is_chained else node.depth - 1]
            del stops[node.depth :]
            stops.append(-1)
            if isinstance(node, NodePicture):
                assert node.start == above
                assert node.stop - node.start == node.num_pages * picture.page_size
                stops[-1] = node.stop


prompts = st.lists(
    st.tuples(
        st.sampled_from([None, "a", ODD_NAME]),
        st.lists(st.integers(0, 2), min_size=1, max_size=9),
        st.booleans(),
    ),
    max_size=8,
)


@given(prompts, st.integers(1, 12), st.sampled_from(["lru", "lfu"]), st.booleans())
def test_nothing_is_lost_in_any_form(
    prompts: list[tuple[str | None, list[int], bool]],
    max_num_nodes: int,
    policy: str,
    is_bumped: bool,
) -> None:
    cache = make_cache(64, 1, policy=policy)
    for namespace, tokens, is_finished in prompts:
        request = run(cache, tokens, namespace)
        if is_finished:
            cache.cache_finished_req(request, tokens)
        else:
            cache.cache_unfinished_req(request, tokens)
    if is_bumped:
        cache.bump_epoch("a")
    everything = take_picture(cache, 10**6, None)
    picture = take_picture(cache, max_num_nodes, None)
    num_nodes = sum(namespace.num_nodes for namespace in picture.namespaces)
    cached = cache.evictable_size + cache.protected_size

    assert (num_nodes, num_nodes, cached) == total(everything)
    assert (min(num_nodes, max_num_nodes), num_nodes, cached) == total(picture)
    check_places(everything)
    check_places(picture)
    users = {
        node.leased_by
        for namespace in everything.namespaces
        for node in namespace.nodes
        if isinstance(node, NodePicture) and node.num_users == node.lock_ref == 0
    }
    assert users <= {()}
    view = TreeView(cache, max_num_nodes=max_num_nodes)
    num_shown = min(num_nodes, max_num_nodes)
    assert num_shown == check_dot(view.dot())
    assert num_shown == check_html(view.html())


def test_the_node_that_goes_next_is_marked() -> None:
    cache = make_busy_cache()
    (victim,) = cache.eviction_order(1)
    marked = [
        node
        for namespace in take_picture(cache, 100, None).namespaces
        for node in namespace.nodes
        if isinstance(node, NodePicture) and node.is_next
    ]

    assert [victim.prefix_len] == [node.stop - cache.page_size for node in marked]


def test_the_same_cache_gives_the_same_view_and_stays_as_it_is() -> None:
    cache = make_busy_cache()
    before = (cache.stats(), cache.eviction_order(100))
    one, other = TreeView(cache), TreeView(cache)
    cache.check_integrity()

    assert before == (cache.stats(), cache.eviction_order(100))
    assert one.html() == other.html()
    assert one.dot() == other.dot()
    assert TreeView(make_busy_cache()).html() == one.html()


def test_a_view_is_of_the_moment_when_it_was_made() -> None:
    cache = make_busy_cache()
    view = TreeView(cache)
    before = view.html(), view.dot()
    cache.evict(100)

    assert before == (view.html(), view.dot())


def test_b138_a_chain_deeper_than_the_stack_is_shown() -> None:
    num_nodes = 20_000
    cache = make_cache(num_nodes, 1, policy="lfu", max_context_len=num_nodes)
    tokens = [0] * num_nodes
    request = admit(cache, tokens)
    for length in range(1, num_nodes + 1):
        compute(cache, request, length)
        cache.cache_unfinished_req(request, tokens)
    whole = TreeView(cache, max_num_nodes=10**6)

    assert num_nodes == whole.html().count('<tr class="protected')
    assert whole.dot().count(" -> ") == num_nodes + 1
    assert whole.rich().children
    assert f"and {num_nodes - 200:,} more nodes, {num_nodes - 200:,} tokens" in shown(
        cache
    )


# Graphviz ---------------------------------------------------------------------

STRING = r'"(?:[^"\\\n]|\\.)*"'
WORD = rf"(?:{STRING}|[A-Za-z0-9_]+)"
LIST = rf"\[{WORD}={WORD}(?:, {WORD}={WORD})*\]"
STATEMENT = re.compile(
    rf"(?P<kind>graph|node|edge) {LIST};(?: (?:graph|node|edge) {LIST};)*"
    rf"|(?P<node>\w+) {LIST};"
    rf"|(?P<tail>\w+) -> (?P<head>\w+)(?P<style> {LIST})?;"
)


def check_dot(text: str) -> int:
    """Check a graph against the grammar of DOT; returns how many boxes it has."""
    first, *lines, last, end = text.split("\n")
    assert (first, last, end) == ("digraph cache {", "}", "")
    nodes: list[str] = []
    heads: list[str] = []
    edges: list[tuple[str, str]] = []
    for line in lines:
        match = STATEMENT.fullmatch(line.strip())
        assert match, line
        if match["node"]:
            nodes.append(match["node"])
        if match["head"]:
            edges.append((match["tail"], match["head"]))
            heads += [] if match["style"] else [match["head"]]
    assert len(nodes) == len(set(nodes))
    assert {name for edge in edges for name in edge} <= set(nodes)
    # A forest: whatever hangs on something hangs on one.
    assert len(heads) == len(set(heads))
    return text.count("shape=box")


def test_the_graph_has_requests_and_colours() -> None:
    text = TreeView(make_busy_cache()).dot()

    assert check_dot(text) == 5
    assert 'n0 [label="None\\n4 nodes, 28 tokens", shape=folder' in text
    assert 'label="40 41 42 43\\n8..12\\n1 page, lock 2, 2 hits, priority 3"' in text
    assert 'r2 [label="row 2", shape=oval' in text
    assert "  r2 -> n3 [style=dashed];" in text
    assert "last use 2, goes next" in text
    assert "  n1 -> n3;" in text
    assert "  n3 -> n4;" in text  # its only child


def test_a_name_cannot_break_out_of_the_graph() -> None:
    cache = make_cache()
    insert(cache, span(1, 4), namespace=ODD_NAME)

    check_dot(TreeView(cache, decode=lambda ids: '"\\\n').dot())


# The browser ------------------------------------------------------------------


class Page(HTMLParser):
    """Reads a page; every element must be closed in order."""

    VOID = ("meta",)

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def check_html(text: str) -> int:
    """Check that a page is whole and loads nothing; returns how many nodes it has."""
    page = Page()
    page.feed(text)
    page.close()
    assert page.open == []
    tags = [tag for tag, _ in page.elements]
    assert not {"script", "link", "img", "iframe"} & set(tags)
    attributes = {name for _, attrs in page.elements for name in attrs}
    assert not {"src", "href", "onclick"} & attributes
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text
    rows = [attrs.get("class") or "" for tag, attrs in page.elements if tag == "tr"]
    return sum(row.startswith(("evictable", "protected")) for row in rows)


def test_the_page_names_everything() -> None:
    text = TreeView(make_busy_cache()).html()
    page = Page()
    page.feed(text)

    assert check_html(text) == 5
    for expected in (
        "128 tokens in pages of 4",
        "'tenant'",
        "40 41 42 43",
        "8..12",
        "row 2",
        "goes next",
        "in use",
        "Running requests",
    ):
        assert expected in page.texts, expected


def test_a_name_cannot_break_out_of_the_page() -> None:
    cache = make_cache()
    insert(cache, span(1, 4), namespace=ODD_NAME)
    admit(cache, [1], namespace=ODD_NAME)
    text = TreeView(cache, decode=lambda ids: "<b>&</b>").html()
    page = Page()
    page.feed(text)

    assert check_html(text) == 1
    assert page.texts.count(repr(ODD_NAME)) == 2
    assert "<b>&</b>" in page.texts
    assert repr(ODD_NAME) in shown(cache)
