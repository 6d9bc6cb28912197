"""Examples in docstrings are code on the API pages, whether or not they are indented as Markdown wants it."""

import re
from inspect import cleandoc
from textwrap import indent
from typing import Any

import griffe

EXAMPLE = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)  # to the next blank line


class Examples(griffe.Extension):
    """An extension of what reads the docstrings, named in mkdocs.yml."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Indent the lines of an example: lines that begin with `>` are citations."""
        if obj.docstring is not None:
            text = cleandoc(obj.docstring.value)
            obj.docstring.value = EXAMPLE.sub(lambda example: indent(example[0], "    "), text)
