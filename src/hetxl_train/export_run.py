"""`hetxl export`: write the trained model of a run to a file for other programs."""

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
"""Number of random inputs to verify the exported model with."""

DENSITY_ROWS = 50_000
"""Maximum number of training rows for the density."""


@dataclass(frozen=True)
class Written:
    """An exported file."""

    path: Path
    size: int  # bytes, over all files of an ONNX model
    what: str  # description of the content in one line
    difference: float | None  # largest difference of its probabilities from `head.predict`; None if not verified
    preprocess: Path | None = None  # the graph that preprocesses images


def export_run(
    run: str | Path, to: str = "onnx", *, out: str | Path | None = None, method: str | None = None,
    num_samples: int | None = None, top_k: int | None = None, seed: int | None = None,
    uncertainty: bool | None = None, novelty: bool = False, console: Console | None = None,
) -> Written:  # fmt: skip
    """Write the trained model of a run with its class names, and verify the file against `head.predict`.

    Args:
        to: "onnx" or "torch" (`torch.export`) for the whole model, or "head" for the head alone with its configuration.
        out: output file [default: RUN/model.onnx, RUN/model.pt2 or RUN/head.safetensors].
        method: method of `head.predict` [default: "mc"]. This and the following options are not for "head".
        num_samples: S [default: the run's `eval_samples`].
        top_k: return only the k most probable classes.
        seed: seed of the fixed noise [default: the head's samples].
        uncertainty: also return entropies, the top classes, novelty if the head has a density, and the prediction sets
            of a calibrated run [default: True for "onnx", whose outputs have names; False for "torch", whose outputs
            are unpacked by position].
        novelty: fit the density of the run's training features first, for the output `novelty`; needs the data.
    """
    one_of("--to", to, SUFFIXES)
    options = {"--method": method, "--num-samples": num_samples, "--top-k": top_k, "--seed": seed}
    options |= {"--uncertainty": uncertainty, "--novelty": novelty or None}
    named = [name for name, value in options.items() if value is not None]
    if to == "head" and named:
        raise ValueError(
            f"{', '.join(named)}: not supported by --to head, which stores only weights; pass them when you predict"
        )
    if novelty and uncertainty is False:
        raise ValueError("--novelty and --no-uncertainty exclude each other; pass only one of them")
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
    """Fit the density of a run's head to the features of at most `DENSITY_ROWS` training rows."""
    dataset = data_for(trained)
    split = dataset.splits["train"]
    if split.labels.multi:
        raise ValueError(f"{trained.run.path} has several labels per row, but novelty needs one class per row")
    batches = list(trained.features(split, some_rows(split.labels.labelled(), DENSITY_ROWS)))
    targets = split.labels.take(np.concatenate([some for _, some in batches]))
    assert isinstance(targets, Tensor)
    trained.model.head.density = fit_density((features for features, _ in batches), targets, len(trained.class_names))


def _sets(trained: Trained, method: str) -> Any:
    """Return the thresholds of prediction sets from `hetxl calibrate`. None for a run without them, and for methods
    other than "mc" of a head with noise, because the guarantee holds only for the probabilities of "mc"."""
    if not (trained.run.path / FILE).exists() or (method != "mc" and trained.model.head.covariance is not None):
        return None
    calibration = Calibration.load(trained.run.path)
    return calibration.thresholds if trained.link == "sigmoid" else calibration.conformal


def _preprocessing(spec: InputSpec) -> dict[str, Any] | None:
    """Return the preprocessing of images; None for other data, and for images that are not read from files."""
    return None if spec.image is None else {"size": spec.shape[-1], **asdict(spec.image)}


def random_inputs(spec: InputSpec, count: int) -> Tensor:
    """Return random inputs for a model, [count, ...], the same in every call."""
    generator = torch.Generator().manual_seed(0)
    if spec.kind in ("tokens", "text"):
        return torch.randint(spec.vocabulary, (count, *spec.shape), generator=generator)
    return torch.randn(count, *spec.shape, generator=generator)


@torch.no_grad()
def predict_difference(model: Model, module: Exportable, inputs: Tensor) -> float:
    """Return the largest difference of a module's probabilities from those of `head.predict` with the same noise."""
    prediction = model.head.predict(model.backbone(inputs), method=module.fixed.method, noise=module.noise)
    largest = float((module.probabilities(inputs) - prediction.probs).abs().max())
    if not largest <= TOLERANCE:
        raise ValueError(
            f"the exported probabilities differ from predict's by {largest:.1e}, more than {TOLERANCE:g}; "
            "large logits lose precision, so use another --method"
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
