"""The front door: the commands as typed, and the trained model as imported."""

import io
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import save_file

import invformer
from invformer import commands
from invformer.report.recovered_text import Shown
from invformer.trained.model import RecoveredText
from tests.support import fake_hub
from tests.support.processes import python
from tests.support.small_runs import fitted, options, tiny_run

pytestmark = pytest.mark.usefixtures("single_precision")


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A tiny trained run."""
    return tiny_run(tmp_path_factory.mktemp("front door"))


Typed = Callable[..., str]


@pytest.fixture
def typed(run, command, capsys) -> Typed:
    """Run a command on the run, and return what it prints."""

    def typed(name: str, *words: str, code: int = 0) -> str:
        ended = command(name, f"checkpoint={run}", *words)
        said = capsys.readouterr()
        assert ended == code, said.err
        return said.err if code else said.out

    return typed


def test_a_sample_repeats_by_its_seed(typed) -> None:
    words = ["prompt=7 times", "length=20", "num_samples=2", "top_k=5", "top_p=0.9"]
    said = typed("sample", *words, "seed=1")
    texts = said.split("\n---\n")
    assert [text[:7] for text in texts[:2]] == ["7 times"] * 2
    assert len(texts[0]) == 27
    assert texts[0] != texts[1]
    assert typed("sample", *words, "seed=1") == said
    assert typed("sample", *words, "seed=3") != said


@pytest.mark.parametrize("text", ["???", "null", "~", "${model.d_model}", "[1]", "a=b"])
def test_a_text_is_taken_as_it_is_typed(typed, text: str) -> None:
    assert typed("sample", f"prompt={text}", "length=1").startswith(text)
    assert re.search(
        rf"^  text +{re.escape(text)}$", typed("invert", f"text={text}", "prove=false"), re.M
    )


def test_a_standard_input_that_is_closed_has_no_text(typed, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    assert typed("sample", "length=3").startswith("\n")
    assert "standard input: there is no text to invert" in typed("invert", code=3)


def test_a_sample_sends_a_terminal_no_commands(typed, monkeypatch) -> None:
    trained = SimpleNamespace(stream=lambda *_, **__: iter("a\x1b[31m"))
    monkeypatch.setattr("invformer.trained.model.load", lambda *_: trained)
    assert typed("sample", "prompt=\x07") == r"\x07a\x1b[31m" + "\n"


def test_a_file_or_pipe_is_inverted_with_its_line_ends(typed, tmp_path, monkeypatch) -> None:
    content = b"\xef\xbb\xbf7 times\r\n7"
    (tmp_path / "text.txt").write_bytes(content)
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(content)))
    for words in ([f"file={tmp_path / 'text.txt'}"], []):
        assert re.search(r"^  text +7 times␍⏎7$", typed("invert", *words), re.M)
    (tmp_path / "text.txt").write_text("7", encoding="utf-16")
    assert "iconv -f utf-16" in typed("invert", f"file={tmp_path / 'text.txt'}", code=3)


@pytest.mark.parametrize(
    ("name", "words"),
    [("sample", []), ("sample", ["prompt=-"]), ("invert", ["text=-"]), ("invert", ["file=-"])],
)
def test_a_pipe_or_a_dash_is_standard_input(typed, name, words, monkeypatch) -> None:
    content = b"\xef\xbb\xbf7 times 7"  # with a byte order mark, which is no text
    piped = SimpleNamespace(buffer=io.BytesIO(content), isatty=lambda: bool(words))
    monkeypatch.setattr(sys, "stdin", piped)
    said = typed(name, *words, *(["length=3"] if name == "sample" else []))
    assert said.startswith("7 times 7") or "  text       7 times 7\n" in said


LONG = "7 times 7 is 49; 8 times 8 is 64; " * 6


def test_a_long_text_is_shown_at_once_and_again_with_what_is_proven(typed) -> None:
    said = typed("invert", f"text={LONG}")
    nearest, _, proof = said.partition("  proven")
    assert nearest.count("text") == 3
    assert nearest.count("recovered") == 3 + 1
    assert said.count("  text  ") == 3
    assert proof.count("✓" * 60) == 3
    said = typed("invert", f"text={LONG}", "prove=false")
    assert "✓" not in said
    assert f"{len(LONG)} of {len(LONG)} characters recovered, 0 of {len(LONG)} proven" in said


def test_what_was_proven_before_a_signal_is_printed(run, command, capsys, monkeypatch) -> None:
    watch = Shown.__call__

    def stopping(self: Shown, start: int, found: RecoveredText) -> None:
        watch(self, start, found)
        if start and found.tried:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(Shown, "__call__", stopping)
    monkeypatch.setattr("invformer.processes.exit.stopping", threading.Lock())
    assert command("invert", f"checkpoint={run}", f"text={LONG}") == 130
    said = capsys.readouterr()
    assert said.err == "error: stopped by SIGINT\n"
    ((proven, tried),) = re.findall(
        r"(\d+) of 204 proven \(the first (\d+) of 204 were tried", said.out
    )
    assert 16 < int(tried) == int(proven) < 204
    assert said.out.replace("✓ proven", "").count("✓") == int(proven)


def test_without_an_inverse_only_the_search_finds_a_text(typed, run, tmp_path) -> None:
    size = ("model=dot_product", "model.d_model=24", "monitor.enabled=false", "trainer.max_steps=1")
    words = [f"data.path={run.parent / 'squares.txt'}", f"run.root={tmp_path}"]
    fitted(options(run.parent, "plain", *size, *words))
    plain = f"checkpoint={tmp_path / 'plain'}"
    said = typed("invert", plain, "text=7 times 7", "prove=false", code=2)
    assert said.startswith("error: prove: without an inverse")
    assert "  text       7 times 7\n  recovered  7 times 7\n  proven     " in typed(
        "invert", plain, "text=7 times 7"
    )


def test_damaged_states_prove_less_and_nothing_wrong(typed, tmp_path) -> None:
    saved = tmp_path / "states.safetensors"
    said = typed("invert", "text=12 times 12", "noise=3", f"save_states={saved}")
    assert "other symbols would have a state" not in said
    assert re.search(r"^error \d.* at the embedding, the solver's part at most ", said, re.M)
    assert "recovered  " in typed("invert", f"states={saved}")
    assert "11 of 11 characters recovered" in typed("invert", "text=12 times 12", "bits=16")
    said = typed("invert", "text=12 times 12", "bits=3")
    assert "11 of 11 characters recovered, 11 of 11 proven\nproven: every text whose " in said
    assert re.search(
        r"^if no forward pass rounds an entry by more than \S+: assumed, not", said, re.M
    )


@pytest.mark.parametrize(
    ("name", "words", "code", "says"),
    [
        ("sample", ["tempreature=1"], 2, "did you mean 'temperature'?"),
        ("invert", ["text=a", "file=b"], 2, "file: give one of text, file and states"),
        ("invert", ["file=missing"], 3, "error: missing: No such file or directory\n"),
        ("invert", ["states=missing"], 3, "missing: not a safetensors file of states"),
        ("invert", ["text=a", "save_states=."], 7, ": cannot be written (not a regular file)"),
        ("export", ["out=new", "bits=9"], 2, "bits: 9 is not in [2, 8]"),
        ("invert", ["text=a", "device=tpu"], 2, "device: 'tpu' is not auto, cpu"),
    ],
)
def test_a_value_that_does_not_fit_is_named(
    typed, name: str, words: list[str], code: int, says: str
) -> None:
    said = typed(name, *words, code=code)
    assert says in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        *(([name, "chekpoint=a"], 2, "unknown key 'chekpoint'") for name in commands.COMMANDS),
        (["train", "data=text_file", "data.path=no.txt"], 3, "no.txt: no such file or folder"),
        (["train", "data=text_file", "data.path=-"], 3, "data.path: - is standard input, which"),
        (["export", "checkpoint=configs", "out=docs"], 7, "docs is not empty; name a new folder"),
        *(
            ([*name, "data=text_file", "data.path=quotes"], 3, "quotes: byte 0x93 at offset 2")
            for name in (["train"], ["evaluate", "checkpoint=docs"])
        ),
        (["train", "data.path=caf\udce9"], 2, "data.path: its name is not UTF-8; rename it"),
        (["train", "config=~nobody-here/a.yaml"], 2, "~nobody-here/a.yaml: No such file"),
        (["sample", "checkpoint=configs/no"], 4, "configs/no does not exist"),  # not on the Hub
        (["train", "init_from=configs/no"], 4, "configs/no does not exist"),
    ],
    ids=lambda words: ascii(words) if isinstance(words, list) else "",
)
def test_a_users_mistake_is_answered_in_one_line_with_its_exit_code(
    words: list[str], code: int, says: str, tmp_path
) -> None:
    """Before anything heavy is loaded."""
    for folder in ("configs", "docs"):
        (tmp_path / folder / "inner").mkdir(parents=True)
    (tmp_path / "quotes").write_bytes("a “text” — typed".encode("windows-1252"))
    script = (
        "import sys; from invformer import commands\n"
        "try: commands.run(*commands.COMMANDS[sys.argv[1]], sys.argv[2:])\n"
        "finally: assert not {'torch', 'numpy', 'lightning', 'wandb', 'datasets', 'jaxtyping',"
        " 'matplotlib'} & set(sys.modules)"
    )
    done = python("-c", script, *words, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert done.stderr.startswith(f"error: {says}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("policy", "spins"), [(None, commands.SPINS), ("active", None)])
def test_threads_sleep_soon_unless_the_environment_says_how_they_wait(
    typed, monkeypatch, policy, spins
) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    if policy is not None:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    typed("sample", "prompt=a", "length=1")
    assert os.environ.get("GOMP_SPINCOUNT") == spins


def test_the_console_script_has_every_command(monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["invformer", "--version"])
    commands.main()
    assert capsys.readouterr().out == f"invformer {invformer.__version__}\n"
    monkeypatch.setattr(sys, "argv", ["invformer", "smaple"])
    with pytest.raises(SystemExit) as end:
        commands.main()
    assert end.value.code == 2
    assert "did you mean 'sample'?" in capsys.readouterr().err


def test_an_export_gives_the_same_logits_and_an_honest_card(run, typed, tmp_path) -> None:
    exported = tmp_path / "shared"
    typed("evaluate", "evaluate.lipschitz_sequences=0")
    typed("export", f"out={exported}")
    model, original = invformer.load(exported), invformer.load(run)
    tokens = torch.arange(1, 9)[None]
    assert torch.equal(model.network(tokens), original.network(tokens))
    assert model.certificate == original.certificate
    card = ModelCard((exported / "README.md").read_text())
    report, text = original.evaluation, card.text
    assert report is not None
    (result,) = card.data.eval_results or []  # from model-index
    assert (result.dataset_name, result.metric_value) == ("text_file", round(report.bpc, 4))
    said = ("5-gram", "proven to be at most 0.", "python train.py", "invformer.load('shared')")
    assert [word for word in (f"val bpc: {report.bpc:.4f}", *said) if word not in text] == []
    assert not re.search(r"None|TODO|\{|nan", text)


def test_the_hub_takes_a_model_and_gives_it_back(run, tmp_path) -> None:
    """Sampling and inverting load no training framework."""
    few = "evaluate.lipschitz_sequences=0 evaluate.inversion_sequences=0"
    lines = (
        f"export 'checkpoint={run}' out=out hub=me/squares",
        "sample checkpoint=me/squares prompt=1 length=3",
        f"evaluate checkpoint=me/squares {few}",
    )
    program = (
        "import shlex, sys, torch, invformer\n"
        "from invformer.commands import COMMANDS, run as main\n"
        "run, *lines = sys.argv[1:]; tokens = torch.arange(1, 9)[None]\n"
        "original = invformer.load(run, 'cpu')\n"
        "original.invert(original.encode(original.generate('7 times', 3)))\n"
        "loaded = {'lightning', 'wandb', 'datasets', 'matplotlib'} & set(sys.modules)\n"
        "assert not loaded, loaded\n"
        "for name, *words in map(shlex.split, lines):\n"
        "    try: main(*COMMANDS[name], words)\n"
        "    except SystemExit as end: assert not end.code, end.code\n"
        "model = invformer.load('me/squares', 'cpu')\n"
        "assert torch.equal(model.network(tokens), original.network(tokens))\n"
        "invformer.load('me/nothing')"
    )
    with fake_hub.serve(tmp_path) as environment:
        done = python("-c", program, str(run), *lines, cwd=tmp_path, **environment)
    assert f"uploaded to {environment['HF_ENDPOINT']}/me/squares\n" in done.stdout, done.stderr
    said = "CheckpointError: me/nothing: no folder here, and no model on the Hub"
    assert said in done.stderr.splitlines()[-1]
    assert "invformer.load('me/squares')" in (tmp_path / "models/me/squares/README.md").read_text()
    assert json.loads((tmp_path / "me--squares.evaluation.json").read_text())["step"] == 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_states_of_any_format_are_read_beside_others_and_as_a_batch_of_one(
    run, typed, tmp_path, dtype: torch.dtype
) -> None:
    z, file = invformer.load(run).encode("1 2 34").to(dtype), tmp_path / "states.safetensors"
    for held, *damage in (
        ({"z": z},), ({"z": z[None]}, "bits=8"), ({"other": -z, "states": z.clone()}, "noise=0.01"),
    ):  # fmt: skip
        save_file(held, file)
        assert "recovered  1 2 34" in typed("invert", f"states={file}", *damage)


def test_the_package_lists_what_it_offers() -> None:
    assert {"load", "layers", "certify", "local_constants", "LipschitzMonitor"} <= {*dir(invformer)}
    assert all(hasattr(invformer, name) for name in dir(invformer))
