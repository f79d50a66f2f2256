"""Settings of the documentation site: `make docs`.

The pages are those of the repository, where they lie: its root is the source, so each link between them leads to the
same place here and where the code is kept.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from docutils import nodes
from docutils.parsers.rst import Directive
from pygments.lexers.special import TextLexer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from torch_dpflow import __version__  # noqa: E402
from torch_dpflow.cli.main import root  # noqa: E402

project = "torch_dpflow"
author = "The torch_dpflow project"
release = version = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]

root_doc = "docs/index"
include_patterns = ["*.md", "docs/*.md", "docs/howto/*.md", "docs/explanation/*.md"]
include_patterns += ["docs/reference/*.md", "benchmarks/*.md"]
exclude_patterns = [
    folder.name for folder in ROOT.iterdir() if folder.is_dir() and folder.name not in ("docs", "benchmarks")
]
source_suffix = {".md": "markdown"}

myst_enable_extensions = ["colon_fence"]
# As code hosts make them from headings.
myst_heading_anchors = 4

# Docstrings have names in single backticks: links where there is something of that name, else code.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_google_docstring, napoleon_numpy_docstring = True, False
# Annotations name types of other packages, and some of modules whose users never meet them: neither has a page here.
# What a page itself refers to is given in full, and has one.
nitpick_ignore_regex = [
    ("py:.*", r"(?!torch_dpflow\.).*"),
    ("py:.*", r"torch_dpflow\.(.+\.)?(T|Read_co|SpecStruct|LookaheadSampler|Files|SourceFiles|SamplePlace|Compared)"),
    ("py:.*", r"torch_dpflow\.(.+\.)?(FlowSource|StagedDataset|Skips|FlowRecord|FunctionControl|FunctionSettings)"),
    ("py:.*", r"torch_dpflow\.(.+\.)?(EpochSampler|HasBlocks|Permutation|RankPart|Index|Rows|ObjectReader)"),
    # Contracts that a suite or an option names: their modules have no page.
    ("py:.*", r"torch_dpflow\.((ipc|cluster|workers)\..+|samplers\.(group|STRATEGIES)|caches\.policy)"),
    ("py:.*", r"torch_dpflow\.(datasets\.storage\.base\.Storage|remote\.launchers\.contract)"),
]
# An attribute may be called as a type is: `bytes`.
suppress_warnings = ["ref.python"]

# What the copy button leaves out: the prompt, and what a command prints.
copybutton_prompt_text = "$ "

html_theme = "furo"
html_title = f"torch_dpflow {__version__}"
html_static_path: list[str] = []
html_extra_path = ["site"]
html_show_copyright = False


class Commands(Directive):
    """What `dpflow` and each of its commands say of themselves."""

    def run(self) -> list[nodes.Node]:
        return [part for name, text in help_of("dpflow", root) for part in self.shown(name, text)]

    def shown(self, name: str, text: str) -> list[nodes.Node]:
        block = nodes.literal_block(text, text, language="text")
        return [nodes.rubric(name, name), block]


def help_of(name: str, command: click.Command) -> Iterator[tuple[str, str]]:
    """The name and help of a command and of those below it."""
    with click.Context(command, info_name=name, max_content_width=100) as context:
        yield name, command.get_help(context)
        if isinstance(command, click.Group):
            for below in command.list_commands(context):
                found = command.get_command(context, below)
                assert found is not None
                yield from help_of(f"{name} {below}", found)


def setup(app: Any) -> None:
    """Diagrams are shown as they are written: what draws them would be fetched from elsewhere."""
    app.add_lexer("mermaid", TextLexer)
    app.add_directive("commands", Commands)
