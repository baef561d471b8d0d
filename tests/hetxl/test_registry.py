"""One registry: what offers a choice reads its names there."""

import inspect
import subprocess
import sys

import pytest

from hetxl import registry
from hetxl.functional import SAMPLERS
from hetxl.integrations.convert.layer import LAYERS
from hetxl.nn import HEADS, build_covariance, build_head


@pytest.mark.parametrize("entry", registry.HEAD_ENTRIES, ids=registry.HEAD_NAMES)
def test_an_entry_describes_its_class(entry):
    shared = set(inspect.signature(HEADS["het"]).parameters)
    own = {name for name in inspect.signature(HEADS[entry.name]).parameters if name not in (*shared, "options")}
    assert HEADS[entry.name].__name__ == entry.class_name
    assert own == set(entry.options)
    head = build_head(entry.name, 4, 3, rank=1)
    assert set(head.own_options()) == set(entry.options)
    assert (head.covariance is not None) == entry.noise


def test_own_options_build_the_head_again():
    head = build_head("het-xl", 4, 3, noise_features=2)
    assert head.own_options() == {"noise_features": 2}
    assert build_head("het-xl", 4, 3).own_options() == {"noise_features": None}
    assert build_head("het-h", 4, 3, buckets=2, hash_seed=5).own_options() == {"buckets": 2, "hash_seed": 5}


def test_every_registry_name_has_an_implementation():
    assert tuple(SAMPLERS) == registry.SAMPLER_NAMES
    assert tuple(LAYERS) == tuple(HEADS) == registry.HEAD_NAMES
    for name in registry.COVARIANCES:
        build_covariance(name, 4, 3, rank=2)


def test_names_load_no_torch():
    code = "import sys, hetxl.registry, hetxl._seeds; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
