"""README keeps its word: commands parse, files exist, the example runs, the codes are true."""

import re
import shlex
from pathlib import Path

import pytest
import torch

from invformer.config.load import load_config
from invformer.config.schema import TrainConfig
from invformer.config.trained import EvaluateConfig

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [
    "README.md",
    "CONTRIBUTING.md",
    "checkpoints/README.md",
    "docs/library.md",
    "docs/reliability.md",
    "docs/results.md",
    "docs/results-archive.md",
    "docs/log.md",
]


def blocks(language: str, page: str = README) -> list[str]:
    """The fenced code blocks of a page in a language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def commands(program: str) -> list[list[str]]:
    """The arguments of every call of a program in README's shell blocks."""
    lines = [
        shlex.split(line, comments=True) for text in blocks("sh") for line in text.splitlines()
    ]
    return [words[2:] for words in lines if words[:2] == ["python", program]]


@pytest.mark.parametrize("arguments", commands("train.py"), ids=" ".join)
def test_every_training_command_is_valid(arguments: list[str]) -> None:
    assert isinstance(load_config(arguments), TrainConfig)


@pytest.mark.parametrize("arguments", commands("evaluate.py"), ids=" ".join)
def test_every_evaluation_command_is_valid(arguments: list[str]) -> None:
    assert load_config(arguments, EvaluateConfig).checkpoint[0] == "checkpoints/first"


@pytest.mark.parametrize("page", PAGES)
def test_every_link_to_a_file_leads_somewhere(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link]
    missing = [link for link in links if not (ROOT / page).parent.joinpath(link).exists()]
    assert not missing


def test_every_number_of_the_results_table_is_on_the_results_page() -> None:
    results = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    (section,) = re.findall(r"^## Results\n(.*?)^## ", README, re.MULTILINE | re.DOTALL)
    table = "\n".join(line for line in section.splitlines() if line.startswith("|"))
    numbers = set(re.findall(r"\d+\.\d{3,}", table))
    assert numbers
    assert {number for number in numbers if number not in results} == set()


def test_no_cell_of_the_results_page_is_longer_than_200_characters() -> None:
    results = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    cells = [
        cell.strip()
        for line in results.splitlines()
        if line.startswith("|")
        for cell in line.split("|")
    ]
    assert max(map(len, cells)) <= 200


@pytest.mark.filterwarnings("ignore")  # Lightning's advice
def test_the_library_examples_run_in_single_precision_as_they_stand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    page = (ROOT / "docs/library.md").read_text(encoding="utf-8")
    exec("\n".join(blocks("python", page)), {})
    (rows,) = tmp_path.glob("logs/*/*/metrics.csv")
    keys = rows.read_text().splitlines()[0].split(",")
    assert {"train/bpc", "val/bpc", "lipschitz/estimate", "inverse/characters_recovered"} <= {*keys}


def test_every_preset_of_a_group_is_named() -> None:
    for group in ("model", "data", "optim", "trainer", "logger"):
        presets = {path.stem for path in (ROOT / "configs" / group).glob("*.yaml")}
        assert presets <= set(re.findall(r"`(\w+)`", README)), group


def test_installing_by_hand_takes_the_torch_of_the_constraints() -> None:
    (pinned,) = re.findall(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert f"pip install -c constraints.txt torch=={pinned}\n" in README
    assert f"$(PIP) torch=={pinned}\n" in (ROOT / "Makefile").read_text()
