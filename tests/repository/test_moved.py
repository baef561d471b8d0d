"""Import paths from before the split into three rings."""

import importlib.util

import pytest

from hetxl import _moved

USED = [
    ("hetxl.evaluation", "fit_scales", "hetxl.metrics"),
    ("hetxl.evaluation", "evaluate", "hetxl_train.evaluate"),
    ("hetxl.evaluation.metrics", "summarise", "hetxl.metrics.summary"),
    ("hetxl.training", "TrainConfig", "hetxl_train"),
    ("hetxl.training", "train", "hetxl_train"),
    ("hetxl.training.progress", "Narrator", "hetxl_train.console"),
    ("hetxl.training.distributed", "leave", "hetxl_train.distributed"),
    ("hetxl.data", "open_dataset", "hetxl_train.data"),
    ("hetxl.data", "BrokenLimit", "hetxl_train.data"),
    ("hetxl.data.synthetic", "load_synthetic", "hetxl_train.data.synthetic"),
    ("hetxl.data.label_noise", "with_label_noise", "hetxl_train.data.label_noise"),
    ("hetxl.data.build", "Unavailable", "hetxl_lab.build.packages"),
    ("hetxl.tuning", "recommend", "hetxl_train.temperature"),
    ("hetxl.contrastive.config", "ContrastiveConfig", "hetxl_train.config"),
    ("hetxl.contrastive.pairs", "PairLoss", "hetxl.contrastive.loss"),
    ("hetxl.integrations.head_file", "load_head", "hetxl.integrations.export.head_file"),
    ("hetxl.nn.head", "Head", "hetxl.nn.heads"),
]


@pytest.mark.parametrize(("module", "name", "home"), USED)
def test_an_old_path_gives_the_object_and_warns(module, name, home):
    with pytest.warns(DeprecationWarning, match=rf"{module}\.{name} is now {home}\."):
        value = getattr(importlib.import_module(module), name)
    assert value is getattr(importlib.import_module(home), _moved.NAMES.get(name, name))


@pytest.mark.parametrize("module", [*_moved.PACKAGES, *_moved.MODULES])
def test_everything_has_moved_to_a_module_that_exists(module):
    for home in _moved.homes(module):
        assert importlib.util.find_spec(home) is not None


def test_names_that_never_existed_still_fail():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        importlib.import_module("hetxl.evaluation").nothing  # noqa: B018
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("hetxl.training.nothing")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("hetxl.nothing")
