"""The configuration: what is accepted, what is refused and how; and that every run repeats."""

import random
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import pytest

from invformer.config import (
    command_line,
    from_dict,
    help_text,
    load_config,
    parse_or_exit,
    to_dict,
    to_yaml,
)
from invformer.config.schema import ModelConfig, OptimConfig, RunConfig, TrainConfig
from invformer.config.section import Root, default_of, options, required_part
from invformer.config.trained import EvaluateConfig
from invformer.errors import ConfigurationError

ROOT = Path(__file__).parents[2]
PRESETS = sorted((ROOT / "configs").glob("*/*.yaml"))
EVALUATE = ["checkpoint=checkpoints/a"]


def train(*words: str) -> TrainConfig:
    return load_config(words, TrainConfig, ROOT)


def evaluate(*words: str) -> EvaluateConfig:
    return load_config([*EVALUATE, *words], EvaluateConfig, ROOT)


def refusal(*words: str, schema: type[Root] = TrainConfig, root: Path = ROOT) -> str:
    with pytest.raises(ConfigurationError) as caught:
        load_config(words, schema, root)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_experiment(root: Path, text: str) -> Path:
    folder = root / "configs" / "experiment"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mine.yaml").write_text(text, encoding="utf-8")
    return root


# --- what is accepted ----------------------------------------------------------------------------


def test_without_arguments_the_schema_speaks_alone() -> None:
    assert train() == TrainConfig()
    assert evaluate() == EvaluateConfig(checkpoint=["checkpoints/a"])


@pytest.mark.parametrize("word", ["model.d_model=48", "--model.d_model=48"])
def test_a_dotted_key_sets_one_field_with_or_without_hyphens(word: str) -> None:
    assert train(word) == TrainConfig(model=ModelConfig(d_model=48))


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: f"{path.parent.name}={path.stem}")
def test_every_preset_loads_and_describes_itself(path: Path) -> None:
    extra = ["data.path=book.txt"] if path.stem == "text_file" else []
    config = train(f"{path.parent.name}={path.stem}", *extra)
    assert from_dict(to_dict(config)) == config
    assert path.read_text(encoding="utf-8").startswith("# ")


@pytest.mark.parametrize("group", ["model=contractive_l2", "data=python_docs", "optim=adamw"])
def test_the_default_presets_say_what_the_schema_says(group: str) -> None:
    assert train(group, "trainer=default", "logger=wandb") == TrainConfig()


def test_every_corpus_has_a_preset() -> None:
    names = {path.stem for path in PRESETS if path.parent.name == "data"}
    assert names == set(get_args(dict(options(TrainConfig))["data.name"].type))


def test_the_default_trainer_preset_names_every_field() -> None:
    text = (ROOT / "configs/trainer/default.yaml").read_text(encoding="utf-8")
    for f in fields(TrainConfig().trainer):
        assert f"\n{f.name}: " in text


def test_single_fields_beat_groups_and_groups_beat_the_experiment_in_any_order() -> None:
    words = ["model.d_embedding=7", "model=contractive_l2_paper", "experiment=nanogpt_cpu"]
    for seed in range(6):
        random.Random(seed).shuffle(words)
        model = train(*words).model
        assert (model.d_model, model.certificate, model.d_embedding) == (128, "kim_entry_max", 7)


def test_a_baseline_keeps_the_size_of_the_experiment() -> None:
    model = train("experiment=nanogpt_gpu", "model=dot_product").model
    assert (model.name, model.certificate, model.d_model) == ("dot_product", None, 384)


def test_the_paper_preset_has_no_padding_at_any_width() -> None:
    assert train("model=contractive_l2_paper", "model.d_model=48").model.embedding_width == 48


def test_the_last_of_two_settings_wins_and_an_overruled_preset_leaves_no_trace() -> None:
    assert train("run.seed=1", "run.seed=2").run.seed == 2
    assert train("model=contractive_l2_paper", "model=l2") == train("model=l2")


def test_an_experiment_may_be_none() -> None:
    assert train("experiment=None") == TrainConfig()


@pytest.mark.parametrize("word", ["None", "null", "~", ""])
def test_the_words_for_nothing_mean_null(word: str) -> None:
    assert train(f"optim.grad_clip={word}").optim.grad_clip is None


@pytest.mark.parametrize(
    ("word", "schema"),
    [
        ("checkpoint=", EvaluateConfig),
        ("data.path=", EvaluateConfig),
        ("data.path=", TrainConfig),
        ("run.root=", TrainConfig),
    ],
)
def test_an_empty_text_is_a_mistake_and_not_null(word: str, schema: type[Root]) -> None:
    words = [*EVALUATE, word] if schema is EvaluateConfig else [word]
    key = word.partition("=")[0]
    assert refusal(*words, schema=schema) == f"{key}: is empty; give at least one character"


def test_a_field_left_blank_in_a_file_is_null(tmp_path: Path) -> None:
    root = write_experiment(tmp_path, "data:\n  path:\n")
    assert load_config(["experiment=mine"], TrainConfig, root).data.path is None


def test_the_name_none_of_a_choice_is_not_null() -> None:
    assert train("logger=none").logger.name == ["none"]
    assert train("logger=csv", "logger.name=[csv, tensorboard]").logger.name[1] == "tensorboard"


@pytest.mark.parametrize("text", ["010", "on", "yes", "1e-3", "1_000", "null.txt", "a=b", "{x: 1}"])
def test_text_keeps_its_letters(text: str) -> None:
    assert train(f"data.path={text}").data.path == text
    assert train(f'logger.tags=["{text}"]').logger.tags == [text]


def test_text_keeps_its_letters_in_a_file(tmp_path: Path) -> None:
    root = write_experiment(tmp_path, "run: {name: 010}\ndata: {path: on}\nmodel: {d_ff: 010}\n")
    config = load_config(["experiment=mine"], TrainConfig, root)
    assert (config.run.name, config.data.path, config.model.d_ff) == ("010", "on", 10)


def test_numbers_are_read_in_base_ten() -> None:
    assert train("trainer.max_steps=010").trainer.max_steps == 10
    assert train("trainer.max_steps=1_000").trainer.max_steps == 1000
    assert train("optim.lr=1e-3").optim.lr == 1e-3


@pytest.mark.parametrize(
    ("word", "value"), [("on", True), ("YES", True), ("true", True), ("off", False), ("no", False)]
)
def test_a_switch_takes_words(word: str, value: bool) -> None:
    assert train(f"trainer.compile={word}").trainer.compile is value


def test_lists_are_set_whole() -> None:
    assert train("optim.betas=[0.5, 0.6]").optim.betas == [0.5, 0.6]
    assert train("logger.tags=['a b', c]").logger.tags == ["a b", "c"]
    assert train("logger.tags=[]").logger.tags == []


def test_the_warm_up_left_alone_suits_any_length_of_run() -> None:
    assert train().warmup_steps == 100
    assert train("trainer.max_steps=5").warmup_steps == 1
    assert train("trainer.max_steps=500").warmup_steps == 51
    assert train("optim.warmup_steps=300").warmup_steps == 300


def test_widths_left_alone_follow_the_model() -> None:
    assert (ModelConfig(d_model=12).feed_forward_width, ModelConfig(d_ff=5).feed_forward_width) == (
        48,
        5,
    )
    assert ModelConfig(d_model=12).embedding_width == 4
    assert ModelConfig(d_model=2, num_heads=1).embedding_width == 1


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("model.d_modl=3", "unknown key 'model.d_modl': did you mean 'model.d_model'?"),
        ("modl.d_model=3", "did you mean 'model.d_model'?"),
        ("d_model=3", "did you mean 'model.d_model'?"),
        ("optim.learning_rate=3e-3", "did you mean 'optim.lr'?"),
        ("model.heads=3", "did you mean 'model.num_heads'?"),
        ("trainer.epochs=3", "did you mean 'trainer.max_steps'?"),
        ("optim.LR=3e-3", "did you mean 'optim.lr'?"),
        ("modl=l2", "unknown key 'modl': did you mean 'model'?"),
        ("model=dot_prodct", "no preset 'dot_prodct': did you mean 'dot_product'?"),
        ("experiment=nanogpt", "did you mean 'nanogpt_"),
        ("logger=None", "did you mean 'none'?"),
        ("model.certificate=token_mx", "did you mean 'token_max'?"),
        ("optim.beta[0]=.5", "did you mean 'optim.betas'?"),
        ("+model.d_model=3", "did you mean 'model.d_model'?"),
        ("zzzz=3", "unknown key 'zzzz': see --help"),
        ("contractive_l2", "'contractive_l2' is not key=value: did you mean model=contractive_l2?"),
        ("--seed", "did you mean run.seed=VALUE?"),
        ("3", "'3' is not key=value: see --help"),
        ("model=../data/ptb", "no preset '../data/ptb'"),
        ("trainer.max_steps=1e3", "trainer.max_steps: '1e3' is not integer: write 1000"),
        ("model.d_ff=64.0", "model.d_ff: '64.0' is not integer or null: write 64"),
        ("run.root=~", "run.root: '~' cannot be used as a value"),
        ("model.channel_metric=1", "model.channel_metric: is now called model.diagonal_scaling"),
        ("monitor=on", "monitor: is a section: set a field of it, such as monitor.enabled=VALUE"),
    ],
)
def test_a_typo_is_answered_with_the_nearest_name(word: str, says: str) -> None:
    assert says in refusal(word)


NONSENSE = [
    "model.lipschitz_target=1", "model.lipschitz_target=1.5", "model.lipschitz_target=0",
    "model.lipschitz_target=5e-324", "model.lipschitz_target=nan", "model.num_heads=5",
    "model.num_heads=0", "model.d_model=0", "model.d_model=96.0", "model.d_model=0x60",
    "model.d_model=true", "model.d_model=None", "model.d_model=???", "model.d_model=[96]",
    "model.d_embedding=97", "model.d_embedding=0", "model.dropout=0.1", "model.dropout=1 model=l2",
    "model.certificate=null", "model.certificate=causal model=dot_product",
    "model.strictly_causal=true", "model.strictly_causal=true model=l2", "model.input_radius=0",
    "model.input_radius=2 model=dot_product", "model.input_radius=2 model=contractive_l2_paper",
    "model.activation_norm=true", "model.written_channels=8 model.diagonal_scaling=false",
    "model.written_channels=97", "model.feed_forward_kernel=0", "model.feed_forward_kernel=2",
    "model.feed_forward_kernel=2 model=contractive_bounded", "model.activation=elu",
    "model.position_bias=2", "data.val_fraction=0", "data.val_fraction=0.5 data.test_fraction=0.5",
    "data.test_fraction=-0.1", "data.path= data=text_file", "data.seq_len=0",
    "data.max_characters=0", "optim.lr=nan", "optim.lr=inf", "optim.lr=0", "optim.lr=-1e-3",
    "optim.lr=None", "optim.lr=1,5", "optim.betas=[0.9]", "optim.betas=[0.9,1]",
    "optim.betas=[0.9,[0.9]]", "optim.betas=[0.9,None]", "optim.betas=[0.9,0.99",
    "optim.betas=0.9", "optim.betas=", "optim.grad_clip=0", "optim.min_lr_fraction=1.1",
    "optim.warmup_steps=11 trainer.max_steps=10", "trainer.max_steps=0",
    "trainer.max_steps=100000000000000000000", "trainer.max_steps=" + "9" * 5000,
    "trainer.max_time=3m", "trainer.precision=16", "trainer.accelerator=tpu",
    "trainer.num_threads=0",
    "trainer.strategy=deepspeed", "trainer.strategy=fsdp",
    "trainer.strategy=fsdp trainer.devices=2 trainer.precision=64-true", "logger.project=a/b",
    "logger.project=", "logger.tags=[" + "x" * 65 + "]",
    "logger.tags=[" + "[" * 5000, "monitor.every=0", "run.name=..", "run.name=a..b",
    "run.name=a/b", "run.name=-rf", "run.name=.hidden", "run.name=" + "a" * 101, "run.seed=-1",
    "run.seed=4294967296", "run.root=None", "run.name=${oc.env:HOME}", "data.path=${run.name}",
]  # fmt: skip


@pytest.mark.parametrize("words", NONSENSE, ids=lambda words: words[:40])
def test_nonsense_is_refused_by_its_key(words: str) -> None:
    message = refusal(*words.split())
    assert message.startswith(words.partition("=")[0])
    assert len(message) < 250


@pytest.mark.parametrize(
    ("word", "key"),
    [
        ("evaluate.device=cudaa", "evaluate.device"),
        ("evaluate.stride=0", "evaluate.stride"),
        ("evaluate.atol=0", "evaluate.atol"),
        ("evaluate.inversion_dtype=bf16", "evaluate.inversion_dtype"),
        ("data.split=dev", "data.split"),
        ("data.name=text_file", "data.path: text_file needs one"),
        ("evaluate=ptb", "evaluate: is a section: set a field of it"),
        ("model.d_model=3", "unknown key 'model.d_model'"),
        ("checkpoint=", "checkpoint"),
    ],
)
def test_nonsense_is_refused_when_evaluating_too(word: str, key: str) -> None:
    assert refusal(*EVALUATE, word, schema=EvaluateConfig).startswith(key)


@pytest.mark.parametrize(
    "words",
    [
        "model.lipschitz_target=0.9 model=dot_product",
        "model.diagonal_scaling=false model=l2",
        "model.d_embedding=96 experiment=nanogpt_cpu model=dot_product",
        "optim.muon_lr=1e-2",
    ],
)
def test_an_override_that_the_chosen_model_ignores_is_refused(words: str) -> None:
    key = words.partition("=")[0]
    assert refusal(*words.split()).startswith(f"{key}: would be ignored: ")


def test_what_a_file_sets_for_another_model_is_ignored_and_not_repeated(tmp_path: Path) -> None:
    root = write_experiment(tmp_path, "model: {name: l2, certificate: null, lipschitz_target: 0.9}")
    config = load_config(["experiment=mine"], TrainConfig, root)
    assert "lipschitz_target" not in command_line(config)


def test_an_experiment_may_be_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("base: nanogpt_cpu\nrun: {seed: 4}\n", encoding="utf-8")
    config = train("experiment=nanogpt_cpu", "run.seed=4")
    assert train("experiment=mine.yaml") == train(f"experiment={tmp_path}/mine.yaml") == config
    (tmp_path / "config.yml").write_text(to_yaml(config), encoding="utf-8")
    assert train("config=config.yml") == train("experiment=config.yml") == config
    (tmp_path / "run").mkdir()
    (tmp_path / "config.yml").rename(tmp_path / "run" / "config.yaml")
    assert train("config=run") == config
    assert refusal("experiment=other.yaml") == "other.yaml: No such file or directory"


def test_evaluation_takes_the_presets_of_the_data() -> None:
    assert evaluate("data=ptb").data.name == "ptb"


def test_evaluation_needs_a_checkpoint() -> None:
    assert refusal(schema=EvaluateConfig).startswith("checkpoint: give one")
    with pytest.raises(ConfigurationError, match="checkpoint: give one"):
        from_dict({}, EvaluateConfig)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model: {d_modl: 3}", "configs/experiment/mine.yaml: unknown key 'model.d_modl': did you"),
        ("model: {d_model: 3, d_model: 4}", "mine.yaml: line 1: a key is given twice"),
        ("model:\n  d_model: 3\n d_ff: 3", "configs/experiment/mine.yaml: line 3"),
        ("model: 3", "configs/experiment/mine.yaml: model: '3' does not map fields to values"),
        ("- model", "configs/experiment/mine.yaml: the file: ['model'] does not map fields"),
        (
            "model: {d_model: wide}",
            "configs/experiment/mine.yaml: model.d_model: 'wide' is not int",
        ),
        (
            "model: {d_model: {a: 1}}",
            "configs/experiment/mine.yaml: model.d_model: {'a': '1'} is not",
        ),
        (
            "run: {name: '${oc.env:HOME}'}",
            "configs/experiment/mine.yaml: run.name: '${oc.env:HOME}'",
        ),
        (
            "model: {d_ff: '${model.width}'}",
            "model.d_ff: Interpolation key 'model.width' not found",
        ),
        ("model: {d_ff: '${model.name}'}", "model.d_ff: "),
        ("model: {? [a] : 3}", "configs/experiment/mine.yaml: line 1"),
        ("a: &a [*a]", "configs/experiment/mine.yaml: line 1"),
        ("model: {d_model: 1.5}", "'1.5' is not integer"),
        ("\x07", "configs/experiment/mine.yaml: "),
    ],
)
def test_a_broken_preset_is_refused_by_its_file_and_key(
    tmp_path: Path, text: str, says: str
) -> None:
    assert says in refusal("experiment=mine", root=write_experiment(tmp_path, text))


def test_a_preset_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    write_experiment(tmp_path, "")
    (tmp_path / "configs/experiment/mine.yaml").write_bytes(b"\xff\xfe")
    assert "configs/experiment/mine.yaml: " in refusal("experiment=mine", root=tmp_path)


def test_an_empty_preset_changes_nothing(tmp_path: Path) -> None:
    for text in ("", "# nothing\n", "model:\n"):
        root = write_experiment(tmp_path, text)
        assert load_config(["experiment=mine"], TrainConfig, root) == TrainConfig()


def test_presets_are_asked_for_only_when_they_are_used(tmp_path: Path) -> None:
    assert load_config(["run.seed=3"], TrainConfig, tmp_path).run.seed == 3
    assert "there is no folder configs/model" in refusal("model=l2", root=tmp_path)


def test_presets_are_found_without_being_told_where() -> None:
    assert load_config(["model=l2"]).model.name == "l2"


def test_python_is_held_to_the_same_ranges_as_a_command_line() -> None:
    wrong: list[tuple[type[Any], dict[str, Any], str]] = [
        (
            ModelConfig,
            {"lipschitz_target": 1.5},
            r"model.lipschitz_target: 1.5 is not in",
        ),
        (OptimConfig, {"betas": [0.9]}, "optim.betas: "),
        (RunConfig, {"root": "${oc.env:HOME}"}, "run.root: .* cannot be used as a value"),
        (RunConfig, {"root": "not UTF-8: \udc80"}, "run.root: .* cannot be used as a value"),
        (RunConfig, {"name": ""}, "run.name: is empty; give at least one"),
    ]
    for schema, arguments, says in wrong:
        with pytest.raises(ConfigurationError, match=says):
            schema(**arguments)


# --- there and back ------------------------------------------------------------------------------


def test_a_configuration_becomes_plain_values_and_back() -> None:
    config = train("experiment=ptb_kim", "optim.betas=[.5, .9]", "logger.tags=[a, '010']")
    values = to_dict(config)
    assert type(values["optim"]["betas"]) is list
    assert type(values["model"]) is dict
    assert from_dict(values) == config
    values["optim"]["betas"][0] = 0.1
    assert config.optim.betas[0] == 0.5


def test_absent_values_take_their_defaults_and_unknown_ones_are_refused() -> None:
    assert from_dict({"model": {"d_model": 48}}) == train("model.d_model=48")
    with pytest.raises(ConfigurationError, match=r"unknown key 'model.widht'"):
        from_dict({"model": {"widht": 48}})
    with pytest.raises(ConfigurationError, match="unknown key 'modle': did you mean 'model'"):
        from_dict({"modle": {}})
    with pytest.raises(ConfigurationError, match="model: 3 does not map fields"):
        from_dict({"model": 3})
    with pytest.raises(ConfigurationError, match=r"model\.d_model: 48\.5 is not integer"):
        from_dict({"model": {"d_model": 48.5}})


def test_the_command_names_only_what_differs_from_the_defaults() -> None:
    assert command_line(train()) == "python train.py"
    assert command_line(train("run.seed=0", "run.seed=3")) == "python train.py run.seed=3"
    config = evaluate("data.path=To be, or 'not'")
    assert shlex.split(command_line(config))[2:] == [*EVALUATE, "data.path=To be, or 'not'"]


def test_the_command_keeps_every_character_of_a_list() -> None:
    numbers = [*range(1, 0xD800), *range(0xE000, 0x10200), 0x1F600, 0x10FFFF]
    text = "".join(map(chr, numbers))
    config = train()
    config.logger.tags = [text[start : start + 60] for start in range(0, len(text), 60)]
    config.logger.tags += ["a\x7fb", "a\x85b", "a\x85", "a\u2028 b", "\ufeff", "\ufffe"]
    (word,) = shlex.split(command_line(config))[2:]
    assert train(word) == config


# --- the programs --------------------------------------------------------------------------------


def test_help_shows_every_preset_and_every_field_with_default_and_meaning() -> None:
    text = help_text(TrainConfig, ROOT)
    for path in PRESETS:
        assert path.stem in text
    for schema in (TrainConfig, EvaluateConfig):
        text = help_text(schema, ROOT)
        for key, f in options(schema):
            assert f"\n  {key}=" in text
            assert f.metadata["help"] in text
    assert "model.lipschitz_target=0.5\n      number in [1e-6, 1): c, the largest" in help_text()


def test_every_field_says_what_it_means_and_every_number_has_an_interval() -> None:
    for schema in (TrainConfig, EvaluateConfig):
        for key, f in options(schema):
            assert len(f.metadata["help"]) > 5, key
            kind = required_part(f.type)
            if kind in (int, float) or kind == list[float]:
                assert f.metadata["within"], key


def test_help_needs_no_presets_and_forgives_everything_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_or_exit(["nonsense", "-h"], TrainConfig, tmp_path)
    assert ended.value.code == 0
    assert "none found" in capsys.readouterr().out


def test_printing_the_configuration_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["experiment=ptb_kim", "run.seed=7"]
    with pytest.raises(SystemExit) as ended:
        parse_or_exit([*words, "--print-config"], TrainConfig, ROOT)
    assert ended.value.code == 0
    assert capsys.readouterr().out == to_yaml(train(*words))


def test_an_error_is_one_line_on_standard_error_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_or_exit(["model.d_modl=3", "--print-config"], TrainConfig, ROOT)
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", "error: unknown key 'model.d_modl': did you mean 'model.d_model'?\n")


def test_a_checkpoint_given_again_joins_those_before() -> None:
    config = evaluate("checkpoint=[b]: c", "checkpoint=010")
    assert config.checkpoint == ["checkpoints/a", "[b]: c", "010"]
    assert load_config(shlex.split(command_line(config))[2:], EvaluateConfig) == config
    assert from_dict(to_dict(config), EvaluateConfig) == config


def test_a_good_command_line_comes_back_as_plain_dataclasses() -> None:
    config = parse_or_exit(["model=l2"], TrainConfig, ROOT)
    assert type(config) is TrainConfig
    for key, f in options(TrainConfig):
        value = config
        for name in key.split("."):
            value = getattr(value, name)
        assert type(value) in (int, float, bool, str, list, type(None)), key
        assert default_of(f) is None or type(value) is type(default_of(f)) or value is None


def test_a_configuration_is_made_without_loading_anything_heavy() -> None:
    code = (
        "import sys; from invformer.config import load_config, parse_or_exit\n"
        "load_config(['model=l2', 'trainer.max_steps=5'])\n"
        "heavy = {'torch', 'numpy', 'lightning', 'wandb', 'datasets', 'jaxtyping', 'matplotlib'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)\n"
        "parse_or_exit(['--help'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: python train.py")
