"""The pages keep their word: commands parse, code runs, links lead somewhere, numbers are true."""

import math
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from invformer import errors
from invformer.config.load import load_config
from invformer.config.schema import TrainConfig
from invformer.config.trained import EvaluateConfig
from tests.support.processes import ROOT
from tests.support.small_runs import fitted


def read(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(language: str, text: str) -> list[tuple[str, str]]:
    """Language and code of a text's fenced blocks in a language, or in several: ``sh|python``."""
    return re.findall(rf"^```({language})\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


README, NUMERICS, RELIABILITY = map(read, ("README.md", "docs/numerics.md", "docs/reliability.md"))
RESULTS, EXPERIMENTS = read("docs/results.md"), read("docs/experiments.md")
PAGES = [
    "README.md", "CONTRIBUTING.md", "checkpoints/README.md", "docs/library.md",
    "docs/reliability.md", "docs/results.md", "docs/experiments.md",
]  # fmt: skip


def test_every_page_is_in_the_menu() -> None:
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    assert pages == set(re.findall(r"[\w/-]+\.md", read("mkdocs.yml")))


@pytest.mark.parametrize("page", PAGES)
def test_every_link_to_a_file_leads_somewhere(page: str) -> None:
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", read(page)) if "://" not in link]
    missing = [link for link in links if not (ROOT / page).parent.joinpath(link).exists()]
    assert not missing


def typed(program: str) -> list[list[str]]:
    """The arguments of every call of a program in README's shell blocks."""
    lines = [
        shlex.split(line, True) for _, text in blocks("sh", README) for line in text.splitlines()
    ]
    return [words[2:] for words in lines if words[:2] == ["python", program]]


def test_every_training_and_every_evaluation_command_is_valid() -> None:
    for words in typed("train.py"):
        assert isinstance(load_config(words), TrainConfig), words
    for words in typed("evaluate.py"):
        assert load_config(words, EvaluateConfig).checkpoint[0] == "checkpoints/first", words


def test_every_number_of_the_results_table_is_on_the_results_page() -> None:
    (section,) = re.findall(r"^## Results\n(.*?)^## ", README, re.MULTILINE | re.DOTALL)
    table = "\n".join(line for line in section.splitlines() if line.startswith("|"))
    numbers = set(re.findall(r"\d+\.\d{3,}", table))
    assert numbers
    assert {number for number in numbers if number not in RESULTS} == set()


@pytest.mark.parametrize(("page", "lines"), [(README, 110), (RESULTS, 450), (EXPERIMENTS, 250)])
def test_a_page_and_the_cells_of_its_tables_are_short(page: str, lines: int) -> None:
    assert len(README.split()) <= 1200
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert max(len(cell.strip()) for row in rows for cell in row.split("|")) <= 200
    assert len(page.splitlines()) <= lines


def test_every_row_of_the_experiments_names_a_commit_or_says_that_it_is_a_prototype() -> None:
    rows = [line for line in EXPERIMENTS.splitlines() if line.startswith("| ")]
    answers = [row for row in rows if not row.startswith(("| question |", "| ---"))]
    assert len(answers) > 100
    assert not [row for row in answers if not re.search(r"\b[0-9a-f]{7}\b|\| \*", row)]


def test_every_preset_of_a_group_is_named() -> None:
    for group in ("model", "data", "optim", "trainer", "logger"):
        presets = {path.stem for path in (ROOT / "configs" / group).glob("*.yaml")}
        assert presets <= set(re.findall(r"`(\w+)`", README)), group


def test_installing_by_hand_takes_the_torch_of_the_constraints() -> None:
    (pinned,) = re.findall(r"^torch==(\S+)$", read("constraints.txt"), re.MULTILINE)
    assert f"pip install -c constraints.txt torch=={pinned}\n" in README
    assert f"$(PIP) torch=={pinned}\n" in read("Makefile")


TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.md"))
SMALL = [
    "data.seq_len=16", "model.d_model=24", "model.num_layers=2", "model.num_heads=2",
    "trainer.max_steps=4", "trainer.val_every=2", "trainer.progress=false",
    "trainer.sample_length=0", "monitor.num_sequences=1", "logger=none",
]  # fmt: skip
FEW = ("evaluate.lipschitz_steps=2", "evaluate.inversion_sequences=1")
NOT_RUN = {"wandb", "make"}  # other people's programs


@pytest.fixture(scope="module")
def desk(tmp_path_factory) -> Path:
    """A reader's folder: her book, and the run of Getting started."""
    folder = tmp_path_factory.mktemp("desk")
    book = "".join(f"It was {i}. Nothing is lost in {i * i} texts.\n" for i in range(400))
    (folder / "my_book.txt").write_text(book)
    (folder / "my_other_book.txt").write_text(book[::-1])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr("invformer.training.fit.plot_run", lambda _, path, *rest: path.touch())
        torch.set_default_dtype(torch.float32)
        words = ["data=text_file", "data.path=my_book.txt", "run.name=first"]
        fitted([*words, *SMALL])
    return folder


def run_line(line: str, command: Callable[..., int]) -> None:
    """One line of a shell block: a command of ours, with small sizes where it trains."""
    words = shlex.split(line, comments=True)
    if not words or words[0] in NOT_RUN:
        return
    assert words[0] == "python", line
    name = words[1].removesuffix(".py")
    if name == "train":
        brought = ("model.", "data.seq_len") if "init_from=" in line else ()
        fitted([*words[2:], *(w for w in SMALL if not w.startswith(brought))])
    else:
        assert command(name, *words[2:], *(FEW if name == "evaluate" else ())) == 0, line


@pytest.mark.usefixtures("without_plots")
@pytest.mark.filterwarnings("ignore")  # Lightning's advice
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_every_block_of_a_tutorial_runs(page: Path, desk, command, monkeypatch) -> None:
    monkeypatch.chdir(desk)
    torch.set_default_dtype(torch.float32)
    namespace: dict[str, object] = {}
    for language, text in blocks("sh|python", page.read_text(encoding="utf-8")):
        if "from transformers" in text and find_spec("accelerate") is None:
            continue  # an optional extra
        if language == "python":
            exec(text, namespace)
        else:
            for line in text.splitlines():
                run_line(line, command)


@pytest.mark.filterwarnings("ignore")  # Lightning's advice
def test_the_library_examples_run_in_single_precision_as_they_stand(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.set_default_dtype(torch.float32)
    exec("\n".join(code for _, code in blocks("python", read("docs/library.md"))), {})
    (rows,) = tmp_path.glob("logs/*/*/metrics.csv")
    keys = rows.read_text().splitlines()[0].split(",")
    assert {"train/bpc", "val/bpc", "lipschitz/estimate", "inverse/characters_recovered"} <= {*keys}


SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", NUMERICS, re.MULTILINE | re.DOTALL))


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
    ((_, example),) = blocks("python", section)
    exec(compile(example, title, "exec"), {"math": math, "torch": torch})


def test_every_definition_section_and_test_file_that_the_page_of_numerics_names_exists() -> None:
    for path, name in sorted(pointers(NUMERICS)):
        inside = "invformer." if (ROOT / "invformer" / path).exists() else ""
        module = import_module(inside + path.removesuffix(".py").replace("/", "."))
        assert hasattr(module, name), f"{path} does not define {name}"
    numbers = {int(title.split(".")[0]) for title in SECTIONS}
    assert numbers == set(range(1, len(SECTIONS) + 1))
    assert {int(n) for n in re.findall(r"§(\d+)", NUMERICS)} <= numbers
    for path in re.findall(r"`(tests/[\w/]+\.py)`", NUMERICS):
        assert (ROOT / path).is_file()


def test_every_test_that_the_page_of_reliability_names_exists() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("tests/**/*.py"))
    named = set(re.findall(r"`(test_\w+)`", RELIABILITY))
    assert len(named) > 30
    assert not {name for name in named if f"def {name}(" not in sources}


def test_every_exit_code_is_on_the_page_of_reliability() -> None:
    (line,) = re.findall(r"^Exit codes:(.*?)\n\n", RELIABILITY, re.DOTALL | re.MULTILINE)
    family = [errors.InvformerError, *errors.InvformerError.__subclasses__()]
    assert {str(error.exit_code) for error in family} <= set(re.findall(r"\d+", line))


@pytest.mark.parametrize(("code", "requeued"), [(0, False), (143, True), (4, False)])
def test_the_cluster_job_is_requeued_if_stopped(tmp_path, code: int, requeued: bool) -> None:
    for name, body in {"srun": f'echo "$@" > {tmp_path}/called; exit {code}',
                       "scontrol": f'echo "$@" > {tmp_path}/requeued'}.items():  # fmt: skip
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        **os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "17",
    }  # fmt: skip
    done = subprocess.run(
        ["bash", str(ROOT / "docs/train.sbatch"), "run.name=first"], env=environment
    )
    assert done.returncode == code
    assert (tmp_path / "called").read_text().endswith("run.name=first\n")
    assert (tmp_path / "requeued").exists() == requeued
