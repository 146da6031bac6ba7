"""Every study at its smallest size: rows, table, figure and verdict, and a start that resumes."""

import importlib
import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from invformer.config.load import load_config
from studies import __main__ as listing
from studies.report import Outcome
from studies.study import main
from tests.support.processes import ROOT
from tests.support.saved_runs import Saved
from tests.support.small_runs import fitted

STUDIES = listing.find_studies(ROOT / "studies")
TEXT = "".join(f"{i} times {i} is {i * i}; " for i in range(400))
MODEL = "d_model=12 num_heads=2 num_layers=1 seq_len=16 batch_size=4 num_steps=3"
SHORT = "data.name=text_file data.path=TEXT data.max_characters=4000"
RUN = "data=text_file,data.path=TEXT,model.num_layers=1,model.d_model=16,model.num_heads=2"

# The words of each study; TEXT is a file, CERTIFIED and TWIN are run folders, FEW steps of a run.
SMALL = {
    "ablation": f"only=[nothing] overrides=[{RUN},model.d_head=8,trainer.max_steps=2,"
    "trainer.val_every=2,logger=none]",
    "at_size": "parts=[step,kim] kinds=[certified] depths=[2] rates=1 minutes=60",
    "attention_distribution": f"{MODEL} {SHORT} data.val_characters=200 layer_sizes=[5] "
    "num_seeds=1 weights=[0.1]",
    "breaking": "",
    "damage": "models=[CERTIFIED,TWIN] bits=[4] noise=[2] dropped=[1] num_windows=1",
    "depth_stability": f"{MODEL.replace('num_layers=1', 'depths=[1,2]')} {SHORT} "
    "data.val_characters=200 kinds=[dot_product,l2,certified]",
    "early_warning": f"{MODEL} num_steps=20 families=[l2/adamw,bare/muon] texts=[TEXT] "
    "max_characters=4000 val_characters=190 adam_rates=[0.01,10] muon_rates=[0.01,10] "
    "runs_per_rate=1",
    "equal_time": "kinds=[nanogpt,nanogpt_tuned] adam_rates=[1e-3] minutes=[1e-6] num_turns=1 "
    f"overrides=[{RUN},model.d_ff=16,data.seq_len=8,data.batch_size=2,data.test_fraction=0.1]",
    "growth": "sizes=[4] num_sequences=2 attack_sizes=[7] num_attacked=1",
    "invertibility": "seq_len=8 d_model=8 num_heads=2 batch_size=2 num_steps=30 train_steps=5",
    "mass_splitting": "num_measures=9",
    "mean_field": "",
    "price": f"kinds=[certified] budgets=[2] rates=[0.01] val_every=1 overrides=[{RUN},"
    "model.d_ff=16,data.seq_len=8,data.batch_size=2,data.test_fraction=0.1]",
    "search": "lengths=[8,12] vocabularies=[9,30] num_places=2 d_model=16",
    "tightness": "sizes=[10,20] num_starts=4 num_steps=50",
    "whole_network": f"{MODEL.replace('d_model=12', 'd_model=24')} {SHORT} totals=[2,10] "
    "num_windows=3 pgd_steps=3",
}
CERTIFIED = "model.name=contractive_bounded model.certificate=causal model.strictly_causal=true"
TWIN = "model.name=dot_product model.certificate=null"


def words_in(folder: Path, name: str) -> list[str]:
    """The words of a study, with the text and the run folders that they name."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text(TEXT)
        for run, kind in (("certified", CERTIFIED), ("twin", TWIN)):
            (folder / run).mkdir()
            Saved(folder / run, *kind.split()).save()
            row = {"step": 3, "val/nats": 2.5}
            (folder / run / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    found = SMALL[name].replace("TEXT", str(text)).replace("TWIN", str(folder / "twin"))
    return found.replace("CERTIFIED", str(folder / "certified")).split()


@pytest.fixture
def _small(monkeypatch, command, without_plots) -> None:
    """No large matrices and no new processes: these are tested beside their studies."""

    def call(program: str, *words: str) -> None:
        if program == "train.py":
            fitted(words)
        else:
            assert command("evaluate", *words) == 0

    monkeypatch.setattr("studies.ablation.call", call)
    monkeypatch.setattr("studies.at_size.call", call)
    monkeypatch.setattr("studies.kinds.call", call)
    monkeypatch.setattr("studies.growth.GPT2_WIDTH", 96)  # not 768


@pytest.mark.usefixtures("_small")
@pytest.mark.parametrize("name", STUDIES)
def test_a_study_leaves_rows_and_a_verdict(name: str, tmp_path, capfd) -> None:
    torch.set_default_dtype(torch.float32)
    study, out = importlib.import_module(f"studies.{name}").STUDY, tmp_path / "out"
    assert load_config([], study.options).folder == Path("checkpoints", "studies", name)
    columns = [f.name for part in (study.case, study.result) for f in fields(part)]
    assert len(set(columns)) == len(columns)
    argv = [*words_in(tmp_path, name), f"out={out}", "num_threads=1"]
    assert main(study, argv) == 0
    assert "verdict: " in capfd.readouterr().out
    result, rows = json.loads((out / "result.json").read_text()), (out / "rows.csv").read_text()
    assert result["outcome"] in get_args(Outcome)
    assert result["table"]
    assert study.draw is None or (out / f"{name}.png").stat().st_size > 10_000
    assert main(replace(study, measure=None, draw=None), argv) == 0
    again = json.loads((out / "result.json").read_text())
    assert (again["findings"], again["must"]) == (result["findings"], result["must"])
    assert (out / "rows.csv").read_text() == rows


def test_nothing_imports_a_study() -> None:
    for path in (ROOT / "studies").glob("[!_]*.py"):
        text = path.read_text(encoding="utf-8")
        names = re.findall(r"^from studies\.(\w+) import", text, re.MULTILINE)
        together = re.findall(r"^from studies import (.+)$", text, re.MULTILINE)
        names += [name for line in together for name in line.split(", ")]
        assert not STUDIES.keys() & {*names}, path.name


@pytest.mark.parametrize(
    ("name", "words", "code", "message"),
    [
        ("attention_distribution", "num_heads=5", 2, "5 heads do not divide d_model=32"),
        ("attention_distribution", "data.val_characters=100", 3, "4 are asked for; raise"),
        ("whole_network", "data.val_fraction=0.97", 2, "leaves no text for training"),
        ("whole_network", "data.max_characters=9000 seq_len=5000", 3, "make 0 windows of 5000"),
        ("whole_network", "data.max_characters=9000 seq_len=8500", 3, "seq_len=8500: the"),
        ("growth", "checkpoint=/nowhere", 4, "/nowhere"),
        ("growth", "pretrained=configs text=README.md", 2, "no model with a tokenizer"),
        ("growth", "pretrained=m text=/nowhere", 3, "cannot be read"),
        ("growth", "text=README.md", 2, "belong together"),
        ("growth", "pretrained=m checkpoint=c text=README.md", 2, "either"),
        ("price", "kinds=[other]", 2, "'[other]' is not [certified|eight_blocks|eight_heads|"),
        ("ablation", "only=[no_bia]", 2, "did you mean 'no_bias'?"),
        ("tightness", "sizes=[]", 2, "leave no case"),
    ],
)
def test_impossible_options_are_refused_in_one_line(
    name: str, words: str, code: int, message: str, tmp_path, capsys, monkeypatch
) -> None:
    monkeypatch.chdir(ROOT)
    study = importlib.import_module(f"studies.{name}").STUDY
    try:
        found = main(study, [f"out={tmp_path}", *words.split()])
    except SystemExit as end:
        found = end.code
    error = capsys.readouterr().err
    assert (found, error.count("\n"), message in error) == (code, 1, True), error
