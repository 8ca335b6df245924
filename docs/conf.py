"""How the documentation is built."""

import re
import sys
from pathlib import Path

from pygments.lexers.shell import BashLexer

root = Path(__file__).parent.parent
sys.path.insert(0, str(root))

project = "torchbearer_ddp"
source = (root / "torchbearer_ddp" / "version.py").read_text()
release = version = re.search(r'^__version__ = "(.+)"', source, re.MULTILINE)[1]

extensions = ["sphinx.ext.autodoc", "sphinx.ext.doctest", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "benchmarks"]

# torchbearer's own section: what a callback reads from and writes to the state.
napoleon_custom_sections = ["State Requirements"]
napoleon_numpy_docstring = False
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 88

html_theme = "furo"
html_title = f"torchbearer_ddp {release}"
html_copy_source = False
pygments_style = "tango"
pygments_dark_style = "monokai"


def setup(app):
    """Commands are shown without a prompt, for copying; Pygments would take them for output."""
    app.add_lexer("console", BashLexer)
