import dataclasses

import pytest
import typer
from typer.testing import CliRunner

from hetxl.cli.options import config_flags, resolve, resolve_preset
from hetxl.training.config import TrainConfig
from hetxl.training.presets import PRESETS

seen = []


def command_of(**options):
    app = typer.Typer()

    @app.command()
    @config_flags(**options)
    def command(data: str = "pycode", *, given=(None, {})) -> None:
        seen.append((data, given))

    return app


def test_every_option_is_a_flag():
    text = CliRunner().invoke(command_of(without=("data",)), ["--help"], env={"COLUMNS": "400"}).output
    for field in dataclasses.fields(TrainConfig):
        if field.name != "data":
            assert f"--{field.name.replace('_', '-')}" in text


def test_only_what_is_given_arrives():
    seen.clear()
    line = ["--data", "x", "--rank", "3", "--frozen", "--no-pretrained", "--temperature", "0.5"]
    result = CliRunner().invoke(command_of(without=("data",)), line)
    assert result.exit_code == 0, result.output
    given = {"rank": 3, "frozen": True, "pretrained": False, "temperature": "0.5"}
    assert seen == [("x", (None, given))]


def test_a_flag_may_have_a_second_name():
    for name in ("--rate", "--label-noise-rate"):
        seen.clear()
        result = CliRunner().invoke(command_of(without=("data",)), ["--label-noise", "symmetric", name, "0.2"])
        assert result.exit_code == 0, result.output
        assert seen == [("pycode", (None, {"label_noise": "symmetric", "label_noise_rate": 0.2}))]


def test_left_out_options_are_no_flags():
    assert CliRunner().invoke(command_of(without=("data", "rank")), ["--rank", "3"]).exit_code == 2


def test_flags_go_before_the_file_and_the_file_before_the_defaults(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text("[head]\nrank = 7\ntrain_samples = 9\n[training]\nseed = 5\n")
    config = resolve((file, {"rank": 8}), {"seed": 1, "batch_size": 32}, data="synthetic")
    assert (config.rank, config.train_samples, config.seed, config.batch_size) == (8, 9, 5, 32)
    assert config.data == "synthetic"


def test_epochs_replace_the_steps_of_a_preset():
    assert resolve((None, {"epochs": 2.0}), {"steps": 10}).steps is None
    with pytest.raises(ValueError, match="exclude each other"):
        resolve((None, {"epochs": 2.0, "steps": 3}))


def test_epochs_of_a_file_replace_the_steps_of_a_preset(tmp_path):
    file = tmp_path / "options.toml"
    file.write_text("[training]\nepochs = 3\n")
    config = resolve((file, {}), {"steps": 300}, data="pycode")
    assert (config.steps, config.epochs) == (None, 3.0)
    assert resolve((file, {"steps": 5}), {"steps": 300}, data="pycode").steps == 5
    file.write_text("[training]\nepochs = 3\nsteps = 20\n")
    assert resolve((file, {}), {"steps": 300}, data="pycode").steps == 20


def test_a_file_must_not_have_what_the_command_chooses(tmp_path):
    file = tmp_path / "options.toml"
    file.write_text("[training]\nseed = 7\n")
    with pytest.raises(ValueError, match=r"options\.toml: seed is chosen by --seeds"):
        resolve((file, {}), instead={"head": "--heads", "seed": "--seeds"}, data="pycode")
    assert resolve((file, {}), instead={"head": "--heads"}, data="pycode").seed == 7


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
def test_the_preset_is_that_of_the_data_wherever_it_is_named(tmp_path, argument, written, preset):
    file = None if written is None else tmp_path / "options.toml"
    if file is not None:
        file.write_text(written)
    config = resolve_preset((file, {"batch_size": 7}), argument, instead={})
    assert config.data.partition(":")[0] == preset
    assert config.batch_size == 7
    for name, value in PRESETS[preset].items():
        assert name == "batch_size" or getattr(config, name) == value


def test_data_of_ones_own_has_no_preset(tmp_path):
    file = tmp_path / "options.toml"
    file.write_text('[data]\ndata = "mine.npz"\n')
    assert resolve_preset((file, {}), None, instead={}) == TrainConfig(data="mine.npz")
    file.write_text("[data]\ndata = 5\n")
    with pytest.raises(ValueError, match="data must be a string, found 5"):
        resolve_preset((file, {}), None, instead={})
    file.write_text("[training]\nseed = 7\n")
    with pytest.raises(ValueError, match="seed is chosen by --seeds"):
        resolve_preset((file, {}), None, instead={"seed": "--seeds"})
