"""Fine-tuning: a run that starts with the weights of another one."""

from pathlib import Path

import pytest

from invformer import commands
from invformer.runs.run_log import read_rows
from invformer.training.fit import Run, fit
from tests.support.saved_runs import evaluated
from tests.support.small_runs import built, fitted, options

OTHER = "".join(f"{i} times {i + 1} is {i * i + i}; " for i in range(56))


@pytest.fixture
def trained(folder: Path) -> Path:
    """A trained run "a", and another text in its characters."""
    fitted(options(folder, "a", "model.d_ff=24", "model=contractive_bounded"))
    (folder / "other.txt").write_text(OTHER)
    return folder


def tuned(folder: Path, *more: str) -> Run:
    words = options(folder, "b", f"data.path={folder / 'other.txt'}", "trainer.max_steps=4")
    sizes = {"model", "data.seq_len"}
    own = [
        word for word in words if not word.startswith("model.") and word.split("=")[0] not in sizes
    ]
    return built([*own, f"init_from={folder / 'a'}", *more])


def test_a_run_starts_with_the_model_of_another_and_continues(trained: Path) -> None:
    run = tuned(trained, "optim.lr=1e-9")
    assert run.config.model.name == "contractive_bounded"
    assert run.config.model.d_ff == 24
    fit(run)
    nats = [row["train/nats"] for row in read_rows(trained / "b" / "metrics.jsonl")]
    learnt = [row["train/nats"] for row in read_rows(trained / "a" / "metrics.jsonl")]
    assert max(nats) < min(learnt[:5])
    again = tuned(trained, "optim.lr=1e-9", "trainer.max_steps=6")
    assert again.resume is not None
    fit(again)
    report = evaluated(trained / "b", "evaluate.lipschitz_sequences=0")
    assert report.data.same_as_training


@pytest.mark.parametrize("word", ["model=l2", "model.d_ff=3", "data.seq_len=8"])
def test_a_setting_that_the_model_brings_is_refused(word: str) -> None:
    with pytest.raises(SystemExit) as end:
        commands.parse_or_exit(["init_from=a", word])
    assert end.value.code == 2
