"""Export to `torch.export` and ONNX, with any batch size. Every result is compared with torch before it is handed out.

module = exportable(head_or_model, "mc", num_samples=256)
to_onnx(module, "model.onnx", example_inputs)
"""

import contextlib
import io
import json
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram

from hetxl._checks import needing
from hetxl._files import whole_file
from hetxl._version import __version__
from hetxl.integrations.export.head_file import check_names
from hetxl.integrations.export.module import Exportable, exportable

__all__ = ["TOLERANCE", "Exportable", "export_program", "exportable", "to_onnx", "to_torch"]

TOLERANCE = 1e-5
"""The largest allowed difference between probabilities of an exported model and torch's."""

UNCERTAINTY_TOLERANCE = 1e-4
"""The same of entropies in nats and of novelty, as a share of those that are above 1."""

ONE_FILE = 3 * 2**29
"""Bytes of weights that an ONNX file may hold itself: the format ends at 2 GiB. More go to a file beside it."""

ABOUT = "hetxl.json"
"""The extra file of a `.pt2` with its metadata."""

Inputs = Tensor | Sequence[Tensor]
Outputs = Sequence[Tensor]


def export_program(module: Exportable, example_inputs: Inputs) -> ExportedProgram:
    """Return the graph of a module for any batch size.

    Args:
        module: from `exportable`.
        example_inputs: one tensor or several, [B, ...]; their shapes but for the first dimension become fixed.

    Returns:
        A program; `program.module()` is called as the module is. Its results were compared with those of the module for
        two other batch sizes. A model that changes what its head returns is refused.
    """
    _check_module(module)
    example = _tensors(example_inputs)
    module.check(*example)
    rows = tuple(_rows(example, max(2, len(example[0]))))  # a batch of one would be taken for a fixed size
    batch = Dim("batch", min=1)
    try:
        with _quiet(), torch.no_grad():
            program = torch.export.export(module, rows, dynamic_shapes=(tuple({0: batch} for _ in rows),), strict=False)
    except Exception as error:  # whatever a model's own code raises when it is traced
        reason = " ".join(str(error).split())
        raise ValueError(f"the model cannot be exported for any batch size: {reason[:300]}") from error
    for part in program.graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # paths of the machine that it was traced on
    _program_difference(module, program, example)
    return program


def to_torch(
    module: Exportable,
    path: str | Path,
    example_inputs: Inputs,
    *,
    class_names: Sequence[str] | None = None,
    preprocessing: Mapping[str, Any] | None = None,
) -> float:
    """Write a program that `torch.export.load` reads, whole or not at all.

    Args:
        module: from `exportable`.
        path: ends in .pt2.
        example_inputs: as for `export_program`.
        class_names: K names, kept in the file (extra file `hetxl.json`) with how it was made.
        preprocessing: how inputs are made, such as size, mean and deviation of images; kept in the file as well.

    Returns:
        The largest difference to the module's probabilities that was found.
    """
    path = _with_suffix(path, ".pt2")
    about = json.dumps(_about(module, class_names, preprocessing))
    example = _tensors(example_inputs)
    program = export_program(module, example)
    content = io.BytesIO()  # torch's own writer aborts the process on a full disk
    with _quiet():
        torch.export.save(program, content, extra_files={ABOUT: about})
    with whole_file(path) as temporary, _quiet():
        temporary.write_bytes(content.getbuffer())
        return _program_difference(module, torch.export.load(temporary), example)


def to_onnx(
    module: Exportable,
    path: str | Path,
    example_inputs: Inputs,
    *,
    input_names: Sequence[str] = ("inputs",),
    class_names: Sequence[str] | None = None,
    preprocessing: Mapping[str, Any] | None = None,
) -> float | None:
    """Write an ONNX model, whole or not at all, once onnxruntime was found to agree with torch for two batch sizes.

    Its outputs are `probs` [batch, K], or with top_k `probs` and `classes` [batch, k], followed by those that
    `module.output_names` lists. Its properties hold how it was made (`method`, `num_samples`, …), `hetxl_version` and,
    as JSON, `class_names` and `preprocessing`.

    Args:
        module: from `exportable`.
        path: ends in .onnx. Weights of more than 1.5 GiB are put in a second file, `NAME.onnx.data`.
        example_inputs: as for `export_program`.

    Returns:
        The largest difference to the module's probabilities that was found; None where onnxruntime is not installed
        and the file was not checked.
    """
    path = _with_suffix(path, ".onnx")
    about = _about(module, class_names, preprocessing)
    example = _tensors(example_inputs)
    if len(input_names) != len(example):
        raise ValueError(f"input_names must name each of the {len(example)} inputs, found {list(input_names)}")
    with _quiet(), needing("an ONNX file needs onnx and onnxscript", "onnx onnxruntime onnxscript"):
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    program = export_program(module, example)
    with _quiet():
        converted: Any = torch.onnx.export(
            program,
            (),
            dynamo=True,
            verbose=False,
            input_names=list(input_names),
            output_names=module.output_names,
            dynamic_shapes=(tuple({0: "batch"} for _ in example),),
        )
    for node in converted.model.graph.all_nodes():
        node.metadata_props.clear()  # where in which file it was traced
    converted.model.metadata_props.update(
        {name: value if isinstance(value, str) else json.dumps(value) for name, value in about.items()}
    )
    large = sum(value.nbytes for value in module.state_dict().values()) > ONE_FILE
    with whole_file(path) as temporary:
        converted.save(temporary, external_data=large)
        difference = _onnx_difference(module, temporary, example, input_names)
    if not large:
        Path(f"{path}.data").unlink(missing_ok=True)  # of a larger model that had this name
    return difference


def _program_difference(module: Exportable, program: ExportedProgram, example: list[Tensor]) -> float:
    called = program.module()

    def run(inputs: list[Tensor]) -> Outputs:
        with torch.no_grad():
            outputs = called(*inputs)
        return [outputs] if isinstance(outputs, Tensor) else list(outputs)

    return _difference(module, run, example, "torch.export")


def _difference(module: Exportable, run: Callable[[list[Tensor]], Outputs], example: list[Tensor], what: str) -> float:
    """Return the largest difference of probabilities, for two batch sizes not traced; raises if it is too large."""
    largest = 0.0
    for count in (1, max(2, len(example[0])) + 1):
        inputs = _rows(example, count)
        with torch.no_grad():
            probs, expected = module.probabilities(*inputs), module(*inputs)
        dim, values = module.class_dim(probs), dict(zip(module.output_names, run(inputs), strict=True))
        named = {"probs": expected} if isinstance(expected, Tensor) else dict(zip(values, expected, strict=True))
        for name, output in values.items():
            if output.shape != named[name].shape:
                raise ValueError(
                    f"{what} returns shape {list(output.shape)} of {name} for {count} examples, not "
                    f"{list(named[name].shape)}"
                )
        for top, ids in (("probs", "classes"), ("top_probs", "top_classes")):
            # Classes of equal probability may change places: what counts is the probability of those that were found.
            if ids in values:
                largest = max(largest, _largest(values[top], probs.gather(dim, values[ids])))
            if top in values:
                largest = max(largest, _largest(values[top], named[top]))
        for name in ("entropy", "expected_entropy", "mutual_information", "novelty"):
            if name in values:
                scale = max(1.0, float(named[name].abs().max()))
                if (relative := _largest(values[name], named[name]) / scale) > UNCERTAINTY_TOLERANCE:
                    raise ValueError(
                        f"{name} of {what} differs from torch's by {relative:.1e} of it, more than "
                        f"{UNCERTAINTY_TOLERANCE:g}; scale the features, or use another method"
                    )
    if largest > TOLERANCE:
        raise ValueError(
            f"probabilities of {what} differ from torch's by {largest:.1e}, more than {TOLERANCE:g}; "
            "large logits lose digits: scale the features, or use another method"
        )
    return largest


def _largest(values: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two tensors, infinity if there are NaN."""
    return float((values - expected).abs().nan_to_num(nan=math.inf).max())


def _onnx_difference(module: Exportable, path: Path, example: list[Tensor], input_names: Sequence[str]) -> float | None:
    with _quiet():
        try:
            import onnxruntime
        except ImportError:
            return None
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3  # errors
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def run(inputs: list[Tensor]) -> Outputs:
        named = {name: value.numpy() for name, value in zip(input_names, inputs, strict=True)}
        return [torch.from_numpy(value) for value in session.run(None, named)]

    return _difference(module, run, example, "onnxruntime")


def _about(
    module: Exportable, class_names: Sequence[str] | None, preprocessing: Mapping[str, Any] | None
) -> dict[str, Any]:
    _check_module(module)
    entries = {"hetxl_version": __version__, **module.about, "outputs": module.output_names}
    if class_names is not None:
        entries["class_names"] = check_names(class_names, module.fixed.head.num_classes)
    if preprocessing is not None:
        entries["preprocessing"] = dict(preprocessing)
    return entries


def _check_module(module: object) -> None:
    if not isinstance(module, Exportable):
        raise TypeError(f"module must be made by exportable(...), found {type(module).__name__}")


def _tensors(inputs: Inputs) -> list[Tensor]:
    """Return the inputs as a list, on the CPU."""
    tensors = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    if not tensors or not all(isinstance(value, Tensor) and value.dim() > 0 and len(value) for value in tensors):
        raise TypeError("example_inputs must be a tensor [B, ...] or several, with B at least 1")
    if len({len(value) for value in tensors}) > 1:
        raise ValueError(f"example_inputs must have the same B, found {[len(value) for value in tensors]}")
    return [value.detach().cpu() for value in tensors]


def _rows(inputs: list[Tensor], count: int) -> list[Tensor]:
    """Return `count` rows of each, repeated from the start if there are fewer."""
    return [value[torch.arange(count) % len(value)] for value in inputs]


def _with_suffix(path: str | Path, suffix: str) -> Path:
    if Path(path).suffix != suffix:
        raise ValueError(f"path must end in {suffix}, found {path}")
    return Path(path)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without what the exporters say about their own deprecated parts and about axes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        # Of a model with several inputs: all of them have the batch of the first.
        warnings.filterwarnings("ignore", ".*axis name: batch will not be used", UserWarning)
        yield
