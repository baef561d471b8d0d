import pytest
import torch

from hetxl.contrastive.loop import ContrastiveTrainer, parameter_groups
from hetxl.contrastive.model import Specs, build_towers
from hetxl.contrastive.texts import TextReader
from hetxl.data.broken import BrokenLimit
from hetxl.data.dataset import InputSpec
from hetxl.data.pairs import open_pairs
from hetxl.training.checkpoint import CheckpointError, Checkpoints
from hetxl.training.distributed import World
from support.pairs import QUIET, picture_folder, small, vectors_file


def trainer_of(config, folder, steps=6):
    pairs = open_pairs(config.data, image_size=16)
    texts = TextReader(buckets=config.buckets)
    model = build_towers(config, Specs(pairs.image, texts.spec(pairs)))
    split = pairs.splits["train"]
    checkpoints = Checkpoints(folder / "checkpoints")
    world = World(torch.device("cpu"))
    table = texts.table(split.texts, config.prompts)
    return ContrastiveTrainer(config, model, split, table, steps, checkpoints, world, QUIET, BrokenLimit(share=0.5))


def weights(trainer):
    return torch.cat([value.flatten() for value in trainer.model.state_dict().values()])


def test_groups():
    config = small("x", noise_learning_rate=0.5, scale_learning_rate=7, link="sigmoid", weight_decay=0.1)
    pairs = Specs(_vectors(4), _vectors(5))
    groups = parameter_groups(build_towers(config, pairs), config)
    of = {name: (group["weight_decay"], group["scale"]) for group in groups for name in group["names"]}
    assert of["image.layer.weight"] == (0.1, 1.0)
    assert of["image.layer.bias"] == (0.0, 1.0)
    assert of["loss.scale.raw"] == of["loss.bias"] == (0.0, 7.0)
    assert all(scale == 0.5 for name, (_, scale) in of.items() if "noise" in name)


def _vectors(size):
    return InputSpec("features", (size,))


@pytest.mark.parametrize("head", ["det", "het-xl"])
def test_a_run_that_was_killed_is_the_run_that_was_not(tmp_path, head):
    data = vectors_file(tmp_path / "x.npz", captions=True)
    config = small(data, head=head, dropout=0.2, templates="{}|a {}", checkpoint_every=2, evaluate_every=3)
    whole = trainer_of(config, tmp_path / "whole")
    whole.train(None, dict)
    stopped = trainer_of(config, tmp_path / "parts")
    kill_after(stopped, 4)
    taken_up = trainer_of(config, tmp_path / "parts")
    checkpoint, refused = taken_up.checkpoints.latest()
    assert not refused
    assert checkpoint.step == 4
    taken_up.restore(checkpoint)
    taken_up.train(None, dict)
    assert torch.equal(weights(whole), weights(taken_up))


def kill_after(trainer, step):
    """Train, and be killed at the first evaluation after a step."""

    def killed():
        if trainer.progress.step > step:
            raise KeyboardInterrupt
        return {}

    with pytest.raises(KeyboardInterrupt):
        trainer.train(None, killed)


def test_the_loss_falls_and_the_scale_is_bounded(tmp_path):
    config = small(vectors_file(tmp_path / "x.npz"), learning_rate=0.05, max_scale=12.0, head="det", steps=40)
    trainer = trainer_of(config, tmp_path, steps=40)
    fetched = trainer.split.images.fetch(*trainer.order.of(0, 16))
    before = float(trainer.loss_of(0, fetched).detach())
    trainer.train(None, dict)
    assert float(trainer.loss_of(0, fetched).detach()) < 0.7 * before
    assert trainer.scale() <= 12.0


def test_half_precision(tmp_path):
    config = small(vectors_file(tmp_path / "x.npz"), precision="bfloat16")
    trainer = trainer_of(config, tmp_path, steps=2)
    trainer.train(None, dict)
    assert torch.isfinite(weights(trainer)).all()


def test_pictures_that_cannot_be_read_leave_their_texts_out(tmp_path):
    root = picture_folder(tmp_path / "shapes")
    config = small(root, batch_size=18, head="det")
    trainer = trainer_of(config, tmp_path)
    rows, seeds = trainer.order.of(0, 18)
    with open(trainer.split.images.show(int(rows[2])).image, "wb") as file:
        file.write(b"no picture")
    fetched = trainer.split.images.fetch(rows, seeds)
    assert len(fetched.rows) == 17
    model = trainer.model
    kept = [place for place in range(18) if place != 2]
    texts = trainer.table.take(trainer.split.sources[rows[kept]])
    expected = model(fetched.inputs, texts)
    assert torch.allclose(trainer.loss_of(0, fetched), expected, atol=1e-5)
    nothing = fetched._replace(inputs=fetched.inputs[:0], rows=fetched.rows[:0])
    with pytest.raises(ValueError, match="none of 18 pictures of a batch could be read"):
        trainer.loss_of(0, nothing)


def test_a_loss_that_is_not_finite_ends_the_run(tmp_path):
    trainer = trainer_of(small(vectors_file(tmp_path / "x.npz"), log_every=1), tmp_path)
    with torch.no_grad():
        trainer.model.image.layer.weight.fill_(torch.nan)
    with pytest.raises(FloatingPointError, match=r"the loss is nan after step 1\. Lower --learning-rate"):
        trainer.train(None, dict)


def test_a_checkpoint_of_another_model(tmp_path):
    data = vectors_file(tmp_path / "x.npz")
    trainer_of(small(data, head="det"), tmp_path, steps=1).train(None, dict)
    other = trainer_of(small(data), tmp_path, steps=2)
    with pytest.raises(CheckpointError, match="is of another model or version"):
        other.restore(other.checkpoints.latest()[0])
