"""The variants of the ablation are valid, differ, and are trained by train.py itself."""

import math
import re

import pytest

from invformer.assemble.model import build_model
from invformer.config.load import load_config
from invformer.config.schema import TrainConfig
from studies.ablation import VARIANTS, Case, Result, summarise
from tests.support.processes import ROOT


def configuration(name: str) -> TrainConfig:
    return load_config(["experiment=ablation", *VARIANTS[name].split()])


def test_every_variant_is_a_valid_recipe_and_no_two_are_the_same() -> None:
    base = configuration("nothing")
    found = [configuration(name) for name in VARIANTS]
    for index, config in enumerate(found):
        assert config not in found[:index]
        assert (config.data, config.trainer, config.run) == (base.data, base.trainer, base.run)


def test_the_models_that_are_compared_have_the_same_size() -> None:
    sizes = {}
    for name in ("nothing", "deep", "dot_product", "kernel", "dot_product_kernel"):
        config = configuration(name)
        model = build_model(config.model, 65, config.data.seq_len)
        sizes[name] = sum(p.numel() for p in model.parameters())
    assert all(abs(size / sizes["nothing"] - 1) < 0.03 for size in sizes.values())


def test_a_variant_is_held_against_the_unchanged_model() -> None:
    rows = [
        (Case("nothing", "", "", 0), Result(1.1, 0.5, None)),
        (Case("relu", "", "", 0), Result(1.5, None, None)),
    ]
    (base, relu) = summarise(rows).table
    assert summarise(rows).outcome == "not in the paper"  # nothing was inverted
    for share, outcome in ((1.0, "reproduced"), (0.99, "not reproduced")):
        inverted = [(Case("nothing", "", "", 0), Result(1.1, 0.5, share))]
        assert summarise(inverted).outcome == outcome
    assert (base["nats"], base["bpc"]) == pytest.approx((1.1, 1.1 / math.log(2)))
    assert relu["difference"] == pytest.approx(0.4)


def test_the_page_lists_every_variant() -> None:
    page = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    section = page.split("(ablations)\n")[1]
    cells = re.findall(r"^\| (`.+?) \|", section, re.MULTILINE)
    assert sorted(re.findall(r"`(\w+)`", " ".join(cells))) == sorted(VARIANTS)
