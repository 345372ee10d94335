"""How Sphinx builds the documentation; `make docs` runs it without warnings."""

from __future__ import annotations

import importlib

from hypothesis import HealthCheck, settings
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.util import logging

import radixkv

ROOMS = (
    "radixkv.mem_cache",
    "radixkv.mem_cache.testing",
    "radixkv.scheduling",
    "radixkv.scheduling.testing",
    "radixkv.kernels",
)

project = "RadixKV"
version = release = radixkv.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_title = f"RadixKV {release}"

# Single backticks in docstrings are code: shapes, names, values.
default_role = "literal"

autoclass_content = "both"
autodoc_member_order = "bysource"
napoleon_use_ivar = True
doctest_global_setup = "\n".join(f"from {room} import *" for room in ROOMS)
# The first example of all waits until Hypothesis has read the sources.
settings.register_profile("docs", suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("docs")
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# Dotted names of other projects: a build fetches no inventory, so it needs no network.
nitpick_ignore_regex = [(r"py:.*", r"(?!radixkv\.).*\..*")]
# Short names of unions, in signatures that autodoc cannot evaluate.
UNIONS = ("Digest", "Flag", "Integer", "Number")
nitpick_ignore = [("py:class", name) for name in UNIONS]
# What nodes are made of, which the reference does not show.
PARTS = ("namespaces.Namespaces", "radix_node.NamespaceCounters")
PARTS += ("sharded_dict.ShardedDict",)
nitpick_ignore += [("py:class", f"radixkv.mem_cache.{name}") for name in PARTS]
# A type variable.
CHOICE = "radixkv.scheduling.testing.scheduler_machine._Choice"
nitpick_ignore += [("py:class", CHOICE)]

# autodoc lists what a module has; what it loads on first use must be loaded.
for room in ROOMS:
    module = importlib.import_module(room)
    vars(module).update((name, getattr(module, name)) for name in module.__all__)


def check_reference(app: Sphinx, env: BuildEnvironment) -> None:
    """Warn of public names that the reference does not show."""
    described = env.domains.python_domain.objects
    for room in ROOMS:
        for name in importlib.import_module(room).__all__:
            if f"{room}.{name}" not in described:
                logging.getLogger(__name__).warning("no reference: %s.%s", room, name)


def setup(app: Sphinx) -> None:
    """Check the reference once all pages are read."""
    app.connect("env-check-consistency", check_reference)
