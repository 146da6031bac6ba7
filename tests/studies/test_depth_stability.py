import math
from dataclasses import replace
from typing import get_args

import pytest
import torch

from invformer.config.load import load_config
from invformer.nn.coupling import CouplingBlock
from invformer.nn.residual import InvertibleBlock, InvertibleResidual
from studies.depth_stability import Case, Kind, Options, Result, build_kind, cases, claims, measure
from studies.report import Summary

CPU = torch.device("cpu")
KINDS: tuple[Kind, ...] = get_args(Kind)
TINY = ["d_model=8", "num_heads=2", "seq_len=8", "batch_size=4", "data.val_characters=200"]
RESULT = Result(2.0, 3.0, 5, 1.0, [2.0, 1.0], [1.0, 1.0])


def tiny_case(kind: Kind = "dot_product", depth: int = 2, *words: str) -> Case:
    (case,) = cases(load_config([*TINY, f"kinds=[{kind}]", f"depths=[{depth}]", *words], Options))
    return case


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_the_blocks_that_its_name_says(kind: Kind) -> None:
    model = build_kind(tiny_case(kind, 3))
    contractive = kind.startswith("contractive") or kind == "certified"
    assert len(model.stack.blocks) == 3
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    blocks = {type(block) for block in model.stack.blocks}
    assert (blocks == {torch.nn.Sequential}) == kind.endswith("_post")
    assert (blocks == {InvertibleBlock}) == contractive
    assert (blocks == {CouplingBlock}) == (kind == "coupling")
    norms = sum(isinstance(m, torch.nn.LayerNorm) for m in model.modules())
    assert (norms == 1) == (contractive or kind.endswith("_bare"))  # that of the head
    radii = {m.input_radius for m in model.modules() if isinstance(m, InvertibleResidual)}
    assert (None not in radii and bool(radii)) == kind.endswith("_ball")


def test_a_post_norm_block_ends_in_layer_norm() -> None:
    block = build_kind(tiny_case("l2_post")).stack.blocks[0]
    x = block(torch.randn(2, 8, 8, dtype=torch.float32))
    assert x.mean(-1).abs().max() < 1e-6
    assert (x.var(-1, correction=0) - 1).abs().max() < 1e-3


def test_no_better_than_single_characters_counts_as_failed() -> None:
    assert not RESULT.failed
    assert replace(RESULT, val_nats=3.0).failed
    assert replace(RESULT, val_nats=math.nan).failed


@pytest.mark.parametrize(
    ("failed", "outcome"),
    [
        ({"dot_product": {10: 0, 14: 1, 18: 1}, "l2": {18: 0}}, "reproduced"),
        ({"dot_product": {10: 0, 18: 0}, "dot_product_post": {18: 1}, "l2": {18: 0}}, "partly"),
        ({"dot_product": {2: 0, 14: 0, 18: 1}, "l2": {18: 0}}, "partly"),
        ({"dot_product": {2: 1, 18: 1}, "l2": {2: 0, 18: 0}}, "partly"),
        ({"dot_product": {18: 1}, "l2": {18: 0}}, "partly"),
        ({"dot_product": {2: 1, 18: 0}, "l2": {2: 0, 18: 0}}, "not reproduced"),
        ({"dot_product": {18: 1}, "l2": {18: 1}}, "not reproduced"),
        ({"dot_product": {18: 0}, "l2": {18: 0}}, "not reproduced"),
        ({"dot_product": {2: 1}, "l2": {2: 0}}, "not in the paper"),
        ({"dot_product": {18: 1}, "dot_product_post": {18: 1}}, "not in the paper"),
        ({"l2": {18: 1}, "contractive": {18: 0}}, "not in the paper"),
    ],
)
def test_the_verdict_follows_failures(failed: dict[Kind, dict[int, bool]], outcome: str) -> None:
    assert Summary([], *claims(failed)).outcome.startswith(outcome)


def test_activations_kept_by_a_batch_grow_with_depth_and_leave_weights_out() -> None:
    few, many = (measure(tiny_case("dot_product", n, "num_steps=1"), CPU) for n in (2, 4))
    per_block = (many.kept_mebibytes - few.kept_mebibytes) / 2
    # Two inputs of LayerNorm, their two outputs, q, k, v, attention's output, hidden units twice.
    assert 10 * 4 * 8 * 8 * 4 / 2**20 < per_block < 40 * 4 * 8 * 8 * 4 / 2**20
