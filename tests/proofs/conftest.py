"""A fixture that two files share."""

import pytest

from invformer.nn.transformer import CharTransformer
from tests.proofs.models import MODELS, ready


@pytest.fixture(params=list(MODELS))
def model(request) -> CharTransformer:
    """A trained model of every kind, in float32."""
    return ready(MODELS[request.param]).float()
