"""docs/numerics.md keeps its word: examples run, pointers lead somewhere, citations are met."""

import math
import re
from importlib import import_module
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/numerics.md").read_text(encoding="utf-8")
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


@pytest.mark.parametrize("title", SECTIONS)
def test_every_section_points_to_code_and_ends_with_an_example_that_runs(title: str) -> None:
    section = SECTIONS[title]
    assert pointers(section)
    assert section.rstrip().endswith("```")
    (example,) = examples(section)
    exec(compile(example, title, "exec"), {"math": math, "torch": torch})


def test_every_pointer_leads_to_a_definition() -> None:
    for path, name in sorted(pointers(PAGE)):
        inside = "invformer." if (ROOT / "invformer" / path).exists() else ""
        module = import_module(inside + path.removesuffix(".py").replace("/", "."))
        assert hasattr(module, name), f"{path} does not define {name}"


def test_every_section_that_is_referred_to_exists() -> None:
    numbers = {int(title.split(".")[0]) for title in SECTIONS}
    assert numbers == set(range(1, len(SECTIONS) + 1))
    assert {int(n) for n in re.findall(r"§(\d+)", PAGE)} <= numbers


def test_every_test_file_the_page_names_exists() -> None:
    for path in re.findall(r"`(tests/[\w/]+\.py)`", PAGE):
        assert (ROOT / path).is_file()
