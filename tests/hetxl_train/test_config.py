"""Options: names, types and ranges are checked, and every error says what to change."""

import dataclasses
import json
import re
import subprocess
import sys

import pytest
from torch import nn

import hetxl
from hetxl import registry
from hetxl._files import write_json
from hetxl.contrastive.embedding import GROUP, NOISE_INIT
from hetxl.integrations.sklearn import HetXLClassifier
from hetxl_train.config import ContrastiveConfig, HeadOptions, TrainConfig

SECTIONS = ["data", "head", "backbone", "training", "parallel", "output"]


def test_defaults_are_valid_and_survive_json():
    config = TrainConfig()
    stored = json.loads(json.dumps(config.to_dict()))
    assert list(stored) == SECTIONS
    assert TrainConfig.from_dict(stored) == config


def test_every_option_is_in_one_section_and_has_help():
    config = TrainConfig(rank=7, data="é.npy", tensorboard=True, steps=3)
    names = [name for section in config.to_dict().values() for name in section]
    assert sorted(names) == sorted(field.name for field in dataclasses.fields(TrainConfig))
    for config_class in (TrainConfig, ContrastiveConfig):
        for field in dataclasses.fields(config_class):
            assert field.metadata["help"].endswith(".")
    assert TrainConfig.from_dict(config.to_dict()) == config


def test_saved_as_json(tmp_path):
    config = TrainConfig(data="Grüße.npy", rank=7)
    write_json(tmp_path / "config.json", config.to_dict())
    stored = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert stored["head"]["rank"] == 7
    assert TrainConfig.from_dict(stored) == config


def test_toml_with_sections_and_without(tmp_path):
    path = tmp_path / "a.toml"
    path.write_text(
        'seed = 3\n[data]\ndata = "synthetic"\n[head]\nhead = "det"\nrank = 5\n[training]\nlearning_rate = 1\n'
    )
    values = TrainConfig.read_toml(path)
    assert values == {"seed": 3, "data": "synthetic", "head": "det", "rank": 5, "learning_rate": 1}
    config = TrainConfig(**values | {"rank": 9})  # flags go over the file
    assert (config.seed, config.data, config.head, config.rank) == (3, "synthetic", "det", 9)
    assert config.learning_rate == 1.0
    assert type(config.learning_rate) is float


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[head]\nranks = 5\n", "unknown key 'ranks' in PATH; did you mean 'rank'?"),
        ("lerning_rate = 1\n", "unknown key 'lerning_rate' in PATH; did you mean 'learning_rate'?"),
        ("zzzzzz = 1\n", "unknown key 'zzzzzz' in PATH"),
        ("[training]\nrank = 5\n", "'rank' in PATH belongs in section [head], found in [training]"),
        ("[trainin]\nseed = 5\n", "unknown section [trainin] in PATH; did you mean 'training'?"),
        ("seed = 1\n[training]\nseed = 5\n", "'seed' is given twice in PATH; keep one"),
        ("[head]\nrank =\n", "--config PATH: not valid TOML"),
    ],
)
def test_invalid_toml_raises(tmp_path, text, message):
    path = tmp_path / "a.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(message.replace("PATH", str(path)))):
        TrainConfig.read_toml(path)


def test_files_that_cannot_be_read_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"--config .*missing.toml: no such file"):
        TrainConfig.read_toml(tmp_path / "missing.toml")
    with pytest.raises(ValueError, match=r"--config .*: Is a directory"):
        TrainConfig.read_toml(tmp_path)
    (tmp_path / "latin.toml").write_bytes(b'data = "caf\xe9"\n')
    with pytest.raises(ValueError, match=r"--config .*latin.toml: not valid TOML"):
        TrainConfig.read_toml(tmp_path / "latin.toml")


def test_config_without_sections_raises():
    with pytest.raises(ValueError, match=r"config.json must hold sections of options, found list"):
        TrainConfig.flatten([1], "config.json")  # pyright: ignore[reportArgumentType]


FOLLOWING = {"temperature": "learned", "temperature_method": "bilevel"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": "5"}, "rank must be an integer, found '5'"),
        ({"rank": 5.5}, "rank must be an integer, found 5.5"),
        ({"rank": True}, "rank must be an integer, found True"),
        ({"rank": None}, "rank must be an integer, found None"),
        ({"learning_rate": "fast"}, "learning_rate must be a number, found 'fast'"),
        ({"learning_rate": True}, "learning_rate must be a number, found True"),
        ({"frozen": 1}, "frozen must be true or false, found 1"),
        ({"data": 3}, "data must be a string, found 3"),
        ({"head": {"rank": 5}}, "head must be a string, found {'rank': 5}"),
        ({"head": "het_xl"}, "head must be one of det, het, het-h, het-xl, found 'het_xl'; did you mean 'het-xl'?"),
        ({"schedule": "step"}, "schedule must be one of linear, cosine, inverse_sqrt, constant, found 'step'"),
        ({"batch_size": 0}, "batch_size must be at least 1, found 0"),
        ({"steps": 0}, "steps must be at least 1, found 0"),
        ({"epochs": -1.0}, "epochs must be at least 0, found -1.0"),
        ({"image_size": 4}, "image_size must be at least 8, found 4"),
        ({"seed": -1}, "seed must be at least 0, found -1"),
        ({"learning_rate": 0.0}, "learning_rate must be positive, found 0.0"),
        ({"learning_rate": float("inf")}, "learning_rate must be finite, found inf"),
        ({"weight_decay": float("nan")}, "weight_decay must be finite, found nan"),
        ({"ema": 1.0}, "ema must be in [0, 1), found 1.0"),
        ({"dropout": -0.1}, "dropout must be in [0, 1), found -0.1"),
        ({"beta2": 1}, "beta2 must be in [0, 1), found 1.0"),
        ({"temperature": "warm"}, "temperature must be a positive number, learned or auto, found 'warm'"),
        ({"temperature": -1}, "temperature must be a positive number, learned or auto, found '-1'"),
        ({"temperature": "inf"}, "temperature must be a positive number, learned or auto, found 'inf'"),
        ({"temperature": "nan"}, "temperature must be a positive number, learned or auto, found 'nan'"),
        ({"batch_size": 10, "accumulate": 4}, "batch_size must be a multiple of accumulate, found 10 and 4"),
        ({"label_smoothing": 0.1, "link": "sigmoid"}, "label_smoothing is for the softmax link"),
        ({"classifier": "hashed"}, "classifier must be one of linear, sampled, retrieved, sharded, found 'hashed'"),
        ({"classifier": "sampled", "head": "het"}, "or het-xl without noise_features, found head = het"),
        ({"classifier": "sampled", "noise_features": 3}, "found head = het-xl with noise_features"),
        ({"classifier": "sampled", "label_smoothing": 0.1}, "label_smoothing needs all classes"),
        ({"negatives": 0}, "negatives must be at least 1, found 0"),
        ({"label_noise": "symetric"}, "label_noise must be one of none, symmetric, confusable, feature-dependent"),
        ({"label_noise": "symmetric"}, "label_noise is 'symmetric' and label_noise_rate 0; give a rate, such as 0.2"),
        ({"label_noise_rate": 0.2}, "label_noise_rate is 0.2 and label_noise none; choose symmetric, "),
        ({"label_noise": "confusable", "label_noise_rate": 1.5}, "label_noise_rate must be in [0, 1], found 1.5"),
        ({"label_noise": "confusable", "label_noise_rate": -0.1}, "label_noise_rate must be in [0, 1], found -0.1"),
        ({"noise_learning_rate": -1}, "noise_learning_rate must be at least 0, found -1.0"),
        ({"noise_weight_decay": -0.1}, "noise_weight_decay must be at least 0, found -0.1"),
        ({"temperature_low": 0.0}, "temperature_low must be positive, found 0.0"),
        (
            {"temperature": "learned", "temperature_init": 2.5, "temperature_high": 2.0},
            "temperature_init must lie between temperature_low, 0.05, and temperature_high, 2, found 2.5",
        ),
        ({"temperature_hold": 1.5}, "temperature_hold must be in [0, 1], found 1.5"),
        ({"temperature_hold": -0.5}, "temperature_hold must be in [0, 1], found -0.5"),
        ({"temperature_prior": -1.0}, "temperature_prior must be at least 0, found -1.0"),
        ({"temperature_method": "bilevel"}, "temperature_method = bilevel needs temperature = learned, found 1.0"),
        ({"temperature_held_out": 0.1}, "temperature_held_out is 0.1 and temperature_method train"),
        ({**FOLLOWING, "temperature_held_out": 1.0}, "temperature_held_out must be in [0, 1), found 1.0"),
        ({**FOLLOWING, "precision": "float16"}, "goes with precision = float32 or bfloat16, found float16"),
        ({**FOLLOWING, "classifier": "sampled"}, "temperature_method = bilevel needs classifier = linear"),
        ({"normalize_features": 1}, "normalize_features must be true or false, found 1"),
    ],
)
def test_wrong_types_and_values_out_of_range_raise(options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        TrainConfig(**options)


def test_numbers_may_be_written_either_way():
    config = TrainConfig(batch_size=64.0, epochs=2, temperature=1, features=None, steps=1e3)
    assert (config.batch_size, config.epochs, config.temperature, config.steps) == (64, 2.0, "1", 1000)
    assert [type(value) for value in (config.batch_size, config.epochs, config.steps)] == [int, float, int]


def test_a_configuration_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().rank = 5  # pyright: ignore[reportAttributeAccessIssue]


def test_contrastive_options_survive_json():
    config = ContrastiveConfig(head="det", swap=0.2, steps=7, templates="{}|a {}")
    assert ContrastiveConfig.from_dict(config.to_dict()) == config
    assert list(config.to_dict()) == ["data", "head", "towers", "training", "parallel", "output"]
    assert config.prompts == ("{}", "a {}")
    assert config.noise_side == "none"
    assert ContrastiveConfig().noise_side == "both"
    assert ContrastiveConfig().noise_group == GROUP
    assert ContrastiveConfig().noise_init == NOISE_INIT


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": "het"}, "head must be one of det, het-xl, found 'het'"),
        ({"normalize": "befor"}, "normalize must be one of .*did you mean 'before'"),
        ({"swap": 1.5}, r"swap must be in \[0, 1\], found 1.5"),
        ({"swap_within": True}, "swap_within is on and swap 0"),
        ({"batch_size": 1}, "batch_size must be at least 2, found 1"),
        ({"learning_rate": 0}, "learning_rate must be positive"),
        ({"learning_rate": "fast"}, "learning_rate must be a number, found 'fast'"),
        ({"learning_rate": float("nan")}, "learning_rate must be finite"),
        ({"scale_init": -1}, "scale_init must be positive"),
        ({"scale_init": 200}, "scale_init must be at most max_scale = 100, found 200"),
        ({"width": 12}, "width must be a multiple of 8, found 12"),
        ({"dropout": 1}, r"dropout must be in \[0, 1\)"),
        ({"templates": "an icon"}, "templates must hold {} once each"),
        ({"templates": "{}|{} {}"}, "templates must hold {} once each"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"data_parallel": "fsdp", "ema": 0.9}, "data_parallel = fsdp goes without ema"),
    ],
)
def test_contrastive_types_and_ranges(options, message):
    with pytest.raises(ValueError, match=message):
        ContrastiveConfig(**options)


def test_contrastive_toml_is_read_by_section(tmp_path):
    path = tmp_path / "options.toml"
    path.write_text('head = "det"\n[training]\nsteps = 5\n[data]\ndata = "icons:each=9"\n')
    assert ContrastiveConfig.read_toml(path) == {"head": "det", "steps": 5, "data": "icons:each=9"}
    path.write_text("[towers]\nsteps = 5")
    with pytest.raises(ValueError, match=r"'steps' in .* belongs in section \[training\], found in \[towers\]"):
        ContrastiveConfig.read_toml(path)


def test_a_group_can_be_used_alone():
    assert list(HeadOptions(rank=3).to_dict()) == ["head"]
    with pytest.raises(ValueError, match="rank must be at least 0, found -1"):
        HeadOptions(rank=-1)


def test_reading_options_loads_no_torch():
    code = "import sys, hetxl_train.config as c; c.TrainConfig(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_door_has_the_same_defaults():
    expected = (registry.TEMPERATURE, registry.RANK, registry.TRAIN_SAMPLES, registry.EVAL_SAMPLES)
    config, estimator = TrainConfig(), HetXLClassifier()
    layer = hetxl.convert(nn.Sequential(nn.Linear(3, 4)))[0]
    for head in (*(hetxl.build_head(name, 3, 4) for name in registry.HEAD_NAMES), layer):
        ranks = {registry.RANK} if head.covariance is None else {head.covariance.rank}
        assert (head.temperature(), ranks.pop(), head.train_samples, head.eval_samples) == expected
    assert (float(config.temperature), config.rank, config.train_samples, config.eval_samples) == expected
    assert (estimator.temperature, estimator.rank, estimator.train_samples, estimator.eval_samples) == expected
