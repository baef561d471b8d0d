"""Export to `torch.export` and ONNX, for any batch size. Every export is verified against torch.

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
"""Maximum difference between the probabilities of an exported model and torch's."""

UNCERTAINTY_TOLERANCE = 1e-4
"""Maximum difference of entropies in nats and of novelty, relative if they are above 1."""

ONE_FILE = 3 * 2**29
"""Maximum bytes of weights inside an ONNX file, which is limited to 2 GiB; larger weights get a separate file."""

ABOUT = "hetxl.json"
"""Name of the extra file with metadata in a `.pt2` file."""

Inputs = Tensor | Sequence[Tensor]
Outputs = Sequence[Tensor]


def export_program(module: Exportable, example_inputs: Inputs) -> ExportedProgram:
    """Export a module for any batch size.

    Args:
        module: from `exportable`.
        example_inputs: one tensor or several, [B, ...]; all dimensions except the first become fixed.

    Returns:
        A program; call `program.module()` like the module. Its results are verified for two other batch sizes. A model
        that changes the output of its head raises an error.
    """
    _check_module(module)
    example = _tensors(example_inputs)
    module.check(*example)
    rows = tuple(_rows(example, max(2, len(example[0]))))  # torch would treat a batch size of one as constant
    batch = Dim("batch", min=1)
    try:
        with _quiet(), torch.no_grad():
            program = torch.export.export(module, rows, dynamic_shapes=(tuple({0: batch} for _ in rows),), strict=False)
    except Exception as error:  # tracing can raise anything from the model's code
        reason = " ".join(str(error).split())
        raise ValueError(f"the model cannot be exported for any batch size: {reason[:300]}") from error
    for part in program.graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # contains local paths
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
    """Write a program for `torch.export.load`, atomically.

    Args:
        module: from `exportable`.
        path: output file, .pt2.
        example_inputs: see `export_program`.
        class_names: K names, stored in the extra file `hetxl.json` with the other metadata.
        preprocessing: preprocessing of the inputs, such as size, mean and deviation of images, stored as well.

    Returns:
        The largest measured difference from the module's probabilities.
    """
    path = _with_suffix(path, ".pt2")
    about = json.dumps(_about(module, class_names, preprocessing))
    example = _tensors(example_inputs)
    program = export_program(module, example)
    content = io.BytesIO()  # torch's writer aborts the process on a full disk
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
    """Write an ONNX model atomically, after verifying that onnxruntime agrees with torch for two batch sizes.

    The outputs are `probs` [batch, K], or with top_k `probs` and `classes` [batch, k], followed by those in
    `module.output_names`. The metadata has the options (`method`, `num_samples`, …), `hetxl_version` and, as JSON,
    `class_names` and `preprocessing`.

    Args:
        module: from `exportable`.
        path: output file, .onnx. Weights of more than 1.5 GiB are stored in a second file, `NAME.onnx.data`.
        example_inputs: see `export_program`.

    Returns:
        The largest measured difference from the module's probabilities; None if onnxruntime is not installed and the
        file was not verified.
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
        node.metadata_props.clear()  # source locations of the trace
    converted.model.metadata_props.update(
        {name: value if isinstance(value, str) else json.dumps(value) for name, value in about.items()}
    )
    large = sum(value.nbytes for value in module.state_dict().values()) > ONE_FILE
    with whole_file(path) as temporary:
        converted.save(temporary, external_data=large)
        difference = _onnx_difference(module, temporary, example, input_names)
    if not large:
        Path(f"{path}.data").unlink(missing_ok=True)  # data of a previous larger model of this name
    return difference


def _program_difference(module: Exportable, program: ExportedProgram, example: list[Tensor]) -> float:
    called = program.module()

    def run(inputs: list[Tensor]) -> Outputs:
        with torch.no_grad():
            outputs = called(*inputs)
        return [outputs] if isinstance(outputs, Tensor) else list(outputs)

    return _difference(module, run, example, "torch.export")


def _difference(module: Exportable, run: Callable[[list[Tensor]], Outputs], example: list[Tensor], what: str) -> float:
    """Return the largest difference of probabilities for two batch sizes that were not traced; raise if too large."""
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
            # Classes of equal probability may swap, so compare the probabilities of the returned classes.
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
            "large logits lose precision, so scale the features, or use another method"
        )
    return largest


def _largest(values: Tensor, expected: Tensor) -> float:
    """Return the largest difference of two tensors; infinity with NaN."""
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
        raise TypeError(f"module must be the result of exportable(...), found {type(module).__name__}")


def _tensors(inputs: Inputs) -> list[Tensor]:
    """Return the inputs as a list, on the CPU."""
    tensors = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    if not tensors or not all(isinstance(value, Tensor) and value.dim() > 0 and len(value) for value in tensors):
        raise TypeError("example_inputs must be a tensor [B, ...] or several, with B at least 1")
    if len({len(value) for value in tensors}) > 1:
        raise ValueError(f"example_inputs must have the same B, found {[len(value) for value in tensors]}")
    return [value.detach().cpu() for value in tensors]


def _rows(inputs: list[Tensor], count: int) -> list[Tensor]:
    """Return `count` rows of each input, repeating rows if there are fewer."""
    return [value[torch.arange(count) % len(value)] for value in inputs]


def _with_suffix(path: str | Path, suffix: str) -> Path:
    if Path(path).suffix != suffix:
        raise ValueError(f"path must end in {suffix}, found {path}")
    return Path(path)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporters' warnings about their deprecated parts and about axes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", FutureWarning)
        # In a model with several inputs, all share the batch axis of the first.
        warnings.filterwarnings("ignore", ".*axis name: batch will not be used", UserWarning)
        yield
