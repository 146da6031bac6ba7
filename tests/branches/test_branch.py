"""What a branch knows of its forward pass, and who may inherit that."""

from typing import Any

import pytest
import torch

from invformer.branches.branch import KNOWLEDGE, Branch, LipschitzBranch
from invformer.branches.dot_product import PreNormBranch
from invformer.branches.enclosed import NotEnclosed
from invformer.branches.jacobian import StackedBranches
from invformer.nn import (
    BoundedAttention,
    ContractiveFeedForward,
    ContractiveL2Attention,
    DotProductAttention,
    FeedForward,
)

OPERATORS = [
    BoundedAttention, ContractiveFeedForward, ContractiveL2Attention, DotProductAttention,
    FeedForward, PreNormBranch,
]  # fmt: skip


class Doubling:
    def forward(self, x: Any, *weights: Any) -> Any:
        return 2 * super().forward(x, *weights)  # type: ignore[misc]


def known(cls: type) -> dict[str, Any]:
    return {name: getattr(cls, name) for name in KNOWLEDGE if hasattr(cls, name)}


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("from_a_mixin", [False, True])
def test_who_replaces_forward_inherits_nothing(operator: type[Branch], from_a_mixin: bool) -> None:
    own = {} if from_a_mixin else {"forward": Doubling.forward}
    other = type("Other", (Doubling, operator) if from_a_mixin else (operator,), own)
    interface = LipschitzBranch if issubclass(operator, LipschitzBranch) else Branch
    nothing = known(interface)
    assert {name: value for name, value in known(other).items() if name in nothing} == nothing
    assert not other.is_proven
    assert known(type("Further", (other,), {})) == known(other)


def test_who_keeps_forward_inherits_what_is_known_of_it_but_no_proof() -> None:
    renamed = type("Renamed", (ContractiveFeedForward,), {"group": lambda self: None})
    assert known(renamed) == known(ContractiveFeedForward)
    assert ContractiveFeedForward.is_proven
    assert not renamed.is_proven


def test_a_class_may_say_what_it_knows_of_its_own_forward() -> None:
    class Other(ContractiveFeedForward):
        def forward(self, x: Any, *weights: Any) -> Any:
            return super().forward(x, *weights)

        reach = ContractiveFeedForward.reach

    branch = Other(4, 8, 0.5)
    assert branch.is_token_wise
    assert not branch.folds_scaling
    assert branch.stacked is StackedBranches
    with pytest.raises(ValueError, match="no bound of a Other is known"):
        branch.lipschitz_bound("token_max")
    with pytest.raises(NotEnclosed, match="the rounding of a Other is not bounded"):
        branch.enclosed(branch.weights(), 3)
    alone = branch.stacked([branch], [branch.weights()], 2)
    alone.forward(torch.randn(1, 2, 4))
    assert alone.local_bounds("token_max").isinf().all()
