"""How the documentation is built."""

import json
import re
import sys
from pathlib import Path

from pygments.lexers.shell import BashLexer

root = Path(__file__).parent.parent
sys.path[:0] = [str(root), str(root / "docs")]

project = "torchbearer_ddp"
author = "The torchbearer_ddp authors"
copyright = re.search(r"Copyright \(c\) (.+)", (root / "LICENSE").read_text())[1]
source = (root / "torchbearer_ddp" / "version.py").read_text()
release = version = re.search(r'^__version__ = "(.+)"', source, re.MULTILINE)[1]

extensions = [
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "show_notebook",
]
exclude_patterns = ["_build", "benchmarks"]

# torchbearer's own section: what a callback reads from and writes to the state.
napoleon_custom_sections = ["State Requirements"]
napoleon_numpy_docstring = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"


def repository_link(packaging):
    """A link at the foot of every page, as soon as setup.py has a ``url``."""
    address = re.search(r'^ *url="(https://.+)"', packaging, re.MULTILINE)
    if address is None:
        return {}
    return {
        "footer_icons": [{"name": "Repository", "url": address[1], "html": "Source", "class": ""}]
    }


html_theme = "furo"
html_title = f"torchbearer_ddp {release}"
html_favicon = "images/favicon.svg"
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["style.css"]
html_js_files = ["sort.js"]
html_theme_options = repository_link((root / "setup.py").read_text())
pygments_style = "tango"
pygments_dark_style = "monokai"


def measured():
    """The numbers on the first page, from the file that make bench writes."""
    results = json.loads((root / "docs" / "benchmarks" / "results.json").read_text())
    host = {"ranks": 2, "in a": "Trial", "model": "60-layer MLP, 4.1M"}
    link = {"link": "1gbit", "ranks a host": 2}
    return {
        "ratio_trial": f"{_find(results['one host'], host)['ratios']['ours, shm']:.2f}",
        "ratio_hosts": f"{_find(results['two hosts'], link)['ratios']['ours, hierarchical']:.2f}",
        "ratio_single": f"{results['single process']['ratio'] - 1:+.1%}",
    }


def _find(rows, wanted):
    return next(row for row in rows if all(row[key] == wanted[key] for key in wanted))


rst_epilog = "\n".join(f".. |{name}| replace:: **{value}**" for name, value in measured().items())


def setup(app):
    """Commands are shown without a prompt, for copying; Pygments would take them for output."""
    app.add_lexer("console", BashLexer)
