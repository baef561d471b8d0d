import dataclasses

import pytest
import typer
from typer.testing import CliRunner

from hetxl_train.cli.options import config_flags, resolve, resolve_preset
from hetxl_train.config import ContrastiveConfig, TrainConfig
from hetxl_train.presets import preset_for

seen = []


def command_of(**options):
    app = typer.Typer()

    @app.command()
    @config_flags(**options)
    def command(data: str = "pycode", *, settings=(None, {})) -> None:
        seen.append((data, settings))

    return app


def test_every_option_is_a_flag():
    text = CliRunner().invoke(command_of(without=("data",)), ["--help"], env={"COLUMNS": "400"}).output
    for field in dataclasses.fields(TrainConfig):
        if field.name != "data":
            assert f"--{field.name.replace('_', '-')}" in text


def test_only_flags_that_are_set_arrive():
    seen.clear()
    line = ["--data", "x", "--rank", "3", "--frozen", "--no-pretrained", "--temperature", "0.5"]
    result = CliRunner().invoke(command_of(without=("data",)), line)
    assert result.exit_code == 0, result.output
    flags = {"rank": 3, "frozen": True, "pretrained": False, "temperature": "0.5"}
    assert seen == [("x", (None, flags))]


def test_a_flag_may_have_a_second_name():
    for name in ("--rate", "--label-noise-rate"):
        seen.clear()
        result = CliRunner().invoke(command_of(without=("data",)), ["--label-noise", "symmetric", name, "0.2"])
        assert result.exit_code == 0, result.output
        assert seen == [("pycode", (None, {"label_noise": "symmetric", "label_noise_rate": 0.2}))]


def test_excluded_options_are_not_flags():
    assert CliRunner().invoke(command_of(without=("data", "rank")), ["--rank", "3"]).exit_code == 2


@pytest.mark.parametrize("kind", [TrainConfig, ContrastiveConfig])
def test_both_configurations_are_resolved_alike(tmp_path, kind):
    file = tmp_path / "options.toml"
    file.write_text("[training]\nseed = 3\nepochs = 2\n")
    config = resolve(kind, (file, {"batch_size": 8}), data="x.npz")
    assert (config.data, config.seed, config.epochs, config.batch_size) == ("x.npz", 3, 2.0, 8)
    with pytest.raises(ValueError, match="exclude each other"):
        resolve(kind, (file, {"epochs": 2.0, "steps": 3}))


def test_flags_override_the_file_and_the_file_the_defaults(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[head]\nrank = 7\ntrain_samples = 9\n[training]\nseed = 5\n")
    config = resolve(TrainConfig, (file, {"rank": 8}), {"seed": 1, "batch_size": 32}, data="synthetic")
    assert (config.rank, config.train_samples, config.seed, config.batch_size) == (8, 9, 5, 32)
    assert config.data == "synthetic"


def test_epochs_replace_the_steps_of_a_preset():
    assert resolve(TrainConfig, (None, {"epochs": 2.0}), {"steps": 10}).steps is None
    with pytest.raises(ValueError, match="exclude each other"):
        resolve(TrainConfig, (None, {"epochs": 2.0, "steps": 3}))


def test_epochs_of_a_file_replace_the_steps_of_a_preset(tmp_path):
    file = tmp_path / "options.toml"
    file.write_text("[training]\nepochs = 3\n")
    config = resolve(TrainConfig, (file, {}), {"steps": 300}, data="pycode")
    assert (config.steps, config.epochs) == (None, 3.0)
    assert resolve(TrainConfig, (file, {"steps": 5}), {"steps": 300}, data="pycode").steps == 5
    file.write_text("[training]\nepochs = 3\nsteps = 20\n")
    assert resolve(TrainConfig, (file, {}), {"steps": 300}, data="pycode").steps == 20


def test_a_file_must_not_have_what_the_command_chooses(tmp_path):
    file = tmp_path / "options.toml"
    file.write_text("[training]\nseed = 7\n")
    with pytest.raises(ValueError, match=r"options\.toml: seed is set by --seeds"):
        resolve(TrainConfig, (file, {}), instead={"head": "--heads", "seed": "--seeds"}, data="pycode")
    assert resolve(TrainConfig, (file, {}), instead={"head": "--heads"}, data="pycode").seed == 7


@pytest.mark.parametrize(
    ("argument", "written", "preset"),
    [
        (None, None, "pycode"),
        ("synthetic:rows=50", None, "synthetic"),
        (None, '[data]\ndata = "synthetic:rows=50"\n', "synthetic"),
        (None, "[training]\nseed = 3\n", "pycode"),
        ("glyphs", '[data]\ndata = "synthetic:rows=50"\n', "glyphs"),
    ],
)
def test_preset_follows_the_data_of_the_argument_or_file(tmp_path, argument, written, preset):
    file = None if written is None else tmp_path / "options.toml"
    if file is not None:
        file.write_text(written)
    config = resolve_preset((file, {"batch_size": 7}), argument, TrainConfig, instead={})
    assert config.data.partition(":")[0] == preset
    assert config.batch_size == 7
    for name, value in preset_for(preset).items():
        assert name == "batch_size" or getattr(config, name) == value


def test_own_data_has_no_preset(tmp_path):
    file = tmp_path / "options.toml"
    file.write_text('[data]\ndata = "mine.npz"\n')
    assert resolve_preset((file, {}), None, TrainConfig, instead={}) == TrainConfig(data="mine.npz")
    file.write_text("[data]\ndata = 5\n")
    with pytest.raises(ValueError, match="data must be a string, found 5"):
        resolve_preset((file, {}), None, TrainConfig, instead={})
    file.write_text("[training]\nseed = 7\n")
    with pytest.raises(ValueError, match="seed is set by --seeds"):
        resolve_preset((file, {}), None, TrainConfig, instead={"seed": "--seeds"})
