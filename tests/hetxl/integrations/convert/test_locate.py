import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from hetxl import DetHead
from hetxl.integrations.convert.locate import find_head, find_layer, is_convertible, names_of, replace
from support.models import Branches, mlp


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (mlp(4, 8, 3), "2"),
        (mlp(8, 8, 3), "2"),
        (Branches(conv=nn.Conv2d(1, 2, 3), fc1=nn.Linear(9, 7), fc2=nn.Linear(7, 5), fc3=nn.Linear(5, 2)), "fc3"),
        (Branches(features=nn.Conv2d(1, 8, 3), head=nn.Conv2d(8, 10, 1)), "head"),
        (Branches(blocks=nn.ModuleList([mlp(4, 9, 4), mlp(4, 9, 4)]), head=nn.Linear(4, 3)), "head"),
        (Branches(body=mlp(4, 9, 6), classifier=nn.Sequential(nn.Dropout(), mlp(6, 5, 4))), "classifier.1.2"),
    ],
)
def test_the_last_linear_layer_is_found(model, name):
    assert find_layer(model) is model.get_submodule(name)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            Branches(body=mlp(4, 8), a=nn.Linear(8, 5), b=nn.Linear(8, 3)),
            r"a \(8 features, 5 outputs\), b \(8 .*layer='b'",
        ),
        (Branches(body=mlp(4, 8), a=mlp(8, 6, 5), b=mlp(8, 6, 3)), r"a\.2 .*b\.2 .*layer='b\.2'"),
        (Branches(heads=nn.ModuleDict({"x": nn.Linear(8, 5), "y": nn.Linear(8, 3)})), r"heads\.x .*heads\.y"),
        (Branches(blocks=nn.Sequential(mlp(4, 4, 4), mlp(4, 4, 4))), "repeated blocks.*layer='blocks.1.2'"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()), "no linear layer to convert"),
        (nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))), "no linear layer.*computed from other"),
    ],
)
def test_doubt_is_an_error_that_lists_the_layers(model, message):
    with pytest.raises(ValueError, match=message):
        find_layer(model)


def test_a_long_list_is_cut():
    model = nn.ModuleList([nn.Linear(4, 3) for _ in range(20)])
    with pytest.raises(ValueError, match=r"… 12 more, 12 \(4"):
        find_layer(model)


def test_a_layer_by_name_or_itself():
    model = Branches(a=nn.Linear(8, 5), b=nn.Linear(8, 3))
    assert find_layer(model, "a") is model.a
    assert find_layer(model, model.b) is model.b
    with pytest.raises(ValueError, match=r"no layer 'c'; its linear layers are: .*layer='b'"):
        find_layer(model, "c")
    with pytest.raises(ValueError, match="not part of the model"):
        find_layer(model, nn.Linear(8, 5))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.ReLU(), "only an nn.Linear or an nn.Conv2d of 1 × 1"),
        (nn.Conv2d(3, 4, 3), "only an nn.Linear"),
        (nn.Conv2d(4, 4, 1, groups=2), "only an nn.Linear"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), "weight norm, a parametrisation"),
        (prune.l1_unstructured(nn.Linear(3, 2), "bias", 0.5), "its bias is computed .*pruning"),
        (nn.LazyLinear(3), "call the model once"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_layers_that_cannot_be_taken_over(layer, message):
    with pytest.raises(ValueError, match=message):
        find_layer(nn.Sequential(layer), "0")


def test_offloaded_layers_are_refused():
    layer = nn.Linear(3, 2)
    layer._hf_hook = object()
    assert not is_convertible(layer)
    with pytest.raises(ValueError, match="before it is dispatched"):
        find_layer(nn.Sequential(layer), "0")


class Tells(nn.Module):
    def __init__(self, classifier):
        super().__init__()
        self.inside = classifier if isinstance(classifier, nn.Module) else nn.ModuleList(classifier or [])
        self.classifier = classifier

    def get_classifier(self):
        return self.classifier


@pytest.mark.parametrize(
    ("classifier", "message"),
    [
        ((nn.Linear(4, 3), nn.Linear(4, 3)), r"several classifiers \(get_classifier\(\) gives 2\)"),
        (nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)]), "several classifiers"),
        (nn.Identity(), "no classifier"),
        (nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)), "gives a Sequential by get_classifier"),
        (nn.utils.parametrizations.weight_norm(nn.Linear(3, 2)), "cannot be converted: its weight is computed"),
    ],
)
def test_unusable_classifier_named_by_the_model_raises(classifier, message):
    with pytest.raises(ValueError, match=message):
        find_layer(Tells(classifier))


def test_a_classifier_inside_what_a_model_names():
    inside = nn.Sequential(nn.Dropout(), nn.Linear(4, 3))
    assert find_layer(Tells(inside)) is list(inside)[1]


def test_replacing_reaches_every_name():
    layer, other = nn.Linear(4, 3), nn.Linear(4, 3)
    model = Branches(head=layer, also=nn.Sequential(nn.ReLU(), layer))
    assert replace(model, layer, other) == ["head", "also.1"]
    assert model.head is model.get_submodule("also.1") is other
    assert names_of(model, layer) == []
    assert torch.equal(model.also(torch.ones(1, 4)), other(torch.ones(1, 4)))


def test_find_head_finds_a_head_by_name_or_the_only_one():
    inner = nn.Sequential(DetHead(2, 2))
    heads = nn.ModuleDict({"first": DetHead(2, 2), "second": inner})
    assert find_head(inner) is inner[0]
    assert find_head(heads, "second.0") is inner[0]
    with pytest.raises(ValueError, match=r"found 2 \(first, second\.0\)"):
        find_head(heads)
    with pytest.raises(ValueError, match=r"found 'third'; it has \['first', 'second\.0'\]"):
        find_head(heads, "third")
    with pytest.raises(ValueError, match="Linear has none"):
        find_head(nn.Linear(2, 2))


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)
        self.attention = nn.MultiheadAttention(4, 2)


def test_attention_is_no_classifier():
    model = Attending()
    assert find_layer(model) is model.head
    with pytest.raises(ValueError, match=r"no linear layer.*'attention\.out_proj' is one, but nn\.MultiheadAttention"):
        find_layer(Branches(attention=model.attention))
    for layer in ("attention.out_proj", model.attention.out_proj):
        with pytest.raises(ValueError, match="uses its weight without calling it"):
            find_layer(model, layer)


def test_hooks_are_no_reason():
    layer = nn.Linear(4, 3)
    layer.register_forward_hook(lambda module, inputs, output: None)
    assert find_layer(nn.Sequential(layer)) is layer
