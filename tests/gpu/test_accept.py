"""What a machine without a network is told to take along."""

from importlib.metadata import requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.gpu.accept import WHEELS

OF_TORCH = {"torch", "typing-extensions"}


def test_every_wheel_has_what_it_needs() -> None:
    for wheel in set(WHEELS) - {"lightning"}:  # which asks for what it does not import here
        every = [Requirement(line) for line in requires(wheel) or []]
        needed = [one for one in every if one.marker is None or one.marker.evaluate({"extra": ""})]
        assert {canonicalize_name(one.name) for one in needed} <= {*WHEELS, *OF_TORCH}, wheel
