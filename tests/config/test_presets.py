"""Experiments that extend each other, and every experiment's model."""

import inspect
from functools import cache
from pathlib import Path

import pytest
import torch

from invformer.assemble.model import as_it_was_meant, build_model
from invformer.config import from_dict, load_config, parse_or_exit, to_dict
from invformer.config.schema import ModelConfig, TrainConfig
from invformer.errors import ConfigurationError
from invformer.nn.attention import ContractiveL2Attention
from invformer.nn.bounded_attention import BoundedAttention
from invformer.nn.feed_forward import ContractiveFeedForward, FeedForward

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.stem for path in (ROOT / "configs/experiment").glob("*.yaml"))
VOCAB = 65  # of tiny Shakespeare


@cache
def experiment(name: str) -> TrainConfig:
    return load_config([f"experiment={name}"], TrainConfig, ROOT)


def write(root: Path, **experiments: str) -> Path:
    folder = root / "configs" / "experiment"
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in experiments.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return root


def load(name: str, root: Path) -> TrainConfig:
    return load_config([f"experiment={name}"], TrainConfig, root)


# --- experiments that extend each other ----------------------------------------------------------


def test_an_experiment_changes_what_it_extends_wherever_its_base_is_named(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        grandparent="model: {d_model: 48, num_layers: 3}\noptim: {betas: [0.5, 0.6], lr: 1e-3}",
        parent="model: {num_layers: 2}\nbase: grandparent\noptim: {betas: [0.7, 0.8]}",
        child="base: parent\nmodel: {d_embedding: '${model.d_model}', d_model: 24}",
    )
    config = load("child", root)
    assert (config.model.d_model, config.model.num_layers, config.model.d_embedding) == (24, 2, 24)
    assert (config.optim.betas, config.optim.lr) == ([0.7, 0.8], 1e-3)
    words = ["experiment=child", "model.num_layers=7"]
    assert load_config(words, TrainConfig, root).model.num_layers == 7


def test_an_experiment_that_adds_nothing_is_its_base(tmp_path: Path) -> None:
    root = write(tmp_path, parent="model: {d_model: 48}", child="base: parent")
    assert load("child", root) == load("parent", root)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("base: parnt", "configs/experiment/mine.yaml: base: no preset 'parnt': did you mean 'par"),
        ("base: zzz", "configs/experiment/mine.yaml: base: no preset 'zzz': there are mine, other"),
        ("base:", "configs/experiment/mine.yaml: base: no preset ''"),
        ("base: ../model/l2", "mine.yaml: base: no preset '../model/l2'"),
        ("base: [parent]", "mine.yaml: base: ['parent'] is not the name of an experiment"),
        (
            "base: mine",
            "mine.yaml: base: experiments extend each other: configs/experiment/mine.yaml > ",
        ),
        (
            "base: other",
            "other.yaml: base: experiments extend each other: configs/experiment/mine.yaml",
        ),
        ("base: parent\nbase: other", "mine.yaml: line 1: a key is given twice"),
        ("base: parent\nmodel: {base: parent}", "mine.yaml: unknown key 'model.base'"),
        ("base: wrong", "configs/experiment/wrong.yaml: unknown key 'model.d_modl'"),
    ],
)
def test_a_base_that_leads_nowhere_is_refused_by_its_file(
    tmp_path: Path, text: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    root = write(tmp_path, mine=text, other="base: mine", parent="", wrong="model: {d_modl: 3}")
    with pytest.raises(SystemExit) as ended:
        parse_or_exit(["experiment=mine"], TrainConfig, root)
    assert ended.value.code == ConfigurationError.exit_code
    error = capsys.readouterr().err
    assert says in error
    assert error.count("\n") == 1


def test_only_experiments_extend_each_other(tmp_path: Path) -> None:
    (tmp_path / "configs/model").mkdir(parents=True)
    (tmp_path / "configs/model/mine.yaml").write_text("base: mine\n", encoding="utf-8")
    for word in ("model=mine", "base=nanogpt_cpu"):
        with pytest.raises(ConfigurationError, match=r"unknown key '(model.)?base'"):
            load_config([word], TrainConfig, tmp_path)


# --- the presets ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_composes_and_its_model_predicts(name: str) -> None:
    model = build_model(experiment(name).model, VOCAB, 8).eval()
    with torch.no_grad():
        assert model(torch.arange(8)[None]).isfinite().all()


# --- what the past may do ------------------------------------------------------------------------


def test_who_is_seen_reaches_the_layers() -> None:
    past = ModelConfig(
        name="contractive_bounded",
        certificate="causal",
        strictly_causal=True,
        feed_forward_kernel=3,
        d_model=12,
    )
    block = build_model(past, VOCAB, 8).stack.blocks[0]
    attention, feed_forward = block.attention.branch, block.feed_forward.branch
    assert attention.strictly_causal
    assert isinstance(feed_forward, ContractiveFeedForward)
    assert feed_forward.weights().kernel == 3
    starts = [b.position.by_lag(8).detach() for b in (attention, plain_attention())]
    # Beside each other the tokens before weigh what they weigh where a token sees itself too.
    assert torch.allclose(starts[0].diff(dim=-1)[:, 1:], starts[1].diff(dim=-1)[:, 1:])
    assert not torch.allclose(*starts)


def plain_attention() -> BoundedAttention:
    """The attention of a model whose tokens see themselves."""
    config = ModelConfig(name="contractive_bounded", d_model=12)
    return build_model(config, VOCAB, 8).stack.blocks[0].attention.branch


def test_the_baseline_can_have_the_same_kernel() -> None:
    config = ModelConfig(
        name="dot_product", certificate=None, feed_forward_kernel=3, d_model=12, num_layers=1
    )
    model = build_model(config, VOCAB, 8)
    feed_forward = model.stack.blocks[0].feed_forward.inner
    assert isinstance(feed_forward, FeedForward)
    assert feed_forward.kernel > 1


@pytest.mark.parametrize("name", ["contractive_l2", "contractive_bounded"])
def test_the_ball_that_inputs_are_mapped_into_grows_with_the_width(name: str) -> None:
    block = build_model(
        ModelConfig(name=name, d_model=16, input_radius=2.0), VOCAB, 8
    ).stack.blocks[0]
    assert block.attention.input_radius == block.feed_forward.input_radius == 8.0


# --- how a model starts --------------------------------------------------------------------------


def test_the_schema_and_the_layers_start_alike() -> None:
    for layer in (ContractiveFeedForward, BoundedAttention, ContractiveL2Attention):
        parameters = inspect.signature(layer).parameters
        for key in ("initial_sharpness", "initial_output"):
            if key in parameters:
                assert parameters[key].default == getattr(ModelConfig(), key)


@pytest.mark.parametrize("name", ["contractive_l2", "contractive_bounded"])
def test_the_scales_of_the_start_reach_the_weights_and_nothing_else(name: str) -> None:
    def weights(**scales: float) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        config = ModelConfig(name=name, d_model=12, num_layers=2, **scales)
        return build_model(config, VOCAB, 8).state_dict()

    plain, scaled = weights(), weights(initial_sharpness=1.0, initial_output=1.0)
    for key, weight in plain.items():
        if key.endswith("feed_forward.branch.log_sharpness"):
            assert not scaled[key].any()
            assert torch.allclose(weight.exp(), torch.tensor(8.0).to(weight))
        elif key.endswith(("w_out.weight", "w_g.weight")):
            assert torch.allclose(10 * weight, scaled[key])
        else:
            assert torch.equal(weight, scaled[key]), key


@pytest.mark.parametrize("experiment_name", ["nanogpt_cpu_causal", "nanogpt_gpu"])
@pytest.mark.parametrize(
    "model", sorted(path.stem for path in (ROOT / "configs/model").glob("*.yaml"))
)
def test_every_model_takes_the_place_of_an_experiments_own(
    model: str, experiment_name: str
) -> None:
    words = [f"experiment={experiment_name}", f"model={model}"]
    own = load_config([f"model={model}"], TrainConfig, ROOT).model
    taken = load_config(words, TrainConfig, ROOT).model
    assert (taken.name, taken.certificate) == (own.name, own.certificate)


def test_a_configuration_from_before_there_were_weighted_norms_has_none() -> None:
    before = to_dict(load_config(["model.diagonal_scaling=false", "model.activation_norm=true"]))
    del before["model"]["diagonal_scaling"], before["model"]["written_channels"]
    before["model"]["position_bias_form"] = "table"
    model = from_dict(as_it_was_meant(before)).model
    assert (model.diagonal_scaling, model.activation_norm) == (False, True)
    today = to_dict(load_config([]))
    assert from_dict(as_it_was_meant({**today, "monitor": {"budget": 0.05}})) == load_config([])
    renamed = {**before["model"], "channel_metric": True, "loud_channels": 3}
    model = from_dict(as_it_was_meant({"model": {**renamed, "activation_norm": False}})).model
    assert (model.diagonal_scaling, model.written_channels) == (True, 3)
    for broken in (None, [], {"model": 3}):
        assert as_it_was_meant(broken) is broken
