"""Every number of a report stands under its own name."""

import pytest

from invformer.evaluation.lipschitz import measured_branches
from tests.nn.builders import contractive_model, random_tokens


def test_a_bound_stands_beside_the_estimate_of_its_own_branch() -> None:
    model = contractive_model(certificate="causal").eval()
    for place, (_, branch) in enumerate(model.stack.branches()):
        branch.correction.fill_(1 - 0.1 * place)
    report = measured_branches(model, random_tokens(1), 2)
    for norm, rows in report.items():
        diagonal = norm == "diagonal_block"
        for name, branch in model.stack.branches():
            bound = branch.causal_bound() if diagonal else branch.lipschitz_bound(norm)
            assert rows[name]["bound"] == pytest.approx(bound)
        assert len({row["bound"] for row in rows.values()}) == len(rows)
