"""The configuration: what is accepted, what is refused and how; and that every run repeats."""

import random
import shlex
import sys
from dataclasses import asdict
from typing import Any

import pytest

from invformer.config import load
from invformer.config.schema import ModelConfig, RunConfig, TrainConfig
from invformer.config.section import Root, options, required_part
from invformer.config.trained import EvaluateConfig
from invformer.errors import ConfigurationError
from tests.support.processes import ROOT

PRESETS = sorted((ROOT / "configs").glob("*/*.yaml"))
EVALUATE = ["checkpoint=checkpoints/a"]


def train(*words: str) -> TrainConfig:
    return load.load_config(words)


def evaluate(*words: str) -> EvaluateConfig:
    return load.load_config([*EVALUATE, *words], EvaluateConfig)


def refusal(*words: str, schema: type[Root] = TrainConfig) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load.load_config(words, schema)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_single_fields_beat_groups_and_groups_beat_the_experiment_in_any_order() -> None:
    words = ["model.d_embedding=7", "model=contractive_l2_paper", "experiment=nanogpt_cpu"]
    for seed in range(6):
        random.Random(seed).shuffle(words)
        model = train(*words).model
        assert (model.d_model, model.certificate, model.d_embedding) == (128, "kim_entry_max", 7)


def test_the_last_of_two_settings_wins_and_an_overruled_preset_leaves_no_trace() -> None:
    assert train("run.seed=1", "run.seed=2").run.seed == 2
    assert train("model=contractive_l2_paper", "model=l2") == train("model=l2")
    assert train("experiment=None") == TrainConfig()


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("--model.d_model=48", 48),
        ("trainer.max_steps=010", 10),
        ("trainer.max_steps=1_000", 1000),
        ("optim.lr=1e-3", 1e-3),
        *((f"optim.grad_clip={word}", None) for word in ("None", "null", "~")),
        *((f"trainer.compile={word}", True) for word in ("on", "YES", "true", "1")),
        ("trainer.deterministic=no", False),
        ("optim.betas=[0.5, 0.6]", [0.5, 0.6]),
        ("logger.tags=['a b', c]", ["a b", "c"]),
        ("logger.tags=[]", []),
        ("logger.name=none", ["none"]),
        ("logger.name=[csv, tensorboard]", ["csv", "tensorboard"]),
        ("model.d_embedding=${model.d_model}", 128),
        *((f"data.path={text}", text) for text in ("010", "on", "1e-3", "1_000", "a=b", "{x: 1}")),
        ('logger.tags=["010"]', ["010"]),
    ],
)
def test_a_value_stays_text_until_it_meets_the_type_of_its_field(word: str, value: Any) -> None:
    section, key = word.removeprefix("--").partition("=")[0].split(".")
    assert getattr(getattr(train(word), section), key) == value


def test_options_that_are_not_set_follow_the_others() -> None:
    steps = [[], ["trainer.max_steps=5"], ["trainer.max_steps=500"], ["optim.warmup_steps=300"]]
    assert [train(*words).warmup_steps for words in steps] == [100, 1, 51, 300]
    model = ModelConfig(d_model=24)
    assert (model.feed_forward_width, model.embedding_width, model.head_width) == (96, 8, 3)
    assert train("model=contractive_l2_paper", "model.d_model=48").model.embedding_width == 48


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("modl.d_model=3", "unknown key 'modl.d_model': did you mean 'model.d_model'?"),
        ("d_model=3", "did you mean 'model.d_model'?"),
        ("optim.learning_rate=3e-3", "did you mean 'optim.lr'?"),
        ("optim.LR=3e-3", "did you mean 'optim.lr'?"),
        ("modl=l2", "unknown key 'modl': did you mean 'model'?"),
        ("model=dot_prodct", "no preset 'dot_prodct': did you mean 'dot_product'?"),
        ("model.certificate=token_mx", "'token_mx' is not token_max|kim_entry_max|"),
        ("optim.beta[0]=.5", "did you mean 'optim.betas'?"),
        ("zzzz=3", "unknown key 'zzzz': see --help"),
        ("contractive_l2", "'contractive_l2' is not key=value: did you mean model=contractive_l2?"),
        ("--seed", "did you mean run.seed=VALUE?"),
        ("--trainer", "did you mean trainer=NAME?"),
        ("3", "'3' is not key=value: see --help"),
        ("model=../data/ptb", "no preset '../data/ptb'"),
        ("trainer.max_steps=1e3", "trainer.max_steps: '1e3' is not integer"),
        ("run.root=~", "run.root: '~' cannot be used as a value"),
        ("data.path=", "data.path: is empty; give at least one character"),
        ("model.d_ff=${model.width}", "model.d_ff: Interpolation key 'model.width' not found"),
        ("monitor=on", "monitor: is a section: set a field of it, such as monitor.enabled=VALUE"),
        ("experiment=other.yaml", "other.yaml: No such file or directory"),
    ],
)
def test_a_typo_is_answered_with_the_nearest_name(word: str, says: str) -> None:
    assert says in refusal(word)


NONSENSE = [
    "model.lipschitz_target=1.5", "model.lipschitz_target=nan", "model.num_heads=5",
    "model.d_model=96.0", "model.d_model=true", "model.d_model=None", "model.d_model=[96]",
    "model.d_embedding=129", "model.dropout=1 model=l2",
    "model.certificate=null", "model.certificate=causal model=dot_product",
    "model.strictly_causal=true", "model.strictly_causal=true model=l2", "model.input_radius=0",
    "model.input_radius=2 model=dot_product", "model.input_radius=2 model=contractive_l2_paper",
    "model.activation_norm=true", "model.written_channels=8 model.diagonal_scaling=false",
    "model.written_channels=129", "model.feed_forward_kernel=2",
    "model.feed_forward_kernel=2 model=contractive_bounded", "model.activation=elu",
    "data.val_fraction=0", "data.val_fraction=0.5 data.test_fraction=0.5",
    "data.path= data=text_file", "data.batch_size=7 trainer.devices=2",
    "data.batch_size=1 data.seq_len=1", "optim.lr=inf", "optim.lr=0", "optim.lr=1,5",
    "optim.betas=[0.9]", "optim.betas=[0.9,1]", "optim.betas=[0.9,[0.9]]", "optim.betas=[0.9,0.99",
    "optim.betas=0.9", "optim.warmup_steps=11 trainer.max_steps=10",
    "trainer.max_steps=" + "9" * 5000, "trainer.max_time=3m", "trainer.precision=16",
    "trainer.compile=2", "logger.project=a/b",
    "logger.tags=[" + "x" * 65 + "]", "logger.tags=[" + "[" * 1000, "run.name=..", "run.name=a/b",
    "run.name=-rf", "run.name=.hidden", "run.name=" + "a" * 101, "run.seed=4294967296",
    "run.root=None", "run.name=${oc.env:HOME}",
]  # fmt: skip


@pytest.mark.parametrize("words", NONSENSE, ids=lambda words: words[:40])
def test_nonsense_is_refused_by_its_key(words: str) -> None:
    message = refusal(*words.split())
    assert message.startswith(words.partition("=")[0])
    assert len(message) < 250


@pytest.mark.parametrize(
    "words",
    [
        "model.lipschitz_target=0.9 model=dot_product",
        "model.d_embedding=96 experiment=nanogpt_cpu model=dot_product",
        "optim.muon_lr=1e-2 optim=adamw",
        *(f"{word} init_from=a" for word in ("model=l2", "model.d_ff=3", "data.seq_len=8")),
    ],
)
def test_an_override_that_the_chosen_model_ignores_is_refused(words: str) -> None:
    key = words.partition("=")[0]
    assert refusal(*words.split()).startswith(f"{key}: would be ignored: ")


def test_settings_of_a_file_for_another_model_are_ignored_and_not_repeated(tmp_path) -> None:
    text = "model: {name: l2, certificate: null, lipschitz_target: 0.9, input_radius: 2}"
    (tmp_path / "mine.yaml").write_text(text)
    command = load.command_line(train(f"experiment={tmp_path}/mine.yaml"))
    assert command == "python train.py model.name=l2 model.certificate=null"


def test_evaluation_takes_the_presets_of_the_data_and_needs_a_checkpoint() -> None:
    assert evaluate("data=ptb").data.name == "ptb"
    assert refusal(schema=EvaluateConfig).startswith("checkpoint: give one")


def test_python_is_held_to_the_same_ranges_as_a_command_line() -> None:
    with pytest.raises(ConfigurationError, match=r"model.lipschitz_target: 1.5 is not in"):
        ModelConfig(lipschitz_target=1.5)
    with pytest.raises(ConfigurationError, match=r"run.root: .* cannot be used as a value"):
        RunConfig(root="${oc.env:HOME}")


def test_absent_values_take_their_defaults_and_numbers_are_not_rounded() -> None:
    assert load.from_dict({"model": {"d_model": 48}}) == train("model.d_model=48")
    with pytest.raises(ConfigurationError, match=r"model\.d_model: 48\.5 is not integer"):
        load.from_dict({"model": {"d_model": 48.5}})


def test_an_option_that_is_gone_is_read_where_its_value_is_the_one_that_is_left() -> None:
    trainer = {"strategy": "ddp", "devices": 2}
    assert load.from_dict({"trainer": trainer}).trainer.devices == 2
    assert load.from_dict({"model": {"attention_kernel": "blocked"}}) == train()
    assert "'blocked' is not auto|math" in refusal("model.attention_kernel=blocked")
    baseline = {"name": "dot_product", "certificate": None, "diagonal_scaling": False}
    assert load.from_dict({"model": baseline}).model.certificate is None  # null is no absent value
    for refused in ({"trainer": {"strategy": "fsdp"}}, {"trainer": {"strategi": "ddp"}}):
        with pytest.raises(ConfigurationError, match=r"unknown key .trainer\.strateg"):
            load.from_dict(refused)
    assert refusal("trainer.strategy=fsdp").startswith("unknown key 'trainer.strategy'")


def test_the_command_names_only_what_differs_from_the_defaults() -> None:
    assert load.command_line(train()) == "python train.py"
    assert load.command_line(train("run.seed=0", "run.seed=3")) == "python train.py run.seed=3"
    config = evaluate("data.path=To be, or 'not'")
    assert shlex.split(load.command_line(config))[2:] == [*EVALUATE, "data.path=To be, or 'not'"]


def test_the_command_keeps_every_character_of_a_list() -> None:
    numbers = [*range(1, 0x3000), *range(0x3000, 0xD800, 97), *range(0xE000, 0x10200), 0x1F600]
    text = "".join(map(chr, numbers))
    config = train()
    config.logger.tags = [text[start : start + 60] for start in range(0, len(text), 60)]
    config.logger.tags += ["a\x7fb", "a\x85b", "a\x85", "a\u2028 b", "\ufeff", "\ufffe"]
    (word,) = shlex.split(load.command_line(config))[2:]
    assert train(word) == config


def test_a_checkpoint_given_again_joins_those_before() -> None:
    config = evaluate("checkpoint=[b]: c", "checkpoint=010")
    assert config.checkpoint == ["checkpoints/a", "[b]: c", "010"]
    assert load.load_config(shlex.split(load.command_line(config))[2:], EvaluateConfig) == config
    assert load.from_dict(asdict(config), EvaluateConfig) == config


def test_help_shows_every_preset_and_every_field_with_default_interval_and_meaning() -> None:
    for path in PRESETS:
        assert path.stem in load.help_text()
    for schema in (TrainConfig, EvaluateConfig):
        text = load.help_text(schema)
        for key, f in options(schema):
            assert f"\n  {key}=" in text
            assert f.metadata["help"] in text
            kind = required_part(f.type)
            if kind in (int, float) or kind == list[float]:
                assert f.metadata["within"], key
    assert "\n  config      for experiment: " in load.help_text()
    assert "config " not in load.help_text(EvaluateConfig)
    assert (
        "model.lipschitz_target=0.5\n      number in [1e-6, 1): c, the largest" in load.help_text()
    )


def test_commands_are_named_as_they_were_typed(monkeypatch) -> None:
    config = load.load_config(["model=dot_product"])
    assert load.command_line(config).startswith("python train.py ")
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/invformer", "train"])
    assert load.command_line(config).startswith("invformer train ")
    assert load.help_text().startswith("usage: invformer train ")


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["nonsense", "-h"], 0, load.help_text()),
        (["experiment=ptb_kim", "run.seed=7", "--print-config"], 0,
         load.to_yaml(load.load_config(["experiment=ptb_kim", "run.seed=7"]))),
        (["model.d_modl=3", "--print-config"], 2,
         "error: unknown key 'model.d_modl': did you mean 'model.d_model'?"),
    ],
)  # fmt: skip
def test_help_the_configuration_and_errors_end_the_program(
    words: list[str], code: int, says: str, capsys
) -> None:
    with pytest.raises(SystemExit) as ended:
        load.parse_or_exit(words)
    assert ended.value.code == code
    out, err = capsys.readouterr()
    assert (err if code else out).rstrip("\n") == says.rstrip("\n")
    assert not (out if code else err)
