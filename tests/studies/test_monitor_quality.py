"""The constants that estimates are compared with are those of dense Jacobians."""

import pytest

from invformer.lipschitz.probe import certified_in
from studies.monitor_quality import constants
from tests.lipschitz.test_probe import MODELS, dense
from tests.support.builders import random_tokens, trained_a_little
from tests.support.problems import diagonal_norm, norm_from_below


@pytest.mark.parametrize("name", ["actnorm", "weighted", "dot product"])
def test_constants_are_those_of_dense_jacobians(name: str) -> None:
    model, tokens = trained_a_little(MODELS[name]()), random_tokens(1, seed=3)
    found = constants(model, tokens, num_starts=4)
    for branch, jacobian in dense(model, tokens).items():
        is_alone = certified_in(model) == "diagonal_block" or "feed_forward" in branch
        true = diagonal_norm(jacobian) if is_alone else norm_from_below(jacobian, "token_max")
        assert found[branch] == pytest.approx(true, rel=2e-3)
