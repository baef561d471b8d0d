import pytest
import torch

from hetxl.functional.engine.class_draws import ClassDraws
from hetxl.functional.noise import GaussianNoise

N, S, K, R = 3, 4, 7, 2


def parts(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = {"factors": (R, K), "scale": (N, K), "residual": (N, K), "mean": (K, N)}
    return {name: torch.randn(size, generator=generator, dtype=dtype).requires_grad_() for name, size in sizes.items()}


def normals() -> torch.Tensor:
    return torch.randn(N, S, R + 1, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def noise_of(given: dict[str, torch.Tensor]) -> GaussianNoise:
    return GaussianNoise(given["factors"], given["scale"], given["residual"], "rank1")


@pytest.mark.parametrize("in_memory", [False, True])
def test_logits_are_the_mean_and_the_draws_over_tau(in_memory: bool):
    given, z, tau = parts(), normals(), torch.tensor(0.7, dtype=torch.float64)
    noise = noise_of(given)
    naive = (given["mean"].T.unsqueeze(1) + noise.draw(z)) / tau  # [n, S, k]
    memory = torch.empty(N * S * K, dtype=torch.float64) if in_memory else None
    found = ClassDraws(noise, z).logits(given["mean"].detach(), tau, memory)
    torch.testing.assert_close(found, naive.detach(), rtol=1e-12, atol=1e-12)
    if memory is not None:
        assert found.data_ptr() == memory.data_ptr()


def test_gradients_are_those_of_autograd():
    given, z = parts(), normals()
    gradient = torch.randn(N, S, K, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    rows = given["mean"].T.unsqueeze(1) + noise_of(given).draw(z)
    expected = dict(zip(given, torch.autograd.grad(rows, list(given.values()), gradient), strict=True))
    mean, found = ClassDraws(noise_of(given), z).backward(gradient.clone())
    for name, value in {**found, "mean": mean}.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "fits"),
    [
        ({}, True),
        ({"factors": None}, False),
        ({"scale": None}, False),
        ({"residual": None}, False),
        ({"residual_kind": "diagonal"}, False),
        ({"factors": torch.zeros(N, R, K, dtype=torch.float64)}, False),  # an example's own
        ({"scale": torch.zeros(N, K, dtype=torch.bfloat16)}, False),
    ],
)
def test_which_noise_it_is_for(change: dict, fits: bool):
    given = parts()
    options = {name: given[name] for name in ("factors", "scale", "residual")} | {"residual_kind": "rank1", **change}
    assert ClassDraws.fit(GaussianNoise(**options), torch.float64) is fits
