"""`hetxl export`: the trained model of a run as a file for another program."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetxl._checks import one_of
from hetxl._seeds import some_rows
from hetxl.integrations.export import TOLERANCE, Exportable, exportable, to_onnx, to_torch
from hetxl.integrations.export.head_file import load_head, save_head
from hetxl.integrations.export.module import fixed_noise
from hetxl.integrations.export.preprocess import INTERPOLATIONS, preprocessing_onnx
from hetxl.nn import fit_density
from hetxl_train.calibration import FILE, Calibration
from hetxl_train.console import Console
from hetxl_train.data.dataset import InputSpec
from hetxl_train.evaluate_runs import data_for
from hetxl_train.model import Model
from hetxl_train.runs import Trained, check_single, load_run

SUFFIXES = {"onnx": ".onnx", "torch": ".pt2", "head": ".safetensors"}
"""Export formats, with the suffixes of their files."""

EXAMPLES = 8
"""Random inputs that the exported model is compared on."""

DENSITY_ROWS = 50_000
"""Training rows that a density is measured on."""


@dataclass(frozen=True)
class Written:
    """An exported file."""

    path: Path
    size: int  # bytes, of all files where an ONNX model has two
    what: str  # its content in one line
    difference: float | None  # of its probabilities from those of `head.predict`, at most; None if not compared
    preprocess: Path | None = None  # the graph that makes its inputs of images


def export_run(
    run: str | Path, to: str = "onnx", *, out: str | Path | None = None, method: str | None = None,
    num_samples: int | None = None, top_k: int | None = None, seed: int | None = None,
    uncertainty: bool | None = None, novelty: bool = False, console: Console | None = None,
) -> Written:  # fmt: skip
    """Write the trained model of a run, with its class names, and compare the file with `head.predict`.

    Args:
        to: "onnx", "torch" (`torch.export`), both of the whole model; or "head", the head alone with its configuration.
        out: the file; RUN/model.onnx, RUN/model.pt2 or RUN/head.safetensors without.
        method: as of `head.predict`; "mc" without. This and the following are not for "head".
        num_samples: S; the run's `eval_samples` without.
        top_k: only the k most probable classes.
        seed: of the fixed noise; the head's own draws without.
        uncertainty: whether the file also returns entropies, the top classes, novelty if the head has a density, and
            the prediction sets of a calibrated run. By default "onnx" does, whose outputs have names, and "torch",
            whose outputs are unpacked by their number, does not.
        novelty: measure the density of the run's training features first, for the output `novelty`; needs its data.
    """
    one_of("--to", to, SUFFIXES)
    options = {"--method": method, "--num-samples": num_samples, "--top-k": top_k, "--seed": seed}
    options |= {"--uncertainty": uncertainty, "--novelty": novelty or None}
    named = [name for name, value in options.items() if value is not None]
    if to == "head" and named:
        raise ValueError(f"{', '.join(named)}: not for --to head, which holds the weights; give them when it predicts")
    if novelty and uncertainty is False:
        raise ValueError("--novelty is one of the outputs that --no-uncertainty leaves out; pass only one of them")
    name = "head" if to == "head" else "model"
    path = Path(run) / f"{name}{SUFFIXES[to]}" if out is None else Path(out)
    if path.suffix != SUFFIXES[to]:
        raise ValueError(f"--out must end in {SUFFIXES[to]} for --to {to}, found {path}")
    with (console or Console()).bar("exporting", 2) as bar:
        bar.to(0, "reading the run")
        trained = load_run(run, console=console)
        check_single(trained, "exported")
        inputs = random_inputs(trained.spec, EXAMPLES)
        bar.to(1, f"writing {path}")
        if to == "head":
            save_head(trained.model.head, path, class_names=trained.class_names)
            what = f"{type(trained.model.head).__name__} with {len(trained.class_names):,} class names"
            return Written(path, path.stat().st_size, what, _head_difference(trained.model, path, inputs))
        more: dict[str, Any] = {}
        if novelty:
            fit_novelty(trained)
        if novelty or (to == "onnx" if uncertainty is None else uncertainty):
            more = {"uncertainty": True, "sets": _sets(trained, method or "mc")}
        module = exportable(trained.model, method or "mc", num_samples=num_samples, top_k=top_k, seed=seed, **more)
        difference = predict_difference(trained.model, module, inputs)
        preprocessing, graph = _preprocessing(trained.spec), None
        about: dict[str, Any] = {"class_names": trained.class_names, "preprocessing": preprocessing}
        if to == "onnx":
            if preprocessing is not None and preprocessing["interpolation"] in INTERPOLATIONS:
                graph = path.with_suffix(".preprocess.onnx")
                preprocessing_onnx(graph, preprocessing)
            written = to_onnx(module, path, inputs, input_names=[trained.spec.kind], **about)
        else:
            written = to_torch(module, path, inputs, **about)
    size = sum(file.stat().st_size for file in (path, Path(f"{path}.data")) if file.exists())
    difference = None if written is None else written + difference
    return Written(path, size, _describe(module, trained.spec), difference, graph)


@torch.no_grad()
def fit_novelty(trained: Trained) -> None:
    """Set the density of a run's head by the features of its training rows, `DENSITY_ROWS` of them at most."""
    dataset = data_for(trained)
    split = dataset.splits["train"]
    if split.labels.multi:
        raise ValueError(f"{trained.run.path} has several labels a row, and a density needs one class for each")
    batches = list(trained.features(split, some_rows(split.labels.labelled(), DENSITY_ROWS)))
    targets = split.labels.take(np.concatenate([some for _, some in batches]))
    assert isinstance(targets, Tensor)
    trained.model.head.density = fit_density((features for features, _ in batches), targets, len(trained.class_names))


def _sets(trained: Trained, method: str) -> Any:
    """Return what prediction sets are made by, from `hetxl calibrate`, whose probabilities are those of "mc"; None for
    a run that is not calibrated for sets, and for other methods of a head with noise, which the guarantee excludes."""
    if not (trained.run.path / FILE).exists() or (method != "mc" and trained.model.head.covariance is not None):
        return None
    calibration = Calibration.load(trained.run.path)
    return calibration.thresholds if trained.link == "sigmoid" else calibration.conformal


def _preprocessing(spec: InputSpec) -> dict[str, Any] | None:
    """Return how images become inputs; None for other data, and for images that are not read from files."""
    return None if spec.image is None else {"size": spec.shape[-1], **asdict(spec.image)}


def random_inputs(spec: InputSpec, count: int) -> Tensor:
    """Return random inputs of the kind a model takes, [count, ...], always the same."""
    generator = torch.Generator().manual_seed(0)
    if spec.kind in ("tokens", "text"):
        return torch.randint(spec.vocabulary, (count, *spec.shape), generator=generator)
    return torch.randn(count, *spec.shape, generator=generator)


@torch.no_grad()
def predict_difference(model: Model, module: Exportable, inputs: Tensor) -> float:
    """Return the largest difference between a module's probabilities and those of `head.predict`, same noise."""
    prediction = model.head.predict(model.backbone(inputs), method=module.fixed.method, noise=module.noise)
    largest = float((module.probabilities(inputs) - prediction.probs).abs().max())
    if not largest <= TOLERANCE:
        raise ValueError(
            f"the exported probabilities differ from predict's by {largest:.1e}, more than {TOLERANCE:g}; "
            "large logits lose digits: use another --method"
        )
    return largest


@torch.no_grad()
def _head_difference(model: Model, path: Path, inputs: Tensor) -> float:
    features, head, read = model.backbone(inputs), model.head, load_head(path)
    noise = None if head.covariance is None else fixed_noise(head, 16, 0)
    return float((read.predict(features, noise=noise).probs - head.predict(features, noise=noise).probs).abs().max())


def _describe(module: Exportable, spec: InputSpec) -> str:
    about = module.about
    how = about["method"] + (f" with {about['num_samples']:,} samples" if "num_samples" in about else "")
    inputs = ", ".join(map(str, spec.shape))
    k = module.top_k
    outputs = f"probs [B, {about['num_classes']}]" if k is None else f"probs and classes [B, {k}]"
    more = module.output_names[1 if k is None else 2 :]
    return f"{how}, {spec.kind} [B, {inputs}] to {outputs}" + (f", with {', '.join(more)}" if more else "")
