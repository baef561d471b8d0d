"""A run's directory: taken up, read back, and refused where it is not what it should be."""

import dataclasses
import json
import os
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from hetxl._files import write_json
from hetxl_train.config import ContrastiveConfig
from hetxl_train.contrastive_runs import load_contrastive_run
from hetxl_train.data.dataset import InputSpec
from hetxl_train.data.synthetic import load_synthetic
from hetxl_train.log import Log, read_log
from hetxl_train.model import build_model
from hetxl_train.runs import (
    Run,
    default_directory,
    load_run,
    open_run,
    save_model,
    start_run,
)
from hetxl_train.towers import Specs, build_towers
from hetxl_train.training import train
from support.pairs import small_pairs
from support.small_run import small_run
from support.training import QUIET, Listening, small, write_images


def test_start_run_writes_a_directory_that_opens_again(tmp_path):
    config = small(tmp_path / "run")
    run = start_run(config, tmp_path / "run")
    assert run == Run(tmp_path / "run", config)
    assert open_run(tmp_path / "run").config == config
    assert not run.finished
    assert run.checkpoints.keep == config.keep
    assert start_run(config, tmp_path / "run") == run


def test_an_empty_directory_is_taken(tmp_path):
    assert start_run(small(), tmp_path).path == tmp_path


def test_another_configuration_is_refused_and_the_options_named(tmp_path):
    start_run(small(rank=3, seed=0), tmp_path)
    (tmp_path / "log.jsonl").touch()
    message = "other options (rank 3 there, 4 here; seed 0 there, 1 here); choose another --out, or remove it"
    with pytest.raises(ValueError, match=re.escape(message)):
        start_run(small(rank=4, seed=1), tmp_path)
    with pytest.raises(ValueError, match=re.escape("; …)")):
        start_run(small(rank=4, seed=1, beta1=0.5, beta2=0.5, ema=0.5), tmp_path)
    assert open_run(tmp_path).config.rank == 3


def test_run_that_failed_before_its_first_step_is_replaced(tmp_path):
    with pytest.raises(ValueError, match="backbone 'cnn' is for images"):
        train(small(tmp_path / "run", backbone="cnn"), console=QUIET)
    assert train(small(tmp_path / "run"), console=QUIET).finished
    with pytest.raises(ValueError, match="backbone 'auto' there, 'cnn' here"):
        train(small(tmp_path / "run", backbone="cnn"), console=QUIET)


def test_epochs_are_ignored_beside_steps(tmp_path):
    start_run(small(steps=4, epochs=1.0), tmp_path)
    (tmp_path / "log.jsonl").touch()
    assert start_run(small(steps=4), tmp_path).config.epochs is None


def test_options_without_effect_on_results_may_differ(tmp_path):
    start_run(small(tmp_path), tmp_path)
    other = small("elsewhere", workers=0, device="auto", tensorboard=True, keep=5, log_every=3)
    assert start_run(other, tmp_path).config == other
    assert open_run(tmp_path).config == other


def test_a_directory_of_something_else(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="has files but no run in it; choose another --out"):
        start_run(small(), tmp_path)
    assert os.listdir(tmp_path) == ["notes.txt"]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("pycode", "pycode-det"),
        ("synthetic:rows=5,noise=2", "synthetic-det"),
        ("a/b/features.npy", "features-det"),
        ("a/images/", "images-det"),
        (".", "data-det"),
    ],
)
def test_default_directory_names_data_and_head(data, expected):
    assert str(default_directory(small(data=data, head="det"))) == os.path.join("runs", expected)


def description(config, dataset):
    """The content of model.json."""
    counts = dataset.splits["train"].labels.counts(dataset.num_classes).tolist()
    spec = dataclasses.asdict(dataset.input)
    return {"input": spec, "link": "softmax", "class_names": list(dataset.class_names), "class_counts": counts}


@pytest.mark.parametrize("head", ["det", "het", "het-h", "het-xl"])
def test_predictions_are_those_before_saving(tmp_path, head):
    config = small(head=head, backbone="mlp", width=8, features=5, dropout=0.5, standardize=True)
    dataset = load_synthetic(rows=100, classes=8, features=4)
    model = build_model(config, dataset.input, 8, "softmax")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    run = start_run(config, tmp_path)
    write_json(run.path / "model.json", description(config, dataset))
    save_model(run, model)
    trained = load_run(tmp_path)
    assert (trained.spec, trained.link, trained.class_names) == (dataset.input, "softmax", dataset.class_names)
    assert trained.class_counts == dataset.splits["train"].labels.counts(8).tolist()
    assert not any(module.training for module in trained.model.modules())
    inputs = dataset.splits["test"].features
    expected, actual = (
        part.head.predict(part.backbone(inputs), generator=torch.Generator().manual_seed(3))
        for part in (model.eval(), trained.model)
    )
    assert torch.equal(expected.log_probs, actual.log_probs)


def test_a_trained_run_has_its_averaged_weights(finished):
    trained = load_run(finished)
    checkpoint, refused = trained.run.checkpoints.latest()
    assert trained.run.finished
    assert not refused
    weight = trained.model.head.classifier.weight
    assert torch.equal(weight, checkpoint.tensors["average.head.classifier.weight"])
    assert not torch.equal(weight, checkpoint.tensors["model.head.classifier.weight"])


def test_a_run_that_has_not_ended_gives_its_best_checkpoint(copied):
    (copied / "result.json").unlink()
    expected = load_run(copied).run.checkpoints.best()[0].tensors["average.head.classifier.weight"]
    (copied / "model.safetensors").unlink()
    assert torch.equal(load_run(copied).model.head.classifier.weight, expected)
    shutil.rmtree(copied / "checkpoints")
    with pytest.raises(ValueError, match="has no weights yet: no checkpoint was written"):
        load_run(copied)


def test_directory_without_a_config_raises(tmp_path):
    for path in (tmp_path, tmp_path / "missing"):
        with pytest.raises(
            ValueError, match=r"is not a run directory \(no config\.json\)\. Pass one created by `hetxl train`"
        ):
            load_run(path)


@pytest.mark.parametrize("content", ["{", "[]", '{"head": {"rnak": 3}}', '{"head": {"rank": "3"}}'])
def test_a_damaged_configuration(copied, content):
    (copied / "config.json").write_text(content)
    with pytest.raises(ValueError, match=r"config\.json|rank must be"):
        load_run(copied)


@pytest.mark.parametrize("content", [None, "{}", "[]", "{", '{"input": {"kind": "features"}}'])
def test_a_damaged_description_of_the_model(copied, content):
    (copied / "model.json").unlink()
    if content is not None:
        (copied / "model.json").write_text(content)
    with pytest.raises(ValueError, match=r"model\.json"):
        load_run(copied)


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def replaced(path):
    path.write_text("no weights")


def other_shape(path):
    save_file(load_file(path) | {"head.classifier.weight": torch.zeros(3, 4)}, path)


def incomplete(path):
    tensors = load_file(path)
    tensors.pop("head.classifier.weight")
    save_file(tensors, path)


def flipped(path):
    content = bytearray(path.read_bytes())
    content[-20] ^= 1
    path.write_bytes(content)


def without_checksum(path):
    save_file(load_file(path), path, {"hetxl": "{}"})


def not_finite(path):
    weight = load_file(path)["head.classifier.weight"]
    weight[0, :4] = torch.nan
    save_file(load_file(path) | {"head.classifier.weight": weight}, path)


def other_type(path):
    tensors = load_file(path)
    save_file(tensors | {"head.classifier.weight": tensors["head.classifier.weight"].half()}, path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (cut, "is not a complete safetensors file"),
        (replaced, "is not a complete safetensors file"),
        (other_shape, "cannot be used: .*head.classifier.weight"),
        (incomplete, "cannot be used: .*head.classifier.weight"),
        (flipped, "was changed or damaged: its content does not match its checksum"),
        (without_checksum, "was changed or damaged: its checksum is missing"),
        (not_finite, "cannot be used: 4 of the 32 numbers of head.classifier.weight are NaN or infinite"),
        (other_type, "cannot be used: head.classifier.weight has type torch.float16, the other weights torch.float32"),
    ],
)
def test_damaged_weights_raise(copied, damage, message):
    damage(copied / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors " + message):
        load_run(copied)


def test_weights_without_a_checksum_are_read_with_a_note(copied):
    path, console = copied / "model.safetensors", Listening()
    load_run(copied, console=console)
    assert console.said == []
    save_file(load_file(path), path)  # as older versions wrote them
    load_run(copied, console=console)
    assert console.said == [f"{path} has no checksum (it is of an older hetxl) and is not verified"]


def test_unfinished_frozen_run_raises(tmp_path):
    images = write_images(tmp_path / "images", each=12)
    config = small(
        tmp_path / "run", data=str(images), backbone="cnn", width=8, depth=1, features=6, image_size=16, frozen=True,
        steps=1, batch_size=4, workers=0,
    )  # fmt: skip
    run = train(config, console=QUIET)
    assert load_run(run.path).model.backbone.frozen
    (run.path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has not ended, and its checkpoints do not hold the whole model"):
        load_run(run.path)


def test_published_weights_are_not_fetched_again(tmp_path):
    config = small(backbone="timm:test_resnet", image_size=32)
    assert config.pretrained
    dataset = dataclasses.replace(load_synthetic(rows=40, classes=8, features=4), input=InputSpec("image", (3, 32, 32)))
    model = build_model(dataclasses.replace(config, pretrained=False, seed=5), dataset.input, 8, "softmax")
    run = start_run(config, tmp_path)
    write_json(run.path / "model.json", description(config, dataset))
    save_model(run, model)
    trained = load_run(tmp_path)
    assert all(torch.equal(value, trained.model.state_dict()[name]) for name, value in model.state_dict().items())
    assert trained.run.config.pretrained


def write(path, steps, **options):
    log = Log(path, **options)
    for step in steps:
        log.write("step", step=step, loss=1 / step)
    log.close()


def test_log_lines_are_flushed_at_once(tmp_path):
    path = tmp_path / "run" / "log.jsonl"
    log = Log(path)
    log.write("step", step=1, loss=0.5)
    assert read_log(path) == [{"kind": "step", "step": 1, "loss": 0.5}]
    log.write("evaluation", step=1, split="validation", nll=2.0)
    assert [line["kind"] for line in read_log(path)] == ["step", "evaluation"]
    log.close()
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_lines_after_the_checkpoint_are_dropped(tmp_path):
    path = tmp_path / "log.jsonl"
    write(path, range(1, 11))
    write(path, (7, 8), after=6)
    assert [line["step"] for line in read_log(path)] == [1, 2, 3, 4, 5, 6, 7, 8]
    write(path, (1,))
    assert [line["step"] for line in read_log(path)] == [1]


@pytest.mark.parametrize("tail", ['{"kind": "step", "ste', '{"kind": "step", "step": 4', "\x00\x00", "\udcff", "7\n"])
def test_a_half_written_last_line_is_dropped(tmp_path, tail):
    path = tmp_path / "log.jsonl"
    write(path, range(1, 4))
    with open(path, "ab") as file:
        file.write(tail.encode("utf-8", "surrogateescape"))
    assert [line["step"] for line in read_log(path)] == [1, 2, 3]
    write(path, (4,), after=3)
    assert [line["step"] for line in read_log(path)] == [1, 2, 3, 4]
    assert all(json.loads(line) for line in path.read_text().splitlines())


@pytest.mark.parametrize(("old", "new"), [("0.5", "0.6"), ('"checksum"', '"chocksum"'), ("{", "[")])
def test_a_damaged_line_is_an_error_that_names_it(tmp_path, old, new):
    path = tmp_path / "log.jsonl"
    write(path, range(1, 5))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0], lines[1].replace(old, new), *lines[2:]]))
    with pytest.raises(ValueError, match=r"log\.jsonl: line 2 of 4 was changed or damaged"):
        read_log(path)
    log = Log(path, after=4)
    log.close()
    assert (log.damaged, log.lines) == (1, 3)
    assert [line["step"] for line in read_log(path)] == [1, 3, 4]


def test_a_log_without_checksums_is_read(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"kind": "step", "step": 1, "loss": 0.5}\n{"kind": "step", "step": 2, "loss": 0.4}\n')
    assert [line["loss"] for line in read_log(path)] == [0.5, 0.4]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no device that is always full")
def test_a_full_disk_is_an_error_that_names_the_log(tmp_path):
    path = tmp_path / "log.jsonl"
    log = Log(path)
    log._file.close()
    log._file = open("/dev/full", "ab", buffering=0)  # noqa: SIM115
    with pytest.raises(OSError, match=r"free some space and rerun the command: '.*log\.jsonl'"):
        log.write("step", step=1, loss=0.5)
    log.close()
    assert log.lines == 0


def test_lines_that_the_disk_takes_in_parts_are_whole(tmp_path):
    path = tmp_path / "log.jsonl"
    log = Log(path)
    file = log._file

    class Parts:
        def write(self, text):
            return file.write(text[:7])

        def close(self):
            file.close()

    log._file = Parts()
    log.write("step", step=1, loss=0.5)
    log.close()
    assert read_log(path) == [{"kind": "step", "step": 1, "loss": 0.5}]


def test_opening_replaces_the_file_in_one_move(tmp_path):
    path = tmp_path / "log.jsonl"
    write(path, range(1, 4))
    before = os.stat(path).st_ino
    reader = open(path)  # noqa: SIM115
    log = Log(path, after=2)
    # The old lines are still whole for whoever has the file open: they were never cut short.
    assert len(reader.readlines()) == 3
    assert os.stat(path).st_ino != before
    reader.close()
    log.close()
    assert os.listdir(tmp_path) == ["log.jsonl"]


def test_missing_log_is_empty(tmp_path):
    assert read_log(tmp_path / "log.jsonl") == []


SPECS = Specs(InputSpec("image", (1, 32, 32)), None)
MODEL = {"image": {"kind": "image", "shape": [1, 32, 32], "vocabulary": 0}, "text": None}


def test_default_directory_of_a_contrastive_run():
    assert str(default_directory(small_pairs("a/b.npz"))) == "runs/contrastive-b-het-xl"
    assert str(default_directory(small_pairs("icons:each=3", head="det"))) == "runs/contrastive-icons-det"


def test_towers_saved_and_read(tmp_path):
    config = small_pairs("x", seed=3)
    run = start_run(config, tmp_path / "run")
    assert not run.finished
    write_json(run.path / "model.json", MODEL)
    model = build_towers(config, SPECS)
    with torch.no_grad():
        model.loss.scale.raw.fill_(1.25)
    save_model(run, model)
    trained = load_contrastive_run(tmp_path / "run")
    assert trained.run.config == config
    assert trained.specs == SPECS
    assert not trained.model.training
    for name, value in model.state_dict().items():
        assert torch.equal(trained.model.state_dict()[name], value)
    (tmp_path / "run" / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ValueError, match=r"model\.safetensors is not a complete"):
        load_contrastive_run(tmp_path / "run")


def test_a_contrastive_run_resumes_with_the_same_options_only(tmp_path):
    start_run(small_pairs("x"), tmp_path)
    start_run(small_pairs("x", log_every=3, workers=1), tmp_path)  # these change nothing
    (tmp_path / "log.jsonl").touch()
    with pytest.raises(ValueError, match=r"holds a run with other options .*seed 0 there, 1 here"):
        start_run(small_pairs("x", seed=1), tmp_path)


def test_directories_that_are_not_contrastive_runs(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ValueError, match="has files but no run in it"):
        start_run(small_pairs("x"), tmp_path)
    with pytest.raises(
        ValueError, match=r"is not a run directory \(no config.json\). Pass one created by `hetxl contrastive train`"
    ):
        open_run(tmp_path, ContrastiveConfig)
    other = small_run(tmp_path / "classifier")
    with pytest.raises(ValueError, match=r"was created by `hetxl train`\. Pass a directory of `hetxl contrastive"):
        open_run(other, ContrastiveConfig)


def test_towers_without_weights_yet(tmp_path):
    run = start_run(small_pairs("x"), tmp_path)
    with pytest.raises(ValueError, match=r"model\.json does not exist"):
        load_contrastive_run(tmp_path)
    write_json(run.path / "model.json", MODEL)
    with pytest.raises(ValueError, match="has no weights yet: no checkpoint was written"):
        load_contrastive_run(tmp_path)
