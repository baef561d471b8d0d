"""What `from hetxl_train import …` gives."""

import importlib
import pkgutil
from types import ModuleType

import hetxl_train


def test_no_submodule_takes_the_name_of_an_export():
    for module in pkgutil.iter_modules(hetxl_train.__path__):
        importlib.import_module(f"hetxl_train.{module.name}")
    for name, module in hetxl_train._MODULES.items():
        value = getattr(hetxl_train, name)
        assert not isinstance(value, ModuleType)
        assert value is getattr(importlib.import_module(f"hetxl_train.{module}"), name)
