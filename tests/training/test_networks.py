"""The networks of the package: shapes, gradients, and examples that do not see each other."""

import pytest
import torch

from hetxl.training.networks import Cnn, Mlp, TokenWindow

NETWORKS = {
    "mlp of depth 1": lambda: (Mlp(6, 16, 1, 5), torch.randn(4, 6)),
    "mlp of depth 3": lambda: (Mlp(6, 16, 3, 5), torch.randn(4, 6)),
    "small cnn": lambda: (Cnn(8, 1, 5, 16), torch.randn(4, 3, 16, 16)),
    "deep cnn": lambda: (Cnn(8, 2, 5, 8), torch.randn(4, 3, 8, 8)),
    "grey cnn": lambda: (Cnn(8, 1, 5, 32, channels=1, places=4), torch.randn(4, 1, 32, 32)),
    "large cnn": lambda: (Cnn(16, 1, 5, 96), torch.randn(4, 3, 96, 96)),
}


@pytest.fixture(params=NETWORKS)
def network(request):
    return NETWORKS[request.param]()


def test_shapes(network):
    module, inputs = network
    assert module(inputs).shape == (4, 5)
    assert module(inputs[:1]).shape == (1, 5)
    assert module(inputs[:0]).shape == (0, 5)


def test_gradients_reach_every_parameter(network):
    module, inputs = network
    (module(inputs) * torch.randn(4, 5)).sum().backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().max() > 0, name


def test_an_example_does_not_see_the_others(network):
    module, inputs = network
    module.train()
    whole = module(inputs)
    changed = inputs.clone()
    changed[1:] = 100 * torch.randn_like(changed[1:])
    torch.testing.assert_close(module(changed)[0], whole[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.cat([module(inputs[:1]), module(inputs[1:])]), whole, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(module(changed)[1], whole[1])


def test_an_mlp_by_hand():
    module, inputs = Mlp(6, 16, 2, 5), torch.randn(4, 6)
    gelu, (norm, _, _, linear) = torch.nn.functional.gelu, module.hidden[0].children()
    found = module.first(inputs)
    found = found + linear(gelu(norm(found)))
    found = module.norm(module.last[3](gelu(module.last[0](found))))
    torch.testing.assert_close(module(inputs), found)


def test_dropout_is_for_training():
    module, inputs = Mlp(6, 64, 2, 5, dropout=0.5), torch.randn(4, 6)
    assert not torch.equal(module(inputs), module(inputs))
    module.eval()
    assert torch.equal(module(inputs), module(inputs))


def test_a_window_lays_embeddings_side_by_side():
    window = TokenWindow(11, 3, 4)
    tokens = torch.tensor([[1, 2, 10], [0, 0, 1]])
    found = window(tokens)
    assert window.out_features == 12
    assert torch.equal(found, torch.stack([torch.cat([window.table.weight[i] for i in row]) for row in tokens]))
    assert float(window.table.weight.detach().std()) == pytest.approx(0.5, rel=0.4)


def test_stages_double_the_channels_and_halve_the_size():
    module = Cnn(8, 2, 5, 32)
    assert module.body(torch.randn(1, 3, 32, 32)).shape == (1, 64, 4, 4)
    assert Cnn(8, 1, 5, 32, channels=1).body(torch.randn(1, 1, 32, 32)).shape == (1, 64, 4, 4)
    assert Cnn(8, 1, 5, 128).body(torch.randn(1, 3, 128, 128)).shape == (1, 64, 4, 4)
    assert Cnn(8, 1, 5, 32, stages=3).body(torch.randn(1, 3, 32, 32)).shape == (1, 32, 4, 4)
    assert Cnn(8, 1, 5, 128, stages=3).body(torch.randn(1, 3, 128, 128)).shape == (1, 32, 8, 8)


@pytest.mark.parametrize(("size", "places", "grid"), [(32, 1, 1), (32, 4, 4), (32, 8, 4), (64, 4, 4), (50, 3, 3)])
def test_features_are_read_from_a_grid_of_places(size, places, grid):
    module, pictures = Cnn(8, 1, 5, size, places=places), torch.randn(2, 3, size, size)
    assert module.last.in_features == 64 * grid**2
    assert module(pictures).shape == (2, 5)


def test_only_a_grid_knows_where_things_are():
    body = torch.randn(1, 64, 4, 4)
    turned = body.flip(3)
    mean, grid = Cnn(8, 1, 5, 32), Cnn(8, 1, 5, 32, places=4)
    torch.testing.assert_close(mean.pool(turned).flatten(1), body.mean((2, 3)))
    torch.testing.assert_close(grid.pool(turned), turned)


def test_sizes_that_halving_rounds():
    for size in (8, 9, 31, 33, 95, 96, 97, 131):
        for stages in (3, 4):
            module = Cnn(8, 1, 5, size, channels=1, places=2, stages=stages)
            assert module(torch.randn(1, 1, size, size)).shape == (1, 5)


def test_a_width_that_groups_do_not_divide():
    with pytest.raises(ValueError, match="width of the cnn backbone must be a multiple of 8, found 12"):
        Cnn(12, 1, 5, 32)


def test_centred_features_have_no_mean_over_a_batch():
    module, pictures = Cnn(8, 1, 5, 32, channels=1, centred=True), 10 + torch.randn(6, 1, 32, 32)
    found = module(pictures)
    torch.testing.assert_close(found.mean(0), torch.zeros(5), rtol=0, atol=1e-5)
    assert Cnn(8, 1, 5, 32, channels=1)(pictures).mean(0).abs().max() > 0.1
    module.eval()
    torch.testing.assert_close(module(pictures)[:1], module(pictures[:1]), rtol=1e-4, atol=1e-5)
