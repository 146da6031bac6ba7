"""The tutorials keep their word: their commands and their Python run, in order, on a small run."""

import re
import shlex
from pathlib import Path

import pytest
import torch

from invformer import commands
from invformer.assemble.run import build_run
from invformer.config.load import load_config
from invformer.training.fit import fit

ROOT = Path(__file__).parent.parent
TUTORIALS = sorted((ROOT / "docs/tutorials").glob("*.md"))
BLOCKS = re.compile(r"^```(sh|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)
SMALL = [
    "data.seq_len=16", "model.d_model=24", "model.num_layers=2", "model.num_heads=2",
    "trainer.max_steps=4", "trainer.val_every=2", "trainer.progress=false",
    "trainer.sample_length=0", "monitor.num_sequences=1", "logger=none",
]  # fmt: skip
NOT_RUN = {"wandb", "make"}  # other people's programs


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A reader's folder: her book, and the run of Getting started."""
    folder = tmp_path_factory.mktemp("desk")
    book = "".join(f"It was {i}. Nothing is lost in {i * i} texts.\n" for i in range(400))
    (folder / "my_book.txt").write_text(book)
    (folder / "my_other_book.txt").write_text(book[::-1])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        torch.set_default_dtype(torch.float32)
        words = ["data=text_file", "data.path=my_book.txt", "run.name=first"]
        fit(build_run(load_config([*words, *SMALL])))
    return folder


def run_line(line: str) -> None:
    """One line of a shell block: a command of ours, with small sizes where it trains."""
    words = shlex.split(line, comments=True)
    if not words or words[0] in NOT_RUN:
        return
    assert words[0] == "python", line
    command = words[1].removesuffix(".py")
    if command == "train":
        brought = ("model.", "data.seq_len") if "init_from=" in line else ()
        fit(build_run(load_config([*words[2:], *(w for w in SMALL if not w.startswith(brought))])))
        return
    with pytest.raises(SystemExit) as end:
        commands.run(*commands.COMMANDS[command], words[2:])
    assert end.value.code == 0, line


@pytest.mark.filterwarnings("ignore")  # Lightning's advice
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_every_block_of_a_tutorial_runs(
    page: Path, desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(desk)
    monkeypatch.setattr(commands, "stop_on_signals", lambda: None)
    torch.set_default_dtype(torch.float32)
    namespace: dict[str, object] = {}
    for language, text in BLOCKS.findall(page.read_text(encoding="utf-8")):
        if language == "python":
            exec(text, namespace)
        else:
            for line in text.splitlines():
                run_line(line)


def test_every_page_is_in_the_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")}
    assert pages == set(re.findall(r"[\w/-]+\.md", menu))
