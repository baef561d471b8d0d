import pytest
import torch

from hetxl.nn.covariance import FULL_PARAMETER_LIMIT, build_covariance

D, N, R = 5, 4, 3


def build(name, residual="rank1", **options):
    return build_covariance(name, D, N, **({"rank": R, "residual": residual, "dtype": torch.float64} | options))


@pytest.mark.parametrize(
    ("name", "residual", "size"),
    [
        ("efficient", "rank1", R + 1),
        ("efficient", "diagonal", R + N),
        ("low_rank", "rank1", R + 1),
        ("low_rank", "diagonal", R + N),
        ("diagonal", "rank1", 1),
        ("diagonal", "diagonal", N),
        ("full", "rank1", N),
        ("full", "diagonal", N),
    ],
)
def test_covariance_size_equals_the_rows_of_its_basis(name, residual, size):
    covariance = build(name, residual)
    noise = covariance(torch.randn(2, D, dtype=torch.float64))
    assert covariance.size == noise.size == size
    assert noise.basis().shape == (2, size, N)


def test_parameter_names_and_shapes():
    shapes = {name: list(value.shape) for name, value in build("efficient").state_dict().items()}
    assert shapes == {
        "factor": [R, N],
        "scale.weight": [N, D],
        "scale.bias": [N],
        "residual.weight": [N, D],
        "residual.bias": [N],
    }
    shapes = {name: list(value.shape) for name, value in build("low_rank").state_dict().items()}
    assert shapes["loadings.weight"] == [N * R, D]
    assert shapes["loadings.bias"] == [N * R]
    assert list(build("diagonal").state_dict()) == ["residual.weight", "residual.bias"]
    assert {name: list(value.shape) for name, value in build("full").state_dict().items()} == {
        "loadings.weight": [N * N, D]
    }


def test_low_rank_reads_its_outputs_as_n_by_r():
    covariance, features = build("low_rank"), torch.randn(D, dtype=torch.float64)
    loadings = covariance.loadings(features).reshape(N, R)
    torch.testing.assert_close(covariance(features).factors, loadings.T)


def test_full_is_l_transposed_l():
    covariance, features = build("full"), torch.randn(D, dtype=torch.float64)
    matrix = (covariance.loadings.weight @ features).reshape(N, N)
    torch.testing.assert_close(covariance(features).covariance(), matrix.T @ matrix)


def test_rank_zero_is_diagonal():
    assert repr(build("efficient", rank=0)) == repr(build("diagonal"))


def test_full_covariance_above_its_limit_raises():
    with pytest.raises(ValueError, match=r"2048 features .* 21843 dimensions needs .* limit is"):
        build_covariance("full", 2048, 21843)
    build_covariance("full", 512, 512, device="meta")
    assert FULL_PARAMETER_LIMIT == 512 * 512 * 512


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"covariance": "lowrank"}, "covariance must be one of .* found 'lowrank'; did you mean 'low_rank'"),
        ({"residual": "rank-1"}, "residual must be one of .* did you mean 'rank1'"),
        ({"rank": -1}, "rank must be at least 0, found -1"),
    ],
)
def test_options_that_do_not_exist(options, message):
    with pytest.raises(ValueError, match=message):
        build_covariance(**({"covariance": "efficient", "in_features": 4, "noise_features": 4} | options))


def test_a_sampler_that_does_not_exist():
    with pytest.raises(ValueError, match=r"sampler must be one of .* did you mean 'orthogonal'"):
        build("efficient").draw("orthgonal", 4)


@pytest.mark.parametrize("name", ["efficient", "low_rank", "full"])
def test_the_noise_starts_with_about_unit_variance_from_its_factors(name):
    torch.manual_seed(0)
    covariance = build_covariance(name, 64, 64, rank=16)
    noise = covariance(torch.randn(200, 64))
    factors = noise.factors if noise.scale is None else noise.factors * noise.scale.unsqueeze(-2)
    assert 0.8 < factors.square().sum(-2).mean() < 1.2


def test_repr_has_the_formula():
    assert "Σ(x) = V(x)ᵀV(x) + d(x) d(x)ᵀ, V(x) = J ∘ (1 v(x)ᵀ), N=4, R=3" in repr(build("efficient"))
    assert "Σ(x) = diag(d(x)²), N=4, R=0" in repr(build("diagonal", "diagonal"))


@pytest.mark.parametrize("covariance", ["efficient", "low_rank", "diagonal", "full"])
@pytest.mark.parametrize("init", [0.05, 1.0, 3.0])
def test_the_noise_starts_as_large_as_asked_for(covariance, init):
    torch.manual_seed(0)
    features = torch.randn(400, 64)

    @torch.no_grad()
    def deviation(scale):
        torch.manual_seed(1)
        noise = build_covariance(covariance, 64, 64, rank=8, init=scale)(features)
        return float(noise.basis().square().sum(-2).mean().sqrt())

    # The residual is a softplus, which is only nearly linear; 1e-3 is its least value.
    assert deviation(init) == pytest.approx(init * deviation(1.0), rel=0.3, abs=2e-3)


def test_a_start_without_noise_is_refused():
    with pytest.raises(ValueError, match="init must be positive"):
        build_covariance("efficient", 4, 4, init=0.0)
