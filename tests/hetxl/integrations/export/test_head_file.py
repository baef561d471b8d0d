"""A head comes back from its file as it was, and a file that is not right is refused in one line."""

import json
import math
import random

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import hetxl
from hetxl._tensors import CHECKSUM, write_tensors
from hetxl.functional.samplers import iid
from hetxl.integrations.export.head_file import FORMAT, KEY, describe_head, load_head, save_head
from hetxl.nn import DropoutHead, LaplaceHead
from support.cases import GRID, LINKS, make, normals

NAMES = [f"class {number}" for number in range(7)]


def same(actual, head, features):
    """Whether two heads predict the same, to the bit, with given noise and with noise of their own."""
    noise = normals(head, samples=4, dtype=features.dtype)

    def probs(of):
        drawn = of.predict(features, num_samples=5, generator=torch.Generator().manual_seed(3)).probs
        return torch.stack((of.predict(features, noise=noise).probs, drawn))

    return torch.equal(probs(actual), probs(head))


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize(("variant", "covariance", "residual"), GRID)
def test_saved_head_round_trips(variant, covariance, residual, link, tmp_path):
    head = make(variant, covariance=covariance, residual=residual, link=link, dtype=torch.float32)
    save_head(head, tmp_path / "head.safetensors")
    actual = load_head(tmp_path / "head.safetensors")
    assert type(actual) is type(head)
    assert repr(actual) == repr(head)
    assert not actual.training
    assert same(actual, head, torch.randn(3, 5))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("det", {"temperature": 0.7, "bias": False}),
        ("det", {"temperature": hetxl.LearnedTemperature(0.1, 3.0, init=2.0)}),
        ("het", {"temperature": hetxl.LearnedTemperature(0.2, 4.0), "sampler": "sobol", "noise_init": 0.5}),
        ("het-h", {"buckets": 4, "hash_seed": 9, "train_samples": 3, "eval_samples": 11, "sampler": "antithetic"}),
        ("het-xl", {"bias_init": -10.0, "memory_budget": 2**20, "sampler": "iid", "rank": 0}),
        ("het-xl", {"noise_scale": 0.25, "temperature": 0.8}),
        ("het-xl", {"noise_features": 5}),  # as many as in_features, and still a projection of its own
    ],
)
def test_every_option_comes_back(name, options, tmp_path):
    head = hetxl.build_head(name, 5, 7, **({"rank": 2} | options))
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    save_head(head, tmp_path / "head.safetensors")
    actual = load_head(tmp_path / "head.safetensors")
    plain = (str, int, float, type(None))
    for of, other in zip(head.modules(), actual.modules(), strict=True):
        assert {k: v for k, v in vars(of).items() if isinstance(v, plain) and k != "training"} == {
            k: v for k, v in vars(other).items() if isinstance(v, plain) and k != "training"
        }
    assert same(actual, head, torch.randn(3, 5))
    actual.reset_parameters()  # the options that it needs are there
    assert all(torch.isfinite(parameter).all() for parameter in actual.parameters())


@pytest.mark.parametrize("link", LINKS)
def test_averaged_heads_come_back(link, tmp_path):
    """MC dropout with its rate, and Laplace with the curvature and the prior that make its posterior."""
    features = torch.randn(40, 5)
    laplace = LaplaceHead.of(hetxl.DetHead(5, 7, link=link, temperature=0.7, standardize=True)).eval()
    laplace.measure([features])
    laplace.prior = 3.0
    for head in (DropoutHead(5, 7, link=link, dropout=0.4, eval_samples=9, eval_seed=4).eval(), laplace):
        save_head(head, tmp_path / "head.safetensors", class_names=NAMES)
        actual = load_head(tmp_path / "head.safetensors")
        assert type(actual) is type(head)
        expected = {method: head.predict(features, method=method).probs for method in head.methods}
        assert {"deterministic", "mc"} <= set(expected)
        for method, probs in expected.items():
            assert torch.equal(actual.predict(features, method=method).probs, probs), method
        assert not torch.equal(expected["mc"], expected["deterministic"])  # unlike DET


def test_other_dtypes_and_devices(tmp_path):
    path = tmp_path / "head.safetensors"
    head = make("het-h", dtype=torch.float64)
    save_head(head, path)
    features = torch.randn(3, 5, dtype=torch.float64)
    assert same(load_head(path), head, features)
    narrow = load_head(path, dtype=torch.float32)
    assert narrow.hash.dtype == torch.int64
    assert {parameter.dtype for parameter in narrow.parameters()} == {torch.float32}
    noise = normals(head)
    actual = narrow.predict(features.float(), noise=noise.float()).probs
    torch.testing.assert_close(actual.double(), head.predict(features, noise=noise).probs, rtol=0, atol=1e-6)
    assert load_head(path, dtype=torch.bfloat16).classifier.weight.dtype == torch.bfloat16
    elsewhere = load_head(path, device="meta", dtype=torch.float16)
    assert {value.device.type for value in elsewhere.state_dict().values()} == {"meta"}
    with pytest.raises(ValueError, match="dtype must be a floating-point type"):
        load_head(path, dtype=torch.int64)


def test_a_loaded_head_trains(tmp_path):
    save_head(make("het-xl", dtype=torch.float32), tmp_path / "head.safetensors")
    head = load_head(tmp_path / "head.safetensors").train()
    head(torch.randn(4, 5), torch.randint(7, (4,))).backward()
    assert all(parameter.grad is not None for parameter in head.parameters())


def test_the_configuration_can_be_read_without_the_tensors(tmp_path):
    path = tmp_path / "head.safetensors"
    save_head(make("het-h", temperature=hetxl.LearnedTemperature(init=1.0)), path, class_names=NAMES)
    about = describe_head(path)
    assert about["head"] == "het-h"
    assert (about["in_features"], about["num_classes"], about["format"]) == (5, 7, FORMAT)
    assert about["class_names"] == NAMES
    assert about["options"]["buckets"] == 5
    assert about["temperature"] == {"kind": "learned", "low": 0.05, "high": 5.0, "init": 1.0}
    assert about["hetxl_version"] == hetxl.__version__
    save_head(make("het-h"), path)
    assert describe_head(path)["class_names"] is None
    for names in (NAMES[:-1], "abcdefg", [1] * 7):
        with pytest.raises(ValueError, match="class_names must be 7 strings"):
            save_head(make("det"), path, class_names=names)


class Halved(nn.Module):
    def forward(self):
        return 0.5


class Doubled(nn.Module):
    def forward(self, weight):
        return 2 * weight


class Own(hetxl.DetHead):
    pass


def mixed_types():
    head = hetxl.HetXLHead(5, 7, rank=2)
    head.classifier.bfloat16()
    return head


def parametrised():
    head = hetxl.DetHead(5, 7)
    torch.nn.utils.parametrize.register_parametrization(head.classifier, "weight", Doubled())
    return head


def own_covariance():
    head = hetxl.HetHead(5, 7, rank=2)
    head.covariance.__class__ = type("Mine", (type(head.covariance),), {})
    return head


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda: hetxl.DetHead(5, 7, classifier=lambda x: x @ torch.ones(5, 7)), TypeError, "classifier is <lambda>"),
        (lambda: hetxl.DetHead(5, 7, classifier=nn.Sequential(nn.Linear(5, 7))), TypeError, "classifier is Sequential"),
        (lambda: hetxl.HetXLHead(5, 7, sampler=iid), TypeError, "head.sampler"),
        (lambda: hetxl.DetHead(5, 7, temperature=Halved()), TypeError, "FixedTemperature"),
        (lambda: Own(5, 7), TypeError, "found Own"),
        (parametrised, ValueError, "parametrisations"),
        (own_covariance, TypeError, "covariance is a Mine"),
        (lambda: hetxl.DetHead(5, 7, device="meta"), ValueError, "meta device"),
        (mixed_types, ValueError, "types torch.bfloat16, torch.float32; convert it"),
        (lambda: nn.Linear(5, 7), TypeError, "found Linear"),
    ],
)
def test_heads_that_cannot_be_saved_raise(build, error, message, tmp_path):
    path = tmp_path / "head.safetensors"
    save_head(make("det"), path)
    before = path.read_bytes()
    with pytest.raises(error, match=message) as raised:
        save_head(build(), path)
    assert "\n" not in str(raised.value)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "head.safetensors"
    save_head(make("het-h", dtype=torch.float32), path, class_names=NAMES)
    return path


def rewrite(path, tensors=None, configuration=None, **entries):
    """The file with other tensors, or another configuration, and the right checksum."""
    actual = load_file(path)
    about = json.loads(metadata(path)[KEY]) | entries
    actual |= tensors or {}
    actual = {name: value for name, value in actual.items() if value is not None}
    if configuration is None:
        write_tensors(path, actual, {name: value for name, value in about.items() if name != CHECKSUM}, KEY)
    else:
        save_file(actual, path, {KEY: configuration})


def metadata(path):
    with safe_open(path, framework="pt") as file:
        return file.metadata()


def options(path, **changed):
    actual = json.loads(metadata(path)[KEY])["options"] | changed
    return {name: value for name, value in actual.items() if value != "left out"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.write_text("not a head, but long enough to be read"), "not a complete safetensors file"),
        (lambda path: path.write_bytes(b""), "not a complete safetensors file"),
        (lambda path: path.write_bytes(path.read_bytes()[:-8]), "not a complete safetensors file"),
        (lambda path: path.write_bytes(path.read_bytes()[:300]), "not a complete safetensors file"),
        (lambda path: save_file(load_file(path), path), "has tensors but no head"),
        (lambda path: rewrite(path, format=FORMAT + 1), "newer hetxl"),
        (lambda path: rewrite(path, format="1"), "no format number"),
        (lambda path: rewrite(path, configuration="{"), "not valid JSON"),
        (lambda path: rewrite(path, configuration="[" * 100_000), "not valid JSON"),
        (lambda path: rewrite(path, configuration="[1]"), "must hold a JSON object"),
        (lambda path: rewrite(path, head="het-xxl"), "did you mean 'het-xl'"),
        (lambda path: rewrite(path, head=["het"]), "in its configuration"),
        (lambda path: rewrite(path, head="het-xl"), "unknown buckets, hash_seed"),
        (lambda path: rewrite(path, surplus=1), "unknown surplus"),
        (lambda path: rewrite(path, options=3), "options must be a table"),
        (lambda path: rewrite(path, options=options(path, rank="left out")), "missing rank"),
        (lambda path: rewrite(path, options=options(path, classifier="os.system")), "unknown classifier"),
        (lambda path: rewrite(path, options=options(path, sampler="evil")), "sampler must be one of"),
        (lambda path: rewrite(path, options=options(path, sampler={"a": 1})), "in its configuration"),
        (lambda path: rewrite(path, options=options(path, rank="many")), "rank must be an integer"),
        (lambda path: rewrite(path, options=options(path, rank=10**30)), "is damaged"),
        (lambda path: rewrite(path, options=options(path, eval_samples=0)), "eval_samples must be at least 1"),
        (lambda path: rewrite(path, options=options(path, noise_init=-1.0)), "init must be positive"),
        (lambda path: rewrite(path, options=options(path, rank=3)), "covariance.factor has shape [2, 5]"),
        (lambda path: rewrite(path, options=options(path, buckets=4)), "has shape"),
        (lambda path: rewrite(path, temperature=1.0), "temperature must be a table"),
        (lambda path: rewrite(path, temperature={"kind": "eval"}), "temperature must be one of"),
        (lambda path: rewrite(path, temperature={"kind": "fixed", "value": -1}), "temperature must be positive"),
        (
            lambda path: rewrite(path, temperature={"kind": "learned", "low": 0.05, "high": 5.0, "init": 1.0}),
            "missing temp",
        ),
        (lambda path: rewrite(path, class_names=NAMES[1:]), "class_names must be 7 strings"),
        (lambda path: rewrite(path, class_names="abcdefg"), "class_names must be 7 strings"),
        (lambda path: rewrite(path, class_names=7), "in its configuration"),
        (lambda path: rewrite(path, num_classes=10**15, class_names=None), "classifier.weight is of shape [7, 5]"),
        (lambda path: rewrite(path, num_classes="7", class_names=None), "classifier.weight is of shape"),
        (lambda path: rewrite(path, in_features=6), "classifier.weight is of shape"),
        (lambda path: rewrite(path, {"classifier.weight": None}), "classifier.weight is missing"),
        (lambda path: rewrite(path, {"classifier.bias": None}), "missing classifier.bias"),
        (lambda path: rewrite(path, {"more": torch.zeros(2)}), "unknown more"),
        (lambda path: rewrite(path, {"covariance.scale.bias": torch.zeros(4)}), "covariance.scale.bias has shape [4]"),
        (lambda path: rewrite(path, {"classifier.bias": torch.zeros(7).long()}), "classifier.bias has dtype"),
        (lambda path: rewrite(path, {"hash": torch.zeros(7)}), "hash has dtype"),
        (lambda path: rewrite(path, {"hash": torch.full((7,), 5)}), "buckets 0 to 4"),
        (lambda path: rewrite(path, {"hash": torch.full((7,), -1)}), "buckets 0 to 4"),
        (lambda path: rewrite(path, {"hash": torch.zeros(7).int()}), "buckets 0 to 4"),
        (lambda path: rewrite(path, {"classifier.bias": torch.full((7,), math.nan)}), "7 of the 7 numbers of classif"),
        (lambda path: rewrite(path, {"classifier.bias": torch.arange(7) / 0}), "classifier.bias are NaN or infinite"),
        (lambda path: rewrite(path, {"classifier.bias": torch.zeros(7).half()}), "types torch.float16, torch.float32"),
        (lambda path: rewrite(path, configuration=json.dumps(describe_head(path))), "its checksum is missing"),
        (lambda path: rewrite(path, configuration=metadata(path)[KEY].replace("class 1", "class 2")), "its checksum"),
    ],
)
def test_invalid_files_raise(path, change, message):
    load_head(path)
    change(path)
    with pytest.raises(ValueError) as raised:
        load_head(path)
    text = str(raised.value)
    assert message in text
    assert str(path) in text
    assert "\n" not in text
    assert len(text) < 400


def test_every_flipped_bit_is_refused(path):
    content = path.read_bytes()
    draw = random.Random(0)
    for _ in range(300):
        position, bit = draw.randrange(len(content)), draw.randrange(8)
        changed = bytearray(content)
        changed[position] ^= 1 << bit
        path.write_bytes(changed)
        with pytest.raises(ValueError) as raised:
            load_head(path)
        assert str(path) in str(raised.value)


def test_missing_file_raises(tmp_path):
    for read in (load_head, describe_head):
        with pytest.raises(FileNotFoundError, match="does not exist"):
            read(tmp_path / "head.safetensors")
        with pytest.raises(FileNotFoundError, match="does not exist"):
            read(tmp_path)


def test_files_of_the_first_format_have_all_of_their_noise(tmp_path):
    path, head = tmp_path / "head.safetensors", make("het-xl", dtype=torch.float32)
    save_head(head, path)
    options = {name: value for name, value in describe_head(path)["options"].items() if name != "noise_scale"}
    configuration = describe_head(path) | {"format": 1, "options": options}
    save_file(load_file(path), path, {KEY: json.dumps(configuration)})
    assert load_head(path).noise_scale == 1
    assert same(load_head(path), head, torch.randn(3, 5))
