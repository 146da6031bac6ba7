"""What of a configuration reaches the layers."""

import inspect

import pytest
import torch

from invformer.assemble.model import build_model
from invformer.branches.feed_forward.feed_forward import ContractiveFeedForward
from invformer.branches.in_ball.attention import BoundedAttention
from invformer.branches.tied_l2.attention import ContractiveL2Attention
from invformer.config.load import CONFIGS, load_config
from invformer.config.schema import ModelConfig

NAMES = sorted(path.stem for path in (CONFIGS / "experiment").glob("*.yaml"))
VOCAB = 65  # of tiny Shakespeare
BOTH = pytest.mark.parametrize("name", ["contractive_l2", "contractive_bounded"])


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_composes_and_its_model_predicts(name: str) -> None:
    model = build_model(load_config([f"experiment={name}"]).model, VOCAB, 8).eval()
    with torch.no_grad():
        assert model(torch.arange(8)[None]).isfinite().all()


def test_the_mask_reaches_the_layers() -> None:
    plain = ModelConfig(name="contractive_bounded", d_model=16)
    past = ModelConfig(
        name="contractive_bounded", certificate="causal", strictly_causal=True,
        feed_forward_kernel=3, d_model=16,
    )  # fmt: skip
    blocks = [build_model(config, VOCAB, 8).stack.blocks[0] for config in (past, plain)]
    assert blocks[0].attention.branch.strictly_causal
    assert blocks[0].feed_forward.branch.weights().kernel == 3
    starts = [block.attention.branch.position.by_lag(8).detach() for block in blocks]
    # Beside each other the tokens before weigh what they weigh where a token sees itself too.
    assert torch.allclose(starts[0].diff(dim=-1)[:, 1:], starts[1].diff(dim=-1)[:, 1:])
    assert not torch.allclose(*starts)


def test_the_schema_and_the_layers_start_alike() -> None:
    for layer in (ContractiveFeedForward, BoundedAttention, ContractiveL2Attention):
        parameters = inspect.signature(layer).parameters
        for key in {"initial_sharpness", "initial_output"} & parameters.keys():
            assert parameters[key].default == getattr(ModelConfig(), key)


@BOTH
def test_the_scales_of_the_start_reach_the_weights_and_nothing_else(name: str) -> None:
    def weights(**scales: float) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        config = ModelConfig(name=name, d_model=16, num_layers=2, **scales)
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
