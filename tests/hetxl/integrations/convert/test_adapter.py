import copy
import pickle

import pytest
import torch
from torch import nn

from hetxl.integrations.convert.adapter import Adapted, adapted_class, fresh_options, restored_options, stored_options
from hetxl.nn import FixedTemperature, LearnedTemperature


class Doubling(Adapted):
    @classmethod
    def hetxl_forward(cls, base):
        return lambda self, inputs: 2 * base.forward(self, inputs)


class Plain(Adapted):
    pass


def adapted(adapter):
    model = nn.Sequential(nn.Linear(3, 2))
    model.__class__ = adapted_class(nn.Sequential, adapter)
    return model


def test_a_class_keeps_its_name_and_gains_methods():
    model = adapted(Doubling)
    kind = type(model)
    assert (kind.__name__, kind.__qualname__, kind.__module__) == ("Sequential", "Sequential", nn.Sequential.__module__)
    assert isinstance(model, nn.Sequential)
    assert (kind.hetxl_base, kind.hetxl_adapter) == (nn.Sequential, Doubling)
    assert torch.equal(model(torch.ones(1, 3)), 2 * model[0](torch.ones(1, 3)))
    assert adapted_class(nn.Sequential, Doubling) is kind


def test_without_a_forward_the_models_own_stays():
    model = adapted(Plain)
    assert type(model).forward is nn.Sequential.forward
    assert model.hetxl_checked(model, {"rank": 2}) == {"rank": 2}


def test_adapted_model_can_be_copied_and_pickled():
    model = adapted(Doubling)
    model.hetxl_options = {"head": "det"}
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(other) is type(model)
        assert other.hetxl_options == {"head": "det"}
        assert other[0].weight is not model[0].weight
        assert torch.equal(other(torch.ones(1, 3)), model(torch.ones(1, 3)))


def test_stored_options_round_trip():
    temperature = LearnedTemperature(low=0.1, high=3.0, init=0.7)
    stored = stored_options({"rank": 3, "temperature": temperature})
    assert stored == {"rank": 3, "temperature": {"low": 0.1, "high": 3.0, "init": 0.7}}
    restored = restored_options(stored)["temperature"]
    assert (restored.low, restored.high, restored.init) == (0.1, 3.0, 0.7)
    assert restored_options(stored_options({"temperature": FixedTemperature(2.0)})) == {"temperature": 2.0}
    assert restored_options({"rank": 1}) == {"rank": 1}


def test_options_unfit_for_json_raise():
    with pytest.raises(ValueError, match="temperature is a ReLU"):
        stored_options({"temperature": nn.ReLU()})
    with pytest.raises(ValueError, match="sampler is a function"):
        stored_options({"sampler": print})


def test_new_head_starts_with_the_initial_temperature():
    temperature = LearnedTemperature(init=2.0)
    with torch.no_grad():
        temperature.raw += 1
    head, layer, rest = fresh_options({"head": "het", "layer": "fc", "rank": 2, "temperature": temperature})
    assert (head, layer, rest["rank"]) == ("het", "fc", 2)
    assert rest["temperature"] is not temperature
    assert float(rest["temperature"]().detach()) == pytest.approx(2.0)
    assert fresh_options({"head": "het", "layer": "fc", "temperature": 1.0})[2] == {"temperature": 1.0}
