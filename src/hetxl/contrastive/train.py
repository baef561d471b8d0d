"""`hetxl contrastive train`: from a configuration to a trained, evaluated run."""

import dataclasses
import time
from pathlib import Path
from typing import Any

import torch

from hetxl.contrastive.config import LABELS, ContrastiveConfig
from hetxl.contrastive.estimate import estimate
from hetxl.contrastive.evaluate import validate
from hetxl.contrastive.loop import ContrastiveTrainer
from hetxl.contrastive.model import Specs, build_towers
from hetxl.contrastive.results import evaluate_pairs, summary_line
from hetxl.contrastive.run import ContrastiveRun, default_directory, describe_model, save_model, start_run
from hetxl.contrastive.texts import TextReader
from hetxl.data.broken import BrokenLimit
from hetxl.data.pairs import Pairs, open_pairs
from hetxl.data.pairs_noise import swapped
from hetxl.training.distributed import World, world
from hetxl.training.files import write_json
from hetxl.training.log import Log
from hetxl.training.progress import Narrator
from hetxl.training.results import count

SWAPS = "swaps.npz"


def open_data(config: ContrastiveConfig) -> Pairs:
    """The pairs that a configuration names, with the swaps that it asks for.

    Args:
        config: of the run.
    """
    pairs = open_pairs(config.data, image_size=config.image_size, seed=config.data_seed)
    if not config.swap:
        return pairs
    if "train" not in pairs.splits:
        raise ValueError(f"data {config.data!r} has no training split to swap texts in")
    train = swapped(pairs.splits["train"], config.swap, config.swap_within, config.data_seed)
    assert train.swaps is not None
    note = (
        f"swapped texts: {len(train.swaps):,} of {len(train):,} training pairs ({len(train.swaps) / len(train):.1%})"
        f"{', within categories' if config.swap_within else ''}; validation and test are clean"
    )
    return dataclasses.replace(pairs, splits={**pairs.splits, "train": train}, notes=(*pairs.notes, note))


def train(
    config: ContrastiveConfig,
    *,
    pairs: Pairs | None = None,
    narrator: Narrator | None = None,
    label: str | None = None,
) -> ContrastiveRun:
    """Train, evaluate, and write everything into the run's directory.

    A directory with a run of the same configuration is taken up where it stopped; a finished one is left as it is.

    Args:
        config: all options.
        pairs: opened already, swaps included; None to open what the configuration names.
        narrator: tells how far it is; None for one that prints.
        label: how a report calls the run; the head's name without.
    """
    narrator = narrator or Narrator()
    with world(config.device) as processes:
        if not processes.leads:
            narrator = Narrator(quiet=True)
        directory = default_directory(config) if config.out is None else Path(config.out)
        if pairs is None and not directory.exists():
            pairs = open_data(config)  # data that cannot be opened leaves no directory behind
        run = start_run(config, directory) if processes.leads else ContrastiveRun(directory, config)
        processes.wait()
        if run.finished:
            narrator.say(f"{run.path} is done; see result.json there, or hetxl contrastive report {run.path}")
            return run
        _train(run, pairs or open_data(config), processes, narrator, label or LABELS[config.head])
    return run


def _train(run: ContrastiveRun, pairs: Pairs, processes: World, narrator: Narrator, label: str) -> None:
    config = run.config
    if "train" not in pairs.splits:
        raise ValueError(f"data {config.data!r} has no training split")
    split = pairs.splits["train"]
    if len(split) < config.batch_size:
        raise ValueError(f"batch_size must be at most {len(split)}, the training pairs, found {config.batch_size}")
    texts = TextReader(config.text, config.buckets)
    specs = Specs(pairs.image, texts.spec(pairs))
    steps = config.steps or max(1, round(config.epochs * len(split) / config.batch_size))
    model = build_towers(config, specs).to(processes.device)
    if not processes.leads:
        processes.wait()  # vectors of a locked encoder are computed by one process, and read by the others
    table = texts.table(split.texts, config.prompts)
    if processes.leads:
        processes.wait()
    broken = BrokenLimit(path=run.path / "broken.txt" if processes.leads else None)
    trainer = ContrastiveTrainer(config, model, split, table, steps, run.checkpoints, processes, narrator, broken)
    checkpoint, refused = run.checkpoints.latest()
    for message in refused:
        narrator.say(f"Not used: {message}")
    if checkpoint is not None:
        trainer.restore(checkpoint)
        narrator.say(f"Going on from step {checkpoint.step:,} of {steps:,} in {run.path}")
    processes.wait()
    log = None
    if processes.leads:
        rows = ", ".join(f"{len(part):,} {name}" for name, part in pairs.splits.items())
        narrator.say(f"{pairs.name}: {rows} pairs")
        run.checkpoints.discard_after(trainer.progress.step)
        describe_model(run, specs)
        if split.swaps is not None:
            split.swaps.save(run.path / SWAPS)
        if checkpoint is None:
            narrator.say(f"{label}: {estimate(trainer)}")
        log = Log(
            run.path / "log.jsonl", trainer.progress.step, run.path / "tensorboard" if config.tensorboard else None
        )
    name = "validation" if "validation" in pairs.splits else "train"
    # The loss of an evaluation is one process's: the others are not there.
    alone = build_towers(config, specs, gather=False).to(processes.device).eval() if processes.processes > 1 else model

    def validation() -> dict[str, Any]:
        if alone is not model:
            alone.load_state_dict(model.state_dict())
        part = pairs.splits[name]
        shared = table if part.texts is split.texts else texts.table(part.texts)
        return {"split": name} | validate(
            alone, part, shared, config.evaluation_pairs, config.batch_size, config.workers
        )

    try:
        progress = trainer.train(log, validation)
    finally:
        if log is not None:
            log.close()
    if broken.seen:
        broken.finish()
    processes.wait()
    if processes.leads:
        save_model(run, model)
        alone.load_state_dict(model.state_dict())
        begin = time.perf_counter()
        evaluation = evaluate_pairs(alone.eval(), pairs, texts, config)
        with torch.no_grad():
            scale = float(model.loss.scale())
        result = {
            "kind": "contrastive",
            "label": label,
            "head": config.head,
            "seed": config.seed,
            "dataset": pairs.name,
            "data": {
                "rows": {part: len(value) for part, value in pairs.splits.items()},
                "notes": list(pairs.notes),
            },
            "parameters": {
                "total": count(model),
                **{name: count(getattr(model, name)) for name in ("image", "text", "loss")},
            },
            **evaluation.result,
            "scale": scale,
            "steps": progress.step,
            "examples": progress.step * config.batch_size,
            "train_seconds": progress.seconds,
            "evaluate_seconds": time.perf_counter() - begin,
        }
        write_json(run.path / "examples.json", evaluation.examples)
        write_json(run.path / "result.json", result)
        narrator.say(f"{label}: {summary_line(result)}; {run.path}")
    processes.wait()
