"""The table of faults names tests that exist."""

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parents[1]


def defined(path):
    return {n.name for n in ast.parse(path.read_text()).body if isinstance(n, ast.FunctionDef)}


def test_every_test_in_the_table_exists():
    text = (TESTS / "faults" / "README.rst").read_text()
    where, checked = None, 0
    for word in re.findall(r"``([\w/.]+)``", text):
        if word.endswith(".py"):
            where = defined(TESTS / word)
        elif word.startswith("test_"):
            assert word in where, word
            checked += 1
    assert checked > 40
