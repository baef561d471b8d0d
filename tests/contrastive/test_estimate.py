import torch

from hetxl.contrastive.estimate import Estimate, estimate
from hetxl.contrastive.loop import ContrastiveTrainer
from hetxl.contrastive.model import Specs, build_towers
from hetxl.contrastive.texts import TextReader
from hetxl.data.broken import BrokenLimit
from hetxl.data.pairs import open_pairs
from hetxl.training.checkpoint import Checkpoints
from hetxl.training.distributed import World
from support.pairs import QUIET, picture_folder, small


def test_it_leaves_the_model_as_it_was(tmp_path):
    config = small(picture_folder(tmp_path / "shapes"))
    pairs = open_pairs(config.data, image_size=16)
    split = pairs.splits["train"]
    model = build_towers(config, Specs(pairs.image, None))
    table = TextReader(buckets=64).table(split.texts)
    world = World(torch.device("cpu"))
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    trainer = ContrastiveTrainer(config, model, split, table, 9, checkpoints, world, QUIET, BrokenLimit())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    found = estimate(trainer)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert found.seconds_per_step > 0
    assert found.steps == 9
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())
    assert found.memory["weights"] == found.memory["their gradients"] == weights
    assert found.memory["the towers' activations"] > 16 * 16 * 16 * 8 * 4  # the first stage alone


def test_told_in_one_line():
    memory = {"weights": 3_000_000, "the towers' activations": 2_000_000_000}
    assert str(Estimate(0.5, 100, memory)) == (
        "about 50 s for 100 steps; 2.0 GB of memory, most of it the towers' activations (2.0 GB)"
    )
