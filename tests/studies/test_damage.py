"""Damaged states: what they are, and that nothing proven about their texts is wrong."""

from pathlib import Path

import pytest
import torch

from invformer.config.schema import ModelConfig, TrainConfig
from invformer.data.vocabulary import Vocabulary
from invformer.evaluation.recovered_text import perturb
from invformer.model import TrainedModel
from studies import damage
from studies.damage import STUDY, Case
from studies.study import main
from tests.nn.builders import baseline, random_tokens, scaled_model, trained_a_little


def case(kind: str, level: float) -> Case:
    return Case("ours", kind, level, 2, 3, 0)


def test_rounding_a_window_is_what_the_command_does_and_cells_hold_the_truth() -> None:
    z = torch.randn(2, 5, 4, dtype=torch.float64)
    rounded, cell = damage.damaged(z, case("bits", 4))
    assert torch.allclose(rounded[1], perturb(z[1], 0.0, 4, 0))
    for kind in ("bits", "channel bits"):
        rounded, cell = damage.damaged(z, case(kind, 3))
        assert cell is not None
        assert ((rounded - z).abs() <= cell * (1 + 1e-12)).all()


def test_the_study_recovers_proves_and_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = {"ours": scaled_model, "twin": baseline}
    models = {
        name: TrainedModel(
            trained_a_little(make()).double(),
            Vocabulary.from_text("abcdefghij"),
            TrainConfig(
                model=ModelConfig()
                if name == "ours"
                else ModelConfig(name="dot_product", certificate=None)
            ),
            {},
        )
        for name, make in made.items()
    }
    monkeypatch.setattr(damage, "trained", models.__getitem__)
    monkeypatch.setattr(damage, "windows", lambda folder, count: random_tokens(count))
    words = ["models=[ours,twin]", "bits=[12]", "noise=[2]", "dropped=[1]", "num_windows=2"]
    assert main(STUDY, [*words, f"out={tmp_path}", "wandb=false"]) == 0
    assert "verdict" in capsys.readouterr().out
    clean = damage.measure(case("bits", 20), torch.device("cpu"))
    assert clean.search == clean.few == clean.at_once == clean.unique == clean.proven == 1
    worst = damage.measure(case("noise", 30), torch.device("cpu"))
    assert worst.search < 1
    assert worst.wrong == worst.within_radius == 0
