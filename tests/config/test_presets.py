"""Experiments that extend each other, and what of a configuration reaches the layers."""

import inspect
from pathlib import Path

import pytest
import torch

from invformer.assemble.model import build_model
from invformer.config import load as module
from invformer.config import load_config
from invformer.config.schema import ModelConfig, TrainConfig
from invformer.errors import ConfigurationError
from invformer.nn.attention import ContractiveL2Attention
from invformer.nn.bounded_attention import BoundedAttention
from invformer.nn.feed_forward import ContractiveFeedForward

NAMES = sorted(path.stem for path in (module.CONFIGS / "experiment").glob("*.yaml"))
VOCAB = 65  # of tiny Shakespeare
BOTH = pytest.mark.parametrize("name", ["contractive_l2", "contractive_bounded"])


@pytest.fixture
def configs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the presets, empty."""
    monkeypatch.setattr(module, "CONFIGS", tmp_path / "configs")
    return tmp_path / "configs"


def write(configs: Path, **experiments: str) -> None:
    folder = configs / "experiment"
    folder.mkdir(parents=True)
    for name, text in experiments.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")


def load(*words: str) -> TrainConfig:
    return load_config(words)


# --- experiments that extend each other ----------------------------------------------------------


def test_an_experiment_changes_what_it_extends_wherever_its_base_is_named(configs: Path) -> None:
    write(
        configs,
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
        ("base: parnt", "mine.yaml: base: no preset 'parnt': did you mean 'par"),
        ("base: zzz", "mine.yaml: base: no preset 'zzz': there are mine, other"),
        ("base: ../model/l2", "mine.yaml: base: no preset '../model/l2'"),
        ("base: [parent]", "mine.yaml: base: ['parent'] is not the name of an experiment"),
        ("base: mine", "mine.yaml: base: experiments extend each other: configs/experiment/mine"),
        ("base: other", "other.yaml: base: experiments extend each other: configs/experiment/mine"),
        ("base: parent\nbase: other", "mine.yaml: line 1: a key is given twice"),
        ("base: parent\nmodel: {base: parent}", "mine.yaml: unknown key 'model.base'"),
        ("base: wrong", "wrong.yaml: unknown key 'model.d_modl'"),
    ],
)
def test_a_base_that_leads_nowhere_is_refused_by_its_file(
    configs: Path, text: str, says: str
) -> None:
    write(configs, mine=text, other="base: mine", parent="", wrong="model: {d_modl: 3}")
    with pytest.raises(ConfigurationError) as caught:
        load("experiment=mine")
    assert str(caught.value).startswith(f"configs/experiment/{says}")


# --- what reaches the layers ---------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_composes_and_its_model_predicts(name: str) -> None:
    model = build_model(load(f"experiment={name}").model, VOCAB, 8).eval()
    with torch.no_grad():
        assert model(torch.arange(8)[None]).isfinite().all()


def test_who_is_seen_reaches_the_layers() -> None:
    plain = ModelConfig(name="contractive_bounded", d_model=12)
    past = ModelConfig(
        name="contractive_bounded", certificate="causal", strictly_causal=True,
        feed_forward_kernel=3, d_model=12,
    )  # fmt: skip
    blocks = [build_model(config, VOCAB, 8).stack.blocks[0] for config in (past, plain)]
    assert blocks[0].attention.branch.strictly_causal
    assert blocks[0].feed_forward.branch.weights().kernel == 3
    starts = [block.attention.branch.position.by_lag(8).detach() for block in blocks]
    # Beside each other the tokens before weigh what they weigh where a token sees itself too.
    assert torch.allclose(starts[0].diff(dim=-1)[:, 1:], starts[1].diff(dim=-1)[:, 1:])
    assert not torch.allclose(*starts)


@BOTH
def test_the_ball_that_inputs_are_mapped_into_grows_with_the_width(name: str) -> None:
    config = ModelConfig(name=name, d_model=16, input_radius=2.0)
    block = build_model(config, VOCAB, 8).stack.blocks[0]
    assert block.attention.input_radius == block.feed_forward.input_radius == 8.0


def test_the_schema_and_the_layers_start_alike() -> None:
    for layer in (ContractiveFeedForward, BoundedAttention, ContractiveL2Attention):
        parameters = inspect.signature(layer).parameters
        for key in {"initial_sharpness", "initial_output"} & parameters.keys():
            assert parameters[key].default == getattr(ModelConfig(), key)


@BOTH
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
