"""docs/numerics.md keeps its word: examples run, pointers lead somewhere, citations are met."""

import ast
import math
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "invformer"
PAGE_NAME = "docs/numerics.md"
PAGE = (ROOT / PAGE_NAME).read_text(encoding="utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))


def examples(text: str) -> list[str]:
    """The python blocks of a text."""
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def pointers(text: str) -> set[tuple[str, str]]:
    """(file, name) for every name behind a file in the lines that begin with an arrow."""
    found = set()
    for line in re.findall(r"^→ (.*)$", text, re.MULTILINE):
        for part in line.split("; "):
            path, *names = re.findall(r"`([^`]+)`", part)
            found |= {(path, name) for name in names}
    return found


def definitions(tree: ast.Module) -> set[str]:
    """What a module defines at its top level."""
    names = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


@pytest.mark.parametrize("title", SECTIONS)
def test_every_section_points_to_code_and_ends_with_an_example_that_runs(title: str) -> None:
    section = SECTIONS[title]
    assert pointers(section)
    assert section.rstrip().endswith("```")
    (example,) = examples(section)
    exec(compile(example, title, "exec"), {"math": math, "torch": torch})


def test_every_pointer_leads_to_a_definition() -> None:
    for path, name in sorted(pointers(PAGE)):
        file = PACKAGE / path if (PACKAGE / path).exists() else ROOT / path
        tree = ast.parse(file.read_text(encoding="utf-8"))
        assert name in definitions(tree), f"{path} does not define {name}"


def test_every_section_that_is_referred_to_exists() -> None:
    numbers = {int(title.split(".")[0]) for title in SECTIONS}
    assert numbers == set(range(1, len(SECTIONS) + 1))
    assert {int(n) for n in re.findall(r"§(\d+)", PAGE)} <= numbers


def test_every_test_file_the_page_names_exists() -> None:
    for path in re.findall(r"`(tests/[\w/]+\.py)`", PAGE):
        assert (ROOT / path).is_file()
