"""The normaliser: above the norm and close, by squarings and by trial."""

import pytest
import torch

from invformer.kernels import native, native_matrices, normaliser
from invformer.kernels.normaliser import Normalisation, gram_normalisers
from invformer.numerics.precision import denormals_flushed
from tests.support.problems import matrix_with, trained_like

ZOO = {
    "gaussian": lambda: torch.randn(48, 48),
    "tall": lambda: torch.randn(300, 20),
    "wide": lambda: torch.randn(20, 300),
    "row": lambda: torch.randn(1, 9),
    "column": lambda: torch.randn(9, 1),
    "orthogonal": lambda: matrix_with(torch.ones(128), 128, 128),
    "half rank": lambda: matrix_with(torch.cat([torch.ones(32), torch.zeros(32)]), 64, 64),
    "close pair": lambda: matrix_with(torch.tensor([1, 1 - 1e-7, *[0.5] * 30]), 32, 40),
    "closer pair": lambda: matrix_with(torch.tensor([1, 1 - 1e-9, *[0.5] * 62]), 64, 64),
    "trained": lambda: trained_like(96, 384),
    "graded": lambda: matrix_with(10.0 ** -torch.arange(12.0), 12, 12),
    "large": lambda: torch.randn(512, 256),
    "large orthogonal": lambda: matrix_with(torch.ones(256), 256, 256),
    "large cluster": lambda: matrix_with(
        torch.cat([1 - 0.01 * torch.rand(100), torch.rand(156)]), 256, 300
    ),
    # The largest entry of the diagonal of its Gram matrix's powers misses the leading vector.
    "large hidden": lambda: torch.block_diag(torch.ones(1, 1), torch.full((40, 40), 1.005 / 40)),
    "large trained": lambda: trained_like(256, 400),
    "tiny": lambda: 1e-12 * torch.randn(16, 16),
    "huge": lambda: 1e12 * torch.randn(16, 16),
}


def gram_normaliser(weight: torch.Tensor) -> Normalisation:
    """σ̄, u and v of one weight."""
    return gram_normalisers([weight])[0]


@pytest.fixture(autouse=True, params=["compiled", "torch"])
def _both_implementations(request, monkeypatch) -> None:
    """Everything holds with compiled code and without."""
    if request.param == "torch":
        monkeypatch.setattr(native_matrices, "can_take", lambda weights: False)
    elif not native.is_available():
        pytest.skip(f"{native.complaint()}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ZOO)
def test_the_normaliser_is_above_the_norm_and_close(kind: str, dtype: torch.dtype) -> None:
    weight = ZOO[kind]().to(dtype)
    sigma, u, v = gram_normaliser(weight)
    truth = torch.linalg.matrix_norm(weight.double(), 2)
    assert sigma.dtype == u.dtype == v.dtype == dtype
    assert sigma.double() >= truth
    if dtype != torch.bfloat16:
        assert u @ weight @ v >= truth * (0.99 if "large" in kind else 1 - 1e-5)
    worst = min(weight.shape) ** 0.5**9 - 1
    assert sigma.double() <= truth * (1 + worst + 1e-4 + 3 * torch.finfo(dtype).eps)
    lengths = torch.stack([u.norm(), v.norm()]).double()
    assert ((lengths - 1).abs() <= 4 * torch.finfo(dtype).eps).all()


@pytest.mark.parametrize("shape", [(20, 20), (12, 40), (40, 12)])
def test_the_vectors_give_the_gradient_of_the_norm(shape: tuple[int, int]) -> None:
    weight = trained_like(*shape).float().requires_grad_()
    (expected,) = torch.autograd.grad(torch.linalg.matrix_norm(weight, 2), weight)
    _, u, v = gram_normaliser(weight)
    torch.testing.assert_close(torch.outer(u, v), expected, rtol=0, atol=1e-5)


def test_the_normaliser_is_a_function_of_the_weight_alone() -> None:
    weights = torch.randn(3, 10, 6)
    together = gram_normaliser(weights)
    assert all(map(torch.equal, together, gram_normaliser(weights)))
    for i in range(3):
        torch.testing.assert_close([t[i] for t in together], [*gram_normaliser(weights[i])])


@pytest.mark.parametrize("size", [40, 160, 300])
def test_compiled_code_finds_what_torch_finds(size: int, monkeypatch) -> None:
    monkeypatch.setattr(normaliser, "TRIAL_SIZE", 1024)  # only compiled code tries
    ends = (0.01, 0.3, 0.6, 0.9, 0.99)
    values = [torch.cat([torch.ones(1), torch.linspace(end, 0, size - 1)]) for end in ends]
    weights = [matrix_with(v, size + 7, size).float() for v in values]
    weights.append(trained_like(size, 2 * size).float())
    found = gram_normalisers(weights)
    monkeypatch.setattr(native_matrices, "can_take", lambda weights: False)
    for (sigma, *_), (expected, *_) in zip(found, gram_normalisers(weights), strict=True):
        torch.testing.assert_close(sigma, expected, rtol=3e-6, atol=0)


def test_normalising_a_zero_matrix_divides_by_something() -> None:
    sigma, u, v = gram_normaliser(torch.zeros(2, 3, 4, dtype=torch.float32))
    assert (sigma > 0).all()
    assert torch.equal(torch.zeros(2, 3, 4) / sigma[:, None, None], torch.zeros(2, 3, 4))
    assert u.count_nonzero() == v.count_nonzero() == 0


def test_neither_autocast_nor_fast_float32_products_reach_the_normaliser() -> None:
    weight = torch.randn(64, 64, dtype=torch.float32)
    expected = gram_normaliser(weight)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(gram_normaliser(weight)[0], expected)
    matmul = torch.backends.mkldnn.matmul
    before = matmul.fp32_precision
    try:  # where the hardware can, float32 products run in bfloat16
        matmul.fp32_precision = "bf16"
        torch.testing.assert_close(gram_normaliser(weight)[0], expected, rtol=2e-6, atol=0)
    finally:
        matmul.fp32_precision = before


@pytest.mark.parametrize("scale", [1e-36, 1e-30, 1e-22, 1e-15, 1e15, 1e18, 1e25, 1e36])
@pytest.mark.parametrize("size", [20, 256])
def test_squares_that_would_over_or_underflow_are_scaled_first(scale: float, size: int) -> None:
    weight = torch.randn(2 * size, size, dtype=torch.float32)
    sigma, u, v = gram_normaliser(weight)
    scaled = gram_normaliser(weight * scale)
    torch.testing.assert_close(scaled[0] / scale, sigma, rtol=1e-4, atol=0)
    torch.testing.assert_close(torch.outer(*scaled[1:]), torch.outer(u, v), rtol=0, atol=1e-3)


def test_large_matrices_are_bounded_by_trial_and_where_that_fails_by_squarings(monkeypatch) -> None:
    easy = matrix_with(torch.cat([torch.ones(1), torch.linspace(0.5, 0.1, 255)]), 256, 300)
    hard = matrix_with(torch.linspace(1, 0.5, 256), 256, 300)
    if not native_matrices.can_take([easy, hard]):
        pytest.skip("without compiled code all are squared")
    monkeypatch.setattr(normaliser, "LARGEST_LIFT", normaliser.LEAST_LIFT)
    monkeypatch.setattr(normaliser, "NUM_VECTORS", 24)
    found = gram_normalisers([easy, hard])
    monkeypatch.setattr(normaliser, "TRIAL_SIZE", 1024)
    by_squarings = gram_normalisers([easy, hard])
    assert not torch.equal(found[0][0], by_squarings[0][0])
    torch.testing.assert_close(found[1], by_squarings[1])
    for weight, (sigma, u, v) in zip((easy, hard), found, strict=True):
        truth = torch.linalg.matrix_norm(weight, 2)
        assert truth <= sigma <= truth * 1.01
        assert u @ weight @ v >= 0.99 * truth


def test_squarings_of_a_large_cluster_never_underflow(monkeypatch) -> None:
    monkeypatch.setattr(normaliser, "TRIAL_SIZE", 1024)
    weight = matrix_with(torch.cat([torch.ones(128), torch.full((384,), 0.995)]), 512, 512).float()
    truth = torch.linalg.matrix_norm(weight.double(), 2)
    for num_squarings in range(9):
        monkeypatch.setattr(normaliser, "NUM_SQUARINGS", num_squarings)
        with denormals_flushed():
            assert gram_normaliser(weight)[0] >= truth


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("size", [20, 256])
def test_weights_that_were_lost_give_no_number(size: int, value: float) -> None:
    weight = torch.randn(size, size)
    weight[3, 4] = value
    assert not gram_normaliser(weight)[0].isfinite()


@pytest.mark.parametrize("size", [64, 255])
def test_an_outlier_of_an_orthogonal_matrix_is_not_lost_to_rounding(size: int) -> None:
    values = torch.ones(size)
    values[0] += 2e-5
    for seed in range(4):
        weight = matrix_with(values, size, size, seed).float()
        assert gram_normaliser(weight)[0] >= torch.linalg.svdvals(weight.double())[0]


@pytest.mark.parametrize("rows", [2048, 4096, 16384])
def test_long_sums_of_equal_entries_are_not_lost_to_rounding(rows: int) -> None:
    for entry in (0.68170428, 0.98746866, 0.99749374, 0.99874687):
        weight = torch.full((rows, 2), entry, dtype=torch.float32)
        truth = torch.linalg.matrix_norm(weight.double())
        assert truth <= gram_normaliser(weight)[0] <= truth * (1 + 3e-5)


def test_a_cluster_whose_leading_vector_no_krylov_space_sees_stays_below_the_bound() -> None:
    size = 512
    start = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for seed, gap in ((0, 7e-5), (3, 5.6e-5), (5, 6e-5)):
        torch.manual_seed(seed)
        basis = torch.randn(size, size)
        basis[:, 0] -= start * (start @ basis[:, 0]) / start.square().sum()
        basis = torch.linalg.qr(basis).Q
        values = torch.ones(size)
        values[0] += gap
        weight = ((basis * values) @ basis.mT).float()
        bound, *_ = gram_normaliser(weight)
        assert bound >= torch.linalg.svdvals(weight.double())[0]


@pytest.mark.wrong_shapes
@pytest.mark.parametrize("wrong", [torch.zeros(3), torch.zeros(2, 0)])
def test_tensors_that_are_not_matrices_do_not_reach_compiled_code(wrong: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="real matrix"):
        gram_normalisers([wrong])
