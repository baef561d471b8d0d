"""Heads from the weights of the authors' layer: values, the position of every entry, and errors."""

import types
from pathlib import Path

import numpy as np
import pytest
import torch

import hetxl.integrations
from hetxl import DetHead, HetHashHead, HetHead, HetXLHead, LearnedTemperature
from hetxl.integrations.flax import import_weights, read_params

REFERENCE = Path(__file__).parent.parent / "data" / "reference"
FILES = sorted(path.stem for path in REFERENCE.glob("*.npz"))
D, K, R = 4, 6, 2


def learning_head(num_classes=K, **options):
    """A head with the learned temperature that the authors' layer has."""
    return HetXLHead(
        D, num_classes, **{"rank": R, "temperature": LearnedTemperature(dtype=options.get("dtype")), **options}
    )


def arrays_of(name):
    with np.load(REFERENCE / f"{name}.npz") as file:
        return {key: file[key] for key in file.files}


def link_of(name):
    return "sigmoid" if "sigmoid" in name else "softmax"


def layer(kind="het-xl", covariance="efficient", seed=0, **changed):
    """Random weights under the names of the layer's own code; None leaves an entry out."""
    rng = np.random.default_rng(seed)
    N = K if kind == "het" else D
    sizes = {"loc_layer": (D, K), "diag_layer": (D, N)}
    if covariance == "efficient":
        sizes |= {"scale_layer_homoscedastic": (R, N), "scale_layer_heteroscedastic": (D, N)}
    elif covariance == "low_rank":
        sizes |= {"scale_layer": (D, N * R)}
    actual = {name: {"kernel": rng.normal(size=size), "bias": rng.normal(size=size[1])} for name, size in sizes.items()}
    actual |= {"pre_sigmoid_temperature": rng.normal(size=1)} | changed
    return {name: value for name, value in actual.items() if value is not None}


def layer_probs(params, features, z, z0, *, low, high):
    """What the authors' layer computes, in its own order: [B, K]."""

    def dense(name, inputs):
        return inputs @ params[name]["kernel"] + params[name]["bias"]

    scale = np.logaddexp(0, dense("diag_layer", features)) + 1e-3
    noise = scale[:, None] * z0
    if "scale_layer" in params:
        loadings = dense("scale_layer", features).reshape(len(features), -1, R)
        noise = noise + np.einsum("bnr,bsr->bsn", loadings, z)
    elif "scale_layer_homoscedastic" in params:
        noise = noise + dense("scale_layer_homoscedastic", z) * dense("scale_layer_heteroscedastic", features)[:, None]
    if scale.shape[-1] == K:
        logits = dense("loc_layer", features)[:, None] + noise
    else:
        logits = dense("loc_layer", features[:, None] + noise)
    tau = 1.0
    if "pre_sigmoid_temperature" in params:
        tau = (high - low) / (1 + np.exp(-params["pre_sigmoid_temperature"])) + low
    weights = np.exp(logits / tau)
    return (weights / weights.sum(-1, keepdims=True)).mean(1)


def draws(rank=R, batch=3, samples=5):
    rng = np.random.default_rng(1)
    return rng.normal(size=(batch, D)), rng.normal(size=(batch, samples, rank)), rng.normal(size=(batch, samples, 1))


def predicted(head, features, z, z0):
    noise = torch.from_numpy(np.concatenate((z, z0), axis=-1))
    return head.predict(torch.from_numpy(features), noise=noise).probs.numpy()


def test_eight_reference_files_exist():
    assert len(FILES) == 8


@pytest.mark.parametrize("name", FILES)
def test_a_new_head_predicts_the_reference_numbers(name):
    arrays = arrays_of(name)
    head = import_weights(REFERENCE / f"{name}.npz", link=link_of(name))
    assert type(head) is (HetXLHead if name.startswith("het_xl") else HetHead)
    assert head.classifier.weight.dtype == torch.float64
    assert (head.temperature.low, head.temperature.high) == (0.05, 5.0)
    actual = predicted(head, arrays["features"], arrays["z"], arrays["z0"])
    np.testing.assert_allclose(actual, arrays["probs"], rtol=1e-9)


@pytest.mark.parametrize("name", ["het_xl_softmax_efficient", "het_sigmoid_low_rank"])
def test_a_given_head_is_filled(name):
    arrays = arrays_of(name)
    N, rank = arrays["d_kernel"].shape[1], arrays["z"].shape[-1]
    kind = HetXLHead if name.startswith("het_xl") else HetHead
    head = kind(
        *arrays["W"].shape,
        rank=rank,
        covariance="low_rank" if name.endswith("low_rank") else "efficient",
        link=link_of(name),
        temperature=LearnedTemperature(),
    ).double()
    weight = head.classifier.weight
    assert import_weights(arrays, head) is head
    assert head.classifier.weight is weight  # in place: an optimiser keeps its parameters
    assert head.covariance.noise_features == N
    actual = predicted(head, arrays["features"], arrays["z"], arrays["z0"])
    np.testing.assert_allclose(actual, arrays["probs"], rtol=1e-9)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", ["het_xl_softmax_efficient", "het_softmax_low_rank"])
def test_values_arrive_to_the_bit(name, dtype):
    arrays = {key: value.astype(dtype) for key, value in arrays_of(name).items()}
    head = import_weights(arrays)
    expected = {
        "classifier.weight": arrays["W"].T,
        "classifier.bias": arrays["b"],
        "temperature.raw": arrays["raw_tau"],
    }
    expected |= {"covariance.residual.weight": arrays["d_kernel"].T, "covariance.residual.bias": arrays["d_bias"]}
    if "J" in arrays:
        expected |= {"covariance.scale.weight": arrays["v_kernel"].T, "covariance.scale.bias": arrays["v_bias"]}
        expected |= {"covariance.factor": arrays["J"]}
    else:
        expected |= {"covariance.loadings.weight": arrays["V_kernel"].T, "covariance.loadings.bias": arrays["V_bias"]}
    state = head.state_dict()
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        assert state[key].numpy().dtype == dtype
        np.testing.assert_array_equal(state[key].numpy().reshape(value.shape), value)
    # A copy: training the head leaves the arrays alone.
    before = arrays["W"].copy()
    with torch.no_grad():
        head.classifier.weight.add_(1)
    np.testing.assert_array_equal(arrays["W"], before)


@pytest.mark.parametrize("covariance", ["efficient", "low_rank", "diagonal"])
@pytest.mark.parametrize("kind", ["het", "het-xl"])
def test_the_layers_own_names_and_its_biased_factor(kind, covariance):
    # Trained, the bias of the shared factor is not 0: the noise has a mean, which goes into the classifier.
    params = layer(kind, covariance)
    rank = 0 if covariance == "diagonal" else R
    features, z, z0 = draws(rank)
    head = import_weights({"params": params}, temperature=LearnedTemperature(0.3, 3.0, dtype=torch.float64))
    expected = layer_probs(params, features, z, z0, low=0.3, high=3.0)
    np.testing.assert_allclose(predicted(head, features, z, z0), expected, rtol=1e-9)
    assert (getattr(head, "projection", None) is not None) == (kind == "het-xl" and covariance == "efficient")


def test_a_bias_of_zero_changes_nothing():
    params = layer()
    params["scale_layer_homoscedastic"]["bias"][:] = 0
    head = import_weights(params)
    assert head.projection is None
    np.testing.assert_array_equal(head.classifier.weight.detach().numpy(), params["loc_layer"]["kernel"].T)


def test_a_biased_factor_in_a_given_head():
    params, (features, z, z0) = layer(), draws()
    with pytest.raises(ValueError, match="J_bias is not 0; pass a head with noise_features=4"):
        import_weights(params, learning_head(dtype=torch.float64))
    head = import_weights(params, learning_head(noise_features=D, dtype=torch.float64))
    expected = layer_probs(params, features, z, z0, low=0.05, high=5.0)
    np.testing.assert_allclose(predicted(head, features, z, z0), expected, rtol=1e-9)
    with pytest.raises(ValueError, match="params also has b;"):
        import_weights(params, learning_head(noise_features=D, bias=False))
    params["loc_layer"] = {"kernel": params["loc_layer"]["kernel"]}
    with pytest.raises(ValueError, match="J_bias is not 0; pass a head whose classifier has a bias"):
        import_weights(params, learning_head(noise_features=D, bias=False))


@pytest.mark.parametrize(("options", "tau"), [({}, 1.0), ({"temperature": 2.0}, 2.0)])
def test_a_temperature_that_was_not_learned(options, tau):
    assert import_weights(layer(pre_sigmoid_temperature=None), **options).temperature() == tau
    assert import_weights(layer(pre_sigmoid_temperature=None, tau=0.5)).temperature() == 0.5


def test_the_bounds_of_tau_come_with_the_weights_or_by_option():
    head = import_weights(layer(tau_min=0.2, tau_max=2.0))
    assert (head.temperature.low, head.temperature.high) == (0.2, 2.0)
    with pytest.raises(ValueError, match=r"tau_min is 0\.2, but the bound in LearnedTemperature.* is 0\.05"):
        import_weights(layer(tau_min=0.2), learning_head(noise_features=D))
    with pytest.raises(ValueError, match=r"temperature must fit the weights, which have a learned one .* Fixed"):
        import_weights(layer(), temperature=1.0)
    with pytest.raises(ValueError, match="which have no learned one"):
        import_weights(layer(pre_sigmoid_temperature=None), temperature=LearnedTemperature())


def test_other_options_reach_the_head():
    head = import_weights(layer(), link="sigmoid", eval_samples=7, dtype=torch.float32, covariance="efficient", rank=R)
    assert (head.link, head.eval_samples, head.classifier.weight.dtype) == ("sigmoid", 7, torch.float32)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"loc_layer": None}, r"W must be an array of shape \[D, K\]; it is missing"),
        ({"loc_layer": {"kernel": np.ones(3)}}, r"W must be an array of shape \[D, K\]; found \[3\]"),
        ({"loc_layer": {"kernel": np.ones((D, K))}}, "params lacks b; het-xl with the covariance efficient"),
        ({"diag_layer": {"kernel": np.ones((D, D))}}, "lacks d_bias"),
        ({"scale_layer_homoscedastic": None}, "lacks J;"),
        ({"scale_layer_homoscedastic": {"kernel": np.ones((R, K))}}, r"J must have shape \[2, 4\], found \[2, 6\]"),
        ({"scale_layer_homoscedastic": {"kernel": np.ones(())}}, r"J must have shape \[1, 4\], found \[\]"),
        ({"scale_layer_heteroscedastic": None}, "lacks v_kernel, v_bias"),
        ({"scale_layer": {"kernel": np.ones((D, D)), "bias": np.ones(D)}}, "also has V_bias, V_kernel"),
        ({"diag_layer": {"kernel": np.ones((D, 5)), "bias": np.ones(5)}}, "neither K nor D of W"),
        ({"diag_layer": {"kernel": np.ones((D, D)), "bias": np.ones(3)}}, r"d_bias must have shape \[4\], found \[3\]"),
        ({"pre_sigmoid_temperature": np.ones(2)}, r"raw_tau must have shape \[\], found \[2\]"),
        ({"min_scale": 0.1}, r"min_scale must be 0\.001, .* found 0\.1"),
        ({"tau_max": np.ones(2)}, "tau_max must be one number"),
    ],
)
def test_wrong_entries_are_named_in_one_line(changed, message):
    with pytest.raises(ValueError, match=message) as caught:
        import_weights(layer(**changed))
    assert "\n" not in str(caught.value)


def test_wrong_shape_of_low_rank_factors_raises():
    params = layer(covariance="low_rank", scale_layer={"kernel": np.ones((D, 9)), "bias": np.ones(9)})
    with pytest.raises(ValueError, match=r"V_kernel must have shape \[4, 8\], found \[4, 9\]"):
        import_weights(params)


def test_a_square_classifier_needs_its_kind():
    arrays = {"W": np.ones((3, 3)), "b": np.ones(3), "d_kernel": np.ones((3, 3)), "d_bias": np.ones(3)}
    with pytest.raises(ValueError, match=r"kind must be given: .* use kind='het' or kind='het-xl'"):
        import_weights(arrays)
    assert type(import_weights(arrays, kind="het")) is HetHead
    assert type(import_weights(arrays, kind="het-xl")) is HetXLHead
    with pytest.raises(ValueError, match="did you mean 'het-xl'"):
        import_weights(arrays, kind="het_xl")
    with pytest.raises(ValueError, match=r"d_kernel must have shape \[4, 6\], found \[4, 4\]"):
        import_weights(layer("het-xl"), kind="het")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 3}, "rank must be 2"),
        ({"covariance": "full"}, "covariance must"),
        ({"bias": False}, "bias must be True"),
    ],
)
def test_options_that_the_weights_contradict(options, message):
    with pytest.raises(ValueError, match=message):
        import_weights(layer(), **options)
    with pytest.raises(ValueError, match="classifier must be left out"):
        import_weights(layer(), classifier=torch.nn.Linear(D, K))


@pytest.mark.parametrize(
    ("head", "error", "message"),
    [
        (lambda: DetHead(D, K), TypeError, "found DetHead"),
        (lambda: HetHashHead(D, K), TypeError, "found HetHashHead with EfficientCovariance"),
        (lambda: HetXLHead(D, K, covariance="full"), TypeError, "found HetXLHead with FullCovariance"),
        (lambda: HetXLHead(D, K, residual="diagonal"), ValueError, 'residual="rank1"'),
        (lambda: HetXLHead(D, K, classifier=torch.nn.Sequential(torch.nn.Linear(D, K))), TypeError, "found Sequential"),
        (lambda: HetXLHead(D, K, noise_features=3), ValueError, "found noise_features=3"),
        (lambda: learning_head(rank=3), ValueError, r"J must have shape \[3, 4\], found \[2, 4\]"),
        (lambda: learning_head(num_classes=9), ValueError, r"W must have shape \[4, 9\], found \[4, 6\]"),
        (lambda: learning_head(covariance="low_rank"), ValueError, "lacks V_kernel, V_bias and also has J"),
        (lambda: HetXLHead(D, K, rank=R), ValueError, "also has raw_tau"),
    ],
)
def test_heads_that_are_another_model(head, error, message):
    filled = head()
    before = {name: value.clone() for name, value in filled.state_dict().items()}
    with pytest.raises(error, match=message):
        import_weights(layer(), filled)
    for name, value in filled.state_dict().items():
        assert torch.equal(value, before[name])


def test_options_beside_a_given_head():
    with pytest.raises(ValueError, match="leave out kind, link"):
        import_weights(layer(), HetXLHead(D, K, rank=R), kind="het-xl", link="softmax")


def test_the_name_is_in_the_package():
    assert hetxl.integrations.import_weights is import_weights
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = hetxl.integrations.nothing


LAYER = {
    "loc_layer": {"kernel": np.ones((3, 5)), "bias": np.zeros(5)},
    "diag_layer": {"kernel": np.ones((3, 3)), "bias": np.zeros(3)},
    "scale_layer_homoscedastic": {"kernel": np.ones((2, 3)), "bias": np.zeros(3)},
    "scale_layer_heteroscedastic": {"kernel": np.ones((3, 3)), "bias": np.zeros(3)},
    "pre_sigmoid_temperature": np.zeros(1),
}
PLAIN = {"W", "b", "d_kernel", "d_bias", "J", "J_bias", "v_kernel", "v_bias", "raw_tau"}


def flat(params, separator, path=""):
    for key, value in params.items():
        if isinstance(value, dict):
            yield from flat(value, separator, f"{path}{key}{separator}")
        else:
            yield f"{path}{key}", value


@pytest.mark.parametrize(
    "form",
    [
        lambda: LAYER,
        lambda: {"params": {"head": LAYER}},
        lambda: types.MappingProxyType({"params": types.MappingProxyType(LAYER)}),
        lambda: dict(flat(LAYER, "/")),
        lambda: dict(flat({"params": LAYER}, ".")),
    ],
)
def test_nested_and_flat_forms_are_the_same(form):
    actual = read_params(form())
    assert actual.keys() == PLAIN
    assert actual["W"] is LAYER["loc_layer"]["kernel"]
    assert actual["J"].shape == (2, 3)


def test_the_names_of_low_rank_and_the_plain_ones_nested():
    actual = read_params({"scale_layer": {"kernel": np.ones((3, 6)), "bias": np.ones(6)}, "tau_min": 0.1})
    assert actual.keys() == {"V_kernel", "V_bias", "tau_min"}
    actual = read_params({"W": {"kernel": np.ones((3, 5)), "bias": np.ones(5)}, "d": {"kernel": np.ones((3, 3))}})
    assert actual.keys() == {"W", "b", "d_kernel"}


def test_a_file_and_what_reference_files_hold_beside(tmp_path):
    beside = {"features": np.ones(2), "z": np.ones(1), "z0": np.ones(1), "grad_W": np.ones(1), "loss": np.ones(())}
    np.savez(tmp_path / "layer.npz", **dict(flat(LAYER, "/")), **beside)
    for path in (tmp_path / "layer.npz", str(tmp_path / "layer.npz")):
        assert read_params(path).keys() == PLAIN


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (np.ones(2, np.float16), np.float32),
        (np.ones(2, np.float32), np.float32),
        ([0.5, 1.5], np.float64),
        ([1, 2], np.float32),
        (torch.ones(2), np.float32),
    ],
)
def test_anything_like_an_array(value, dtype):
    actual = read_params({"b": value})["b"]
    assert actual.dtype == dtype
    np.testing.assert_array_equal(actual, np.asarray(value))


@pytest.mark.parametrize(
    "value", ["text", object(), np.ones(2, complex), torch.ones(2, requires_grad=True), [[1], [1, 2]]]
)
def test_value_that_is_not_an_array_is_named(value):
    with pytest.raises(TypeError, match="loc_layer/kernel must be an array of real numbers"):
        read_params({"loc_layer": {"kernel": value}})


def test_unexpected_entries_are_named():
    with pytest.raises(ValueError, match=r"holds encoder/kernel, which the layer .* such as params\['head'\]"):
        read_params({**LAYER, "encoder": {"kernel": np.ones(2)}})
    backbone = {f"block{number}": {"kernel": np.ones(2)} for number in range(20)}
    with pytest.raises(ValueError, match=r"block0/kernel, .* and 23 more") as caught:
        read_params({"params": {"backbone": backbone, "head": LAYER}})
    assert "\n" not in str(caught.value)


def test_an_entry_that_is_there_twice():
    with pytest.raises(ValueError, match="holds W twice, once as W"):
        read_params({**LAYER, "W": np.ones((3, 5))})
    with pytest.raises(ValueError, match="holds d_kernel twice"):
        read_params({"d": {"kernel": np.ones(2)}, "d/kernel": np.ones(2)})


def test_missing_and_invalid_files_raise(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.npz does not exist"):
        read_params(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("text")
    np.save(tmp_path / "one.npy", np.ones(3))
    np.savez(tmp_path / "objects.npz", W=np.array([{}], dtype=object))
    for name in ("text.npz", "one.npy", "objects.npz"):
        with pytest.raises(ValueError, match=rf"{name} is not an \.npz file of arrays"):
            read_params(tmp_path / name)
    with pytest.raises(TypeError, match="found list"):
        read_params([1.0])
