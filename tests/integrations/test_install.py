import typing

import pytest
from torch import nn

from hetxl.integrations.adapt import Adapted
from hetxl.integrations.install import install
from hetxl.integrations.layer import HetLayer, HetXLLayer


class Recording(Adapted):
    calls: typing.ClassVar[list] = []

    @classmethod
    def hetxl_checked(cls, model, options):
        if "refuse" in options:
            raise ValueError("refused")
        return options | {"rank": 3}

    def hetxl_converted(self):
        self.calls.append(dict(self.hetxl_options))


def test_without_an_adapter_only_the_layer_changes():
    model = nn.Sequential(nn.ReLU(), nn.Linear(4, 3))
    assert install(model, None, "het", None, {"rank": 2}) is model
    assert type(model) is nn.Sequential
    assert isinstance(model[1], HetLayer)


def test_an_adapter_checks_completes_and_is_told():
    Recording.calls.clear()
    model = nn.Sequential(nn.ReLU(), nn.Linear(4, 3))
    install(model, Recording, "het-xl", None, {})
    assert isinstance(model, Recording)
    assert model[1].covariance.rank == 3
    assert Recording.calls == [{"head": "het-xl", "layer": "1", "rank": 3}]


def test_a_refusal_changes_nothing():
    model = nn.Sequential(nn.ReLU(), nn.Linear(4, 3))
    with pytest.raises(ValueError, match="refused"):
        install(model, Recording, "het-xl", None, {"refuse": True})
    assert type(model) is nn.Sequential
    assert isinstance(model[1], nn.Linear)


def test_the_layer_itself():
    assert isinstance(install(nn.Linear(4, 3), None, "het-xl", None, {}), HetXLLayer)
