"""The preprocessing of images as an ONNX graph: an image of any size → the normalised centre crop that a model takes.

Resizing is written as two products with matrices of filter weights, as Pillow computes it, each rounded to whole
levels. ONNX has a Resize with antialias, but onnxruntime's differs from Pillow's by up to 19 of 255 levels at edges.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hetxl._checks import integer_at_least, needing, one_of
from hetxl._files import whole_file
from hetxl._version import __version__

INTERPOLATIONS = {"bilinear": 1.0, "hamming": 1.0, "bicubic": 2.0, "lanczos": 3.0}
"""Filters, with how far they reach. "nearest" and "box" have steps, on which two programs do not agree."""
RESIZES = ("shorter", "squash", "border")
LONG = 16
"""Images this many times as long as wide are cropped before they are resized."""
OPSET, IR_VERSION = 18, 9
LUMA = (19595, 38470, 7471)
"""Weights of red, green and blue in a greyscale image, in 65,536ths, as Pillow has them."""


def preprocessing_onnx(path: str | Path, preprocessing: Mapping[str, Any]) -> None:
    """Write an ONNX graph: `image` [height, width, 3] uint8, red first → `pixels` [1, C, size, size] float32.

    Args:
        path: ends in .onnx.
        preprocessing: as in the metadata of an exported model: `size`, `mean` and `std` (C numbers of values from 0 to
            1; C = 1 for greyscale), `interpolation`, `crop` (share of the resized image) and `resize`.
    """
    if Path(path).suffix != ".onnx":
        raise ValueError(f"path must end in .onnx, found {path}")
    with needing("an ONNX file needs onnx", "onnx onnxruntime onnxscript"):
        import onnx
    model = _model(onnx, preprocessing)
    with whole_file(Path(path)) as temporary:
        onnx.save(model, temporary)


class _Graph:
    """Nodes that are added by calling: graph("Add", a, b) returns the name of the sum."""

    def __init__(self, helper: Any, numpy_helper: Any):
        self.helper, self.numpy_helper = helper, numpy_helper
        self.nodes: list[Any] = []
        self.count = 0
        self.constants: list[Any] = []

    def __call__(self, kind: str, *inputs: Any, **attributes: Any) -> str:
        self.count += 1
        name = f"{kind}_{self.count}"
        names = [value if isinstance(value, str) else self.constant(value) for value in inputs]
        self.nodes.append(self.helper.make_node(kind, names, [name], **attributes))
        return name

    def constant(self, value: Any) -> str:
        """Return the name of a constant; Python's floats are float64."""
        name = f"constant_{len(self.constants)}"
        self.constants.append(self.numpy_helper.from_array(np.asarray(value), name))
        return name

    def choose(self, condition: str, first: Callable[[], str], second: Callable[[], str]) -> str:
        """Return what the first function adds if a condition holds, else what the second one adds, [C, H, W]."""
        branches, outer = {}, self.nodes
        for name, add in (("then_branch", first), ("else_branch", second)):
            self.nodes = []
            result = self.helper.make_tensor_value_info(add(), 1, [None] * 3)
            branches[name] = self.helper.make_graph(self.nodes, name, [], [result])
        self.nodes = outer
        return self("If", condition, **branches)

    def double(self, value: str) -> str:
        """Return a value as float64."""
        return self("Cast", value, to=11)

    def levels(self, value: str) -> str:
        """Return values rounded half up to whole levels from 0 to 255."""
        limits = (np.float32(0), np.float32(255))
        return self("Clip", self("Floor", self("Add", value, np.float32(0.5))), *limits)


def _model(onnx: Any, preprocessing: Mapping[str, Any]) -> Any:
    size = integer_at_least("size", preprocessing["size"], 1)
    mean, std = (np.array(preprocessing[name], dtype=np.float32).reshape(-1, 1, 1) for name in ("mean", "std"))
    one_of("interpolation", preprocessing["interpolation"], INTERPOLATIONS)
    one_of("resize", preprocessing["resize"], RESIZES)
    helper, tensors = onnx.helper, onnx.TensorProto
    graph = _Graph(helper, onnx.numpy_helper)
    image = graph("Cast", graph("Transpose", "image", perm=[2, 0, 1]), to=tensors.FLOAT)  # [3, H, W]
    if len(mean) == 1:
        weights = np.array(LUMA, dtype=np.float32).reshape(3, 1, 1)
        total = graph("ReduceSum", graph("Mul", image, weights), np.array([0]), keepdims=1)
        image = graph("Floor", graph("Div", graph("Add", total, np.float32(2**15)), np.float32(2**16)))
    shape = graph("Shape", "image")
    lengths = [graph("Gather", shape, np.int64(axis)) for axis in (0, 1)]
    axes = [_mapped(graph, lengths, axis, size, preprocessing) for axis in (0, 1)]
    weights = [_filter(graph, lengths[axis], axes[axis], size, preprocessing["interpolation"]) for axis in (0, 1)]
    down, across = weights[0], graph("Transpose", weights[1], perm=[1, 0])  # [size, H] and [W, size]

    def product(*factors: str) -> str:
        return graph.levels(graph("MatMul", *factors))

    pixels = graph.choose(  # as Pillow mostly does: down first if that axis shrinks, and more than the other
        graph("Greater", axes[0].shrinks, graph("Max", axes[1].shrinks, 1.0)),
        lambda: product(product(down, image), across),
        lambda: product(down, product(image, across)),
    )
    if preprocessing["resize"] == "border":
        inside_down, inside_across = (_inside(graph, axis, size) for axis in axes)
        inside = graph("And", graph("Unsqueeze", inside_down, np.array([1])), inside_across)  # [size, size]
        pixels = graph("Where", inside, pixels, np.round(255 * mean).astype(np.float32))
    scaled = graph("Div", graph("Sub", graph("Div", pixels, np.float32(255)), mean), std)
    graph.nodes.append(helper.make_node("Unsqueeze", [scaled, graph.constant(np.array([0]))], ["pixels"]))
    model = helper.make_model(
        helper.make_graph(
            graph.nodes,
            "preprocess",
            [helper.make_tensor_value_info("image", tensors.UINT8, ["height", "width", 3])],
            [helper.make_tensor_value_info("pixels", tensors.FLOAT, [1, len(mean), size, size])],
            graph.constants,
        ),
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
        producer_name="hetxl",
    )
    about = {"hetxl_version": __version__, "preprocessing": json.dumps(dict(preprocessing))}
    helper.set_model_props(model, about)
    onnx.checker.check_model(model)
    return model


class _Axis(NamedTuple):
    """How an axis of the crop is made of that of the image; all are float64."""

    scale: str  # pixels of the image that become one
    first: str  # row of the crop among the resized rows; may be between two
    resized: str  # rows that the whole image is resized to
    shrinks: str  # pixels of the image over pixels of the result


def _mapped(graph: _Graph, lengths: Sequence[str], axis: int, size: int, preprocessing: Mapping[str, Any]) -> _Axis:
    side, mode = int(size // preprocessing["crop"]), preprocessing["resize"]
    length, other = lengths[axis], lengths[1 - axis]
    if mode == "squash":
        resized = graph.constant(np.float64(side))
    elif mode == "border":
        ratio = graph("Div", graph.double(graph("Max", length, other)), float(side))
        resized = graph("Max", graph("Round", graph("Div", graph.double(length), ratio)), 1.0)
    else:
        # The shorter side becomes `side`; the longer one is cut to whole pixels.
        resized = graph.double(graph("Div", graph("Mul", length, np.int64(side)), graph("Min", length, other)))
    scale = shrinks = graph("Div", graph.double(length), resized)
    border = graph("Max", graph("Floor", graph("Div", graph("Sub", float(size), resized), 2.0)), 0.0)
    bordered = graph("Max", resized, float(size))
    first = graph("Sub", graph("Round", graph("Div", graph("Sub", bordered, float(size)), 2.0)), border)
    if mode == "shorter":
        shorter = graph("Min", length, other)
        long = graph("Greater", graph("Max", length, other), graph("Mul", shorter, np.int64(LONG)))
        exact = graph("Div", graph.double(shorter), float(side))  # a square, of the same scale on both axes
        middle = graph("Sub", graph("Div", graph("Div", graph.double(length), exact), 2.0), size / 2)
        scale, first = graph("Where", long, exact, scale), graph("Where", long, middle, first)
        shrinks = graph("Where", long, graph("Div", graph.double(length), float(size)), shrinks)
    return _Axis(scale, first, resized, shrinks)


def _inside(graph: _Graph, axis: _Axis, size: int) -> str:
    """Return which rows of the crop are of the image, [size] bool; others are a border."""
    rows = graph("Add", np.arange(size, dtype=np.float64), axis.first)
    return graph("And", graph("GreaterOrEqual", rows, 0.0), graph("Less", rows, axis.resized))


def _filter(graph: _Graph, length: str, axis: _Axis, size: int, interpolation: str) -> str:
    """Return the weights of an axis's pixels in those of the crop, [size, length] float32."""
    rows = graph("Add", np.arange(size) + 0.5, axis.first)
    centres = graph("Unsqueeze", graph("Mul", rows, axis.scale), np.array([1]))
    columns = graph.double(graph("Range", np.int64(0), length, np.int64(1)))
    width = graph("Max", axis.scale, 1.0)  # smaller images average over as many pixels as become one
    x = graph("Div", graph("Sub", graph("Add", columns, 0.5), centres), width)
    weights = _WEIGHTS[interpolation](graph, graph("Cast", x, to=1))
    # Rows outside of the image are a border, and have no weights to divide by.
    total = graph("Max", graph("ReduceSum", weights, np.array([1]), keepdims=1), np.float32(1e-6))
    return graph("Div", weights, total)


def _bilinear(graph: _Graph, x: str) -> str:
    return graph("Max", graph("Sub", np.float32(1), graph("Abs", x)), np.float32(0))


def _bicubic(graph: _Graph, x: str) -> str:
    """Keys' kernel with a = −1/2: 1 + x²(3x − 5)/2 up to 1, and 2 + x(x(5 − x) − 8)/2 up to 2."""
    x = graph("Abs", x)
    half, two = np.float32(0.5), np.float32(2)
    near = graph("Mul", graph("Mul", x, x), graph("Sub", graph("Mul", x, np.float32(1.5)), np.float32(2.5)))
    far = graph("Mul", x, graph("Sub", np.float32(5), x))
    far = graph("Mul", graph("Mul", x, graph("Sub", far, np.float32(8))), half)
    far = graph("Where", graph("Less", x, two), graph("Add", far, two), np.float32(0))
    return graph("Where", graph("Less", x, np.float32(1)), graph("Add", near, np.float32(1)), far)


def _hamming(graph: _Graph, x: str) -> str:
    window = graph("Add", np.float32(0.54), graph("Mul", np.float32(0.46), graph("Cos", graph("Mul", x, _PI))))
    return _within(graph, graph("Mul", _sinc(graph, x), window), x, "hamming")


def _lanczos(graph: _Graph, x: str) -> str:
    product = graph("Mul", _sinc(graph, x), _sinc(graph, graph("Div", x, np.float32(3))))
    return _within(graph, product, x, "lanczos")


def _sinc(graph: _Graph, x: str) -> str:
    angle = graph("Mul", x, _PI)
    safe = graph("Where", graph("Equal", x, np.float32(0)), np.float32(1), angle)
    return graph("Where", graph("Equal", x, np.float32(0)), np.float32(1), graph("Div", graph("Sin", safe), safe))


def _within(graph: _Graph, weights: str, x: str, interpolation: str) -> str:
    reach = np.float32(INTERPOLATIONS[interpolation])
    return graph("Where", graph("Less", graph("Abs", x), reach), weights, np.float32(0))


_PI = np.float32(np.pi)
_WEIGHTS = {"bilinear": _bilinear, "hamming": _hamming, "bicubic": _bicubic, "lanczos": _lanczos}
