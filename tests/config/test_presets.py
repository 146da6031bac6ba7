"""Presets, experiments that extend each other, broken files, random command lines."""

import string
from dataclasses import asdict, fields
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from invformer.config import load as module
from invformer.config.load import CONFIGS, from_dict, load_config, to_yaml
from invformer.config.schema import TrainConfig
from invformer.config.section import Root, options
from invformer.config.trained import EvaluateConfig
from invformer.errors import ConfigurationError

PRESETS = sorted(module.CONFIGS.glob("*/*.yaml"))
MODELS = [path.stem for path in PRESETS if path.parent.name == "model"]


def load(*words: str) -> TrainConfig:
    return load_config(words)


@pytest.fixture
def experiments(tmp_path, monkeypatch) -> Path:
    """The folder of the experiments, empty, beside which there are no other presets."""
    monkeypatch.setattr(module, "CONFIGS", tmp_path)
    (tmp_path / "experiment").mkdir()
    return tmp_path / "experiment"


def write(folder: Path, **texts: str | bytes) -> None:
    for name, text in texts.items():
        content = text if isinstance(text, bytes) else text.encode()
        (folder / f"{name}.yaml").write_bytes(content)


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: f"{path.parent.name}={path.stem}")
def test_every_preset_loads_and_describes_itself(path: Path) -> None:
    extra = ["data.path=book.txt"] if path.stem == "text_file" else []
    config = load(f"{path.parent.name}={path.stem}", *extra)
    assert from_dict(asdict(config)) == config
    assert path.read_text(encoding="utf-8").startswith("# ")


def test_the_default_presets_say_what_the_schema_says() -> None:
    words = ["model=contractive_l2", "data=python_docs", "optim=muon", "trainer=default"]
    assert load(*words, "logger=wandb") == TrainConfig()
    text = (module.CONFIGS / "trainer/default.yaml").read_text(encoding="utf-8")
    for f in fields(TrainConfig().trainer):
        assert f"\n{f.name}: " in text
    names = {path.stem for path in PRESETS if path.parent.name == "data"}
    assert names == set(get_args(dict(options(TrainConfig))["data.name"].type))


@pytest.mark.parametrize("name", MODELS)
def test_every_model_takes_the_place_of_an_experiments_own_and_keeps_its_size(name: str) -> None:
    own, taken = (load(*e, f"model={name}").model for e in ([], ["experiment=nanogpt_gpu"]))
    assert (taken.name, taken.certificate, taken.d_model) == (own.name, own.certificate, 384)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_every_optimiser_brings_its_own_rates_after_an_experiments(name: str) -> None:
    assert load("experiment=ptb_kim", f"optim={name}").optim == load(f"optim={name}").optim


def test_an_experiment_may_be_a_path(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, mine="base: nanogpt_cpu\nrun: {seed: 4}\n")
    config = load("experiment=nanogpt_cpu", "run.seed=4")
    assert load("experiment=mine.yaml") == load(f"experiment={tmp_path}/mine.yaml") == config


@pytest.mark.parametrize("name", ["moved", "moved.yaml"])
def test_a_runs_folder_names_the_run_that_is_in_it_now(name: str, tmp_path) -> None:
    (tmp_path / name).mkdir()
    config = load("run.seed=4", "run.name=first")
    write(tmp_path / name, config=to_yaml(config))
    assert load(f"config={tmp_path}/{name}/config.yaml") == config
    place = f"run.root={tmp_path}", f"run.name={name}"
    assert load(f"config={tmp_path}/{name}") == load("run.seed=4", *place)
    assert load("run.name=other", f"config={tmp_path}/{name}").run.name == "other"


def test_text_keeps_its_letters_in_a_file_and_blank_is_null(experiments) -> None:
    write(experiments, mine="run: {name: 010}\ndata:\n  path:\nmodel: {d_ff: 010}\n")
    config = load("experiment=mine")
    assert (config.run.name, config.data.path, config.model.d_ff) == ("010", None, 10)


def test_an_empty_file_changes_nothing(experiments) -> None:
    for text in ("", "# nothing\n", "model:\n"):
        write(experiments, mine=text)
        assert load("experiment=mine") == TrainConfig()
    with pytest.raises(ConfigurationError, match="there is no folder configs/model"):
        load("model=l2")


def test_an_experiment_changes_what_it_extends(experiments) -> None:
    write(
        experiments,
        grandparent="model: {d_model: 48, num_layers: 3}\noptim: {betas: [0.5, 0.6], lr: 1e-3}",
        parent="model: {num_layers: 2}\nbase: grandparent\noptim: {betas: [0.7, 0.8]}",
        child="base: parent\nmodel: {d_embedding: '${model.d_model}', d_model: 24}",
        same="base: parent",
    )
    config = load("experiment=child")
    assert (config.model.d_model, config.model.num_layers, config.model.d_embedding) == (24, 2, 24)
    assert (config.optim.betas, config.optim.lr) == ([0.7, 0.8], 1e-3)
    assert load("experiment=child", "model.num_layers=7").model.num_layers == 7
    assert load("experiment=same") == load("experiment=parent")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model: {d_modl: 3}", "mine.yaml: unknown key 'model.d_modl': did you"),
        ("model: {d_model: 3, d_model: 4}", "mine.yaml: line 1: a key is given twice"),
        ("model:\n  d_model: 3\n d_ff: 3", "mine.yaml: line 3"),
        ("model: 3", "mine.yaml: model: '3' does not map fields to values"),
        ("- model", "mine.yaml: the file: ['model'] does not map fields"),
        ("run: {name: '${oc.env:HOME}'}", "mine.yaml: run.name: '${oc.env:HOME}'"),
        ("a: &a [*a]", "mine.yaml: line 1"),
        (b"\xff\xfe", "mine.yaml: "),
        ("base: zzz", "mine.yaml: base: no preset 'zzz': there are mine, other"),
        ("base: ../model/l2", "mine.yaml: base: no preset '../model/l2'"),
        ("base: [parent]", "mine.yaml: base: ['parent'] is not the name of an experiment"),
        ("base: other", "other.yaml: base: experiments extend each other: configs/experiment/mine"),
        ("base: parent\nmodel: {base: parent}", "mine.yaml: unknown key 'model.base'"),
        ("base: wrong", "wrong.yaml: unknown key 'model.d_modl'"),
    ],
)
def test_a_broken_file_is_refused_by_name(experiments, text: str | bytes, says: str) -> None:
    write(experiments, mine=text, other="base: mine", parent="", wrong="model: {d_modl: 3}")
    with pytest.raises(ConfigurationError) as caught:
        load("experiment=mine")
    assert str(caught.value).startswith(f"configs/experiment/{says}")
    assert "\n" not in str(caught.value)


SCHEMAS = (TrainConfig, EvaluateConfig)
KEYS = [key for schema in SCHEMAS for key, _ in options(schema)]
WORDS = [f"{path.parent.name}={path.stem}" for path in CONFIGS.glob("*/*.yaml")]
VALUES = [
    "", " ", "=", "null", "None", "~", "true", "off", "0", "-0", "1", "-1", "7", "010", "0x10",
    "1_000", "1e3", "1e-3", "1e400", "nan", "inf", "-inf", ".5", "5.", "1,5", "9" * 5000, "3.0",
    "auto", "cpu", "l2", "token_max", "[", "[]", "[0.9]", "[0.9, 0.99]", "[0.9, [0.99]]", "[1, 2",
    "[[]]", "[nan, 1]", "{}", "{a: {b: [1, {c: 2}]}}", "}", "- a", "a: b", "? x", "&a 1", "*a",
    "!!int 3", "!!python/object/apply:os.system [id]", "${", "${}", "${model.d_model}",
    "${oc.env:WANDB_API_KEY}", "${oc.decode:1}", "${a.b.c}", "`id`", "???", "名前", "🙂", "\x00",
    "a\nb", "\t", "\ud800", "\u202e", "..", "/etc/passwd", "a\\b", "%s%n", "'", '"', "'a", '"\\x"',
    "a #b", "x" * 300, "2021-01-01", "12:30:45", "<<", "@", "|", "python_docs", "adamw",
    "http://x/y",
]  # fmt: skip
STRANGE_KEYS = [
    "", " ", ".", "a.b.c.d", "model", "model.", ".model", "model..d_model", "model.d_model.x",
    "model.d_model[0]", "optim.betas[0]", "optim.betas[-1]", "optim.betas[x]",
    "optim.betas[999999999999]", "Model.d_model", "модель", "model.d_modl", "${model}",
    "__class__", "model.__init__", "model.key", "program", "groups", "experiment", "data", "run",
    "run.run", "\x00", "--", "-",
]  # fmt: skip


def command_lines(schema: type[Root]) -> st.SearchStrategy[list[str]]:
    """Words that are more often nearly right than not."""
    known = [key for key, _ in options(schema)]
    key = st.sampled_from(known) | st.sampled_from([*known, *STRANGE_KEYS, *TrainConfig.groups])
    value = st.sampled_from(VALUES) | st.integers(1, 64)
    setting = st.builds("{}{}={}".format, st.sampled_from(["", "--"]), key, value)
    word = setting | setting | st.sampled_from(WORDS) | st.text(string.printable, max_size=12)
    return st.lists(word, min_size=1, max_size=5)


@pytest.mark.parametrize("schema", SCHEMAS)
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(data=st.data())
def test_a_random_command_line_is_valid_or_refused_by_name(
    schema: type[Root], data: st.DataObject
) -> None:
    needed = ["checkpoint=checkpoints/first"] if schema is EvaluateConfig else []
    line = [*needed, *data.draw(command_lines(schema))]
    try:
        config = load_config(line, schema)
    except ConfigurationError as error:
        message = str(error)
        assert "\n" not in message
        assert len(message) < 1000
        assert names_what_is_wrong(line, message), message
    else:
        assert from_dict(asdict(config), schema) == config


def names_what_is_wrong(line: list[str], message: str) -> bool:
    """Whether a message names a field, a group, an unknown key, or the word that is no setting."""
    said = [word.removeprefix("--").partition("=")[0] for word in line]
    start = message.partition(": ")[0].rpartition("configs/")[2]
    return (
        start in said
        or start.split("[")[0] in (*KEYS, *TrainConfig.groups)
        or any(key in message for key in KEYS)
        or message.startswith(("unknown key ", "the file"))
        or " is not key=value: " in message
        or "is a section: set a field of it" in message
    )
