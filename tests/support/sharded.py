"""Several processes that share the classes, and what they run, by name, so that a new process finds it."""

import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method

from hetxl.classifiers.sharded import ShardedClassifier
from hetxl.functional import LabelLists
from hetxl_train.distributed import destroy_process_group
from support.cases import make, normals
from support.distributed import gradients
from support.killed_rank import load_example

TIMEOUT = 120
B, D, S = 8, 6, 4

PROCESSES = get_context("forkserver")
# Imported once, before any thread is started; every process is then a fork.
PROCESSES.set_forkserver_preload(
    [
        "torch._dynamo",
        "torch.distributed.checkpoint.state_dict",
        "torch.distributed.fsdp",
        "torch.distributed.tensor",
        "hetxl.classifiers.sharded",
    ]
)

CASES: dict[str, tuple[str, str, int, str, dict[str, Any]]] = {
    "det softmax": ("det", "softmax", 11, "ids", {}),
    "det softmax, processes without classes": ("det", "softmax", 3, "ids", {}),
    "samples first": ("het-xl", "softmax", 11, "ids", {"order": "samples"}),
    "factors first": ("het-xl", "softmax", 11, "ids", {"order": "factors", "reduction": "sum"}),
    "fewer classes than labels": ("het-xl", "softmax", 5, "ids", {"reduction": "none"}),
    "processes without classes": ("het-xl", "softmax", 3, "ids", {"class_weight": True}),
    "one class": ("het-xl", "softmax", 1, "ids", {}),
    "low rank": ("het-xl", "softmax", 11, "ids", {"covariance": "low_rank", "shared": True}),
    "diagonal": ("het-xl", "softmax", 11, "ids", {"covariance": "diagonal", "residual": "diagonal"}),
    "det sigmoid": ("det", "sigmoid", 11, "ids", {"class_weight": True}),
    "sigmoid lists": ("het-xl", "sigmoid", 11, "lists", {"order": "samples"}),
    "sigmoid rows": ("het-xl", "sigmoid", 11, "dense", {"order": "factors", "class_weight": True}),
    "sigmoid, processes without classes": ("het-xl", "sigmoid", 5, "lists", {"reduction": "none"}),
}
"""Head, link, K, form of the targets, and what is special."""


class Model(nn.Module):
    """A backbone of one layer with a head over a sharded classifier, or over an nn.Linear with the same values."""

    def __init__(self, variant: str, link: str, classes: int, mesh: DeviceMesh | None, plain: bool, **options: Any):
        super().__init__()
        classifier: nn.Module = ShardedClassifier(D, classes, mesh=mesh, seed=3, dtype=torch.float64)
        if plain:
            values = classifier.state_dict()
            classifier = nn.Linear(D, classes, dtype=torch.float64)
            classifier.load_state_dict({name: values[name] for name in ("weight", "bias")})
        torch.manual_seed(0)
        self.backbone = nn.Linear(D, D, dtype=torch.float64)
        options = {"noise_init": 1.0} | options
        self.head = make(variant, D, classes, link=link, classifier=classifier, **options)

    def forward(self, inputs: Tensor, *args: Any, **options: Any) -> Tensor:
        return self.head(torch.tanh(self.backbone(inputs)), *args, **options)


def setting(name: str, mesh: DeviceMesh | None = None, plain: bool = False) -> tuple[Model, Tensor, Any, dict]:
    """A case: its model, inputs, targets, and the options of its loss; the same in every process."""
    variant, link, classes, form, special = CASES[name]
    built = {key: value for key, value in special.items() if key in ("covariance", "residual")}
    model = Model(variant, link, classes, mesh, plain, **built)
    torch.manual_seed(1)
    inputs = torch.randn(B, D, dtype=torch.float64)
    options: dict[str, Any] = {"weight": torch.rand(B, dtype=torch.float64)}
    options |= {key: special[key] for key in ("order", "reduction") if key in special}
    if "class_weight" in special:
        options["class_weight"] = torch.rand(classes, dtype=torch.float64)
    if model.head.covariance is not None:
        options["noise"] = normals(model.head, *(() if "shared" in special else (B,)), samples=S)
    targets: Any = torch.randint(classes, (B,))
    targets[2] = -100
    if form == "lists":
        targets = LabelLists.from_lists([[0, classes - 1], [], [1], *([index % classes] for index in range(B - 3))])
    elif form == "dense":
        targets = torch.rand(B, classes, dtype=torch.float64)
    return model, inputs, targets, options


def loss_and_gradients(name: str, mesh: DeviceMesh | None = None, plain: bool = False) -> dict[str, Any]:
    """What training a case sees."""
    model, inputs, targets, options = setting(name, mesh, plain)
    inputs.requires_grad_()
    loss = model(inputs, targets, **options)
    (loss * torch.arange(1, B + 1)).sum().backward() if loss.dim() else loss.backward()
    assert inputs.grad is not None
    return {"loss": loss.detach(), "inputs": inputs.grad} | gradients(model)


def run(
    worker: Callable[..., Any], ranks: int, folder: Path, *args: Any, timeout: float = TIMEOUT, lost: int = 0
) -> list[Any]:
    """What a worker answers on each rank; `lost` of them may end without an answer."""
    meeting = f"file://{folder}/{worker.__name__}{ranks}"
    paths = [folder / f"{worker.__name__}{ranks}.{rank}.pt" for rank in range(ranks)]
    processes = [
        PROCESSES.Process(target=_enter, args=(rank, ranks, worker, meeting, paths[rank], timeout, args))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + TIMEOUT
    try:
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                raise TimeoutError(f"{worker.__name__} took more than {TIMEOUT} s")
    finally:
        for process in processes:
            process.kill()
            process.join()
    answers = [torch.load(path, weights_only=False) for path in paths if path.exists()]
    assert len(answers) == ranks - lost
    return answers


def _enter(
    rank: int, ranks: int, worker: Callable[..., Any], meeting: str, path: Path, timeout: float, args: tuple
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=ranks, timeout=timedelta(seconds=timeout)
    )
    torch.save(worker(rank, ranks, *args), path)
    destroy_process_group()


def everything(rank: int, ranks: int, folder: Path) -> dict[str, Any]:
    """Losses and gradients of all cases, traffic, and the checkpoint of four processes on as many as there are."""
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("classes",))
    answers: dict[str, Any] = {}
    if ranks != 3:
        answers["cases"] = {name: loss_and_gradients(name, mesh) for name in CASES}
    if ranks == 4:
        answers["two by two"] = two_by_two()
        answers["bytes"] = {
            (link, classes): bytes_of_a_step(mesh, link, classes) for link in LINKS for classes in SIZES
        }
        save(mesh, folder / "checkpoint")
    dist.barrier()
    answers["loaded"] = load(mesh, folder / "checkpoint")
    if ranks == 3:
        return answers
    answers["draws"] = draws(mesh)
    answers["initial"] = initial(mesh)
    answers["refused"] = refused(mesh) if ranks > 1 else {}
    return answers


LINKS = ("softmax", "sigmoid")
SIZES = (101, 1001)


def bytes_of_a_step(mesh: DeviceMesh, link: str, classes: int) -> tuple[int, int]:
    """What one loss with its gradients hands to collectives after the first few: bytes and calls."""
    model = Model("het-xl", link, classes, mesh, False)
    classifier = model.head.classifier
    assert isinstance(classifier, ShardedClassifier)
    inputs, targets = torch.ones(B, D, dtype=torch.float64), torch.arange(B)
    for _ in range(9):
        classifier.traffic.reset()
        model(inputs, targets, num_samples=S).backward()
    return classifier.traffic.bytes, classifier.traffic.calls


def trained(mesh: DeviceMesh | None) -> Model:
    """A model after three steps with noise of its own."""
    model = Model("het-xl", "softmax", 11, mesh, False)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(4)
    for _ in range(3):
        inputs = torch.randn(B, D, dtype=torch.float64, generator=generator)
        optimiser.zero_grad()
        model(inputs, torch.randint(11, (B,), generator=generator), num_samples=S).backward()
        optimiser.step()
    return model.eval()


def answers_of(model: Model) -> dict[str, Any]:
    """Predictions of a model, and the state of its noise."""
    inputs = torch.linspace(-1, 1, B * D, dtype=torch.float64).view(B, D)
    prediction = model.head.predict(torch.tanh(model.backbone(inputs)), top_k=3, num_samples=16)
    assert prediction.indices is not None
    return {"probs": prediction.probs, "indices": prediction.indices, "draws": model.head.classifier.draws}


def save(mesh: DeviceMesh, path: Path) -> None:
    """Write a checkpoint of a trained model."""
    dcp.save({"model": get_model_state_dict(trained(mesh))}, checkpoint_id=path)


def load(mesh: DeviceMesh | None, path: Path) -> dict[str, Any]:
    """Predictions after the checkpoint of other processes, into other initial values."""
    model = Model("het-xl", "softmax", 11, mesh, False).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    state = {"model": get_model_state_dict(model)}
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(model, state["model"])
    return answers_of(model)


def draws(mesh: DeviceMesh) -> dict[str, Any]:
    """Noise as the generator gives it: two draws in training, two in evaluation mode, and the count."""
    classifier = ShardedClassifier(D, 11, mesh=mesh, seed=5)
    values = [torch.randn(3, generator=classifier.noise_generator()) for _ in range(2)]
    classifier.eval()
    values += [torch.randn(3, generator=classifier.noise_generator()) for _ in range(2)]
    return {"values": torch.stack(values), "count": int(classifier.draws)}


def initial(mesh: DeviceMesh | None) -> dict[str, Any]:
    """Initial values of more classes than a block, and which are here."""
    classifier = ShardedClassifier(2, 2500, mesh=mesh, seed=1)
    weight, bias = (getattr(value, "full_tensor", lambda value=value: value)() for value in classifier.parameters())
    return {"weight": weight.detach(), "bias": bias.detach(), "classes": classifier.classes}


def refused(mesh: DeviceMesh) -> dict[str, str]:
    """What a head over several processes refuses, and how."""
    head = make("het-xl", D, 11, classifier=ShardedClassifier(D, 11, mesh=mesh, dtype=torch.float64))
    features, ids = torch.ones(B, D, dtype=torch.float64), torch.zeros(B, dtype=torch.int64)
    other = features * (1 + dist.get_rank())
    calls = {
        "rows": lambda: head.loss(features, torch.ones(B, 11, dtype=torch.float64) / 11),
        "smoothing": lambda: head.loss(features, ids, label_smoothing=0.1),
        "method": lambda: head.predict(features, method="mean_field"),
        "log-probabilities": lambda: head(features),
        "other features": lambda: head.loss(other, ids),
        "other labels": lambda: head.loss(features, ids + dist.get_rank()),
        "other noise": lambda: head.loss(
            features, ids, generator=torch.Generator().manual_seed(dist.get_rank()), num_samples=2
        ),
        "device": lambda: ShardedClassifier(D, 11, mesh=mesh, device="cuda"),
    }
    messages = {}
    for name, call in calls.items():
        try:
            call()
        except (ValueError, RuntimeError) as error:
            messages[name] = f"{type(error).__name__}: {error}"
    return messages


def two_by_two() -> dict[str, Any]:
    """Data × classes with FSDP2 over the data: gradients of each case, and the noise of the replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "classes"))
    replica = mesh["data"].get_local_rank()
    half = slice(replica * B // 2, (replica + 1) * B // 2)
    answers: dict[str, Any] = {}
    for name in ("det softmax", "samples first", "sigmoid rows"):
        model, inputs, targets, options = setting(name, mesh["classes"])
        fully_shard(model.head, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
        del options["weight"]  # a weighted mean of halves is not that of the whole
        if "noise" in options:
            options["noise"] = options["noise"][half]
        model(inputs[half], targets[half].clamp(min=0), **options).backward()
        answers[name] = gradients(model)
        answers[f"{name} norm"] = total_norm(model)
        register_fsdp_forward_method(model.head, "predict")
        features = torch.linspace(-1, 1, B * D, dtype=torch.float64).view(B, D)
        predicted = model.head.predict(features, top_k=2, num_samples=4)
        answers[f"{name} predicted"] = predicted.probs, predicted.covariance
        try:
            model.head.classifier.affine()
        except RuntimeError as error:
            answers["not gathered"] = str(error)
    classifier = ShardedClassifier(D, 11, mesh=mesh["classes"])
    answers["noise"] = torch.randn(3, generator=classifier.noise_generator())
    answers["stream"] = classifier.stream
    try:
        ShardedClassifier(D, 11, mesh=mesh)
    except ValueError as error:
        answers["mesh of two dimensions"] = str(error)
    return answers


def total_norm(model: Model) -> Tensor:
    """The norm of all gradients, from those of the classifier and of the rest, which are on other meshes."""
    own = list(model.head.classifier.parameters())
    rest = [parameter for parameter in model.parameters() if all(parameter is not other for other in own)]
    norms = (torch.nn.utils.get_total_norm([parameter.grad for parameter in part]) for part in (own, rest))
    return torch.stack([norm.full_tensor() for norm in norms]).norm()


def example(rank: int, ranks: int, out: Path, steps: int, every: int) -> None:
    """The example of sharded classes, from the start to its end."""
    mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("data", "classes"))
    out.mkdir(exist_ok=True)
    load_example().train(mesh, out, steps, every)
