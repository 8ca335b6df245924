"""A directive of Sphinx that shows a notebook: ``.. notebook:: ../examples/notebook.ipynb``."""

import json
import textwrap
from pathlib import Path

from sphinx.util.docutils import SphinxDirective


class Notebook(SphinxDirective):
    """The cells of a notebook: its words as text, its code as code."""

    required_arguments = 1

    def run(self):
        relative, path = self.env.relfn2path(self.arguments[0])
        self.env.note_dependency(relative)
        lines = []
        for cell in json.loads(Path(path).read_text())["cells"]:
            text = "".join(cell["source"])
            if cell["cell_type"] == "code":
                block = textwrap.indent(f":class: wide\n\n{text}", "    ")
                lines += [".. code-block:: python", *block.split("\n")]
            else:  # a heading is the page's own
                lines += [
                    line.replace("`", "``") for line in text.split("\n") if not line.startswith("#")
                ]
            lines.append("")
        return self.parse_text_to_nodes("\n".join(lines))


def setup(app):
    app.add_directive("notebook", Notebook)
    return {"parallel_read_safe": True}
