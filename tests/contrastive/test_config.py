import dataclasses

import pytest

from hetxl.contrastive.config import SECTIONS, ContrastiveConfig
from hetxl.contrastive.embedding import GROUP, NOISE_INIT


def test_it_survives_its_own_file():
    config = ContrastiveConfig(head="det", swap=0.2, steps=7, templates="{}|a {}")
    assert ContrastiveConfig.from_dict(config.to_dict()) == config
    assert tuple(config.to_dict()) == SECTIONS
    assert config.prompts == ("{}", "a {}")
    assert config.noise_side == "none"
    assert ContrastiveConfig().noise_side == "both"
    assert ContrastiveConfig().noise_group == GROUP
    assert ContrastiveConfig().noise_init == NOISE_INIT


def test_every_option_has_help_and_a_section():
    for field in dataclasses.fields(ContrastiveConfig):
        assert field.metadata["help"].endswith(".") or "]" in field.metadata["help"]
        assert field.metadata["section"] in SECTIONS


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"head": "het"}, "head must be one of 'det', 'het-xl', found 'het'"),
        ({"normalize": "befor"}, "normalize must be one of .*did you mean 'before'"),
        ({"swap": 1.5}, "swap must be from 0 to 1"),
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
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        ContrastiveConfig(**options)


def test_toml(tmp_path):
    path = tmp_path / "options.toml"
    path.write_text('head = "det"\n[training]\nsteps = 5\n[data]\ndata = "icons:each=9"\n')
    assert ContrastiveConfig.read_toml(path) == {"head": "det", "steps": 5, "data": "icons:each=9"}
    for content, message in (
        ("stepps = 5", r"a key of .*options\.toml must be one of .*found 'stepps'; did you mean 'steps'"),
        ("[trainin]\nsteps = 5", "a section of .* must be one of .*did you mean 'training'"),
        ("steps = 5\n[training]\nsteps = 6", "'steps' is given twice"),
        ("steps =", "not valid TOML"),
    ):
        path.write_text(content)
        with pytest.raises(ValueError, match=message):
            ContrastiveConfig.read_toml(path)
    with pytest.raises(ValueError, match="No such file"):
        ContrastiveConfig.read_toml(tmp_path / "none.toml")
