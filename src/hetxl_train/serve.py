"""`hetxl serve` and `hetxl demo`: serve predictions of a run over HTTP. Concurrent requests are computed in one batch.

Needs the extra `serve`: FastAPI and uvicorn.
"""

import asyncio
import base64
import binascii
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from hetxl._checks import needing
from hetxl_train.data.dataset import InputSpec
from hetxl_train.data.open import open_encoded
from hetxl_train.data.text import PADDING
from hetxl_train.prediction import Predictor

if TYPE_CHECKING:
    from fastapi import FastAPI

    from hetxl_train.similar_examples import SimilarExamples


@dataclass(frozen=True)
class Limits:
    """Limits of a server."""

    batch: int = 64  # maximum examples per batch
    wait: float = 0.001  # seconds to wait for a batch to fill, again as long as requests arrive
    rows: int = 256  # maximum examples per request
    queue: int = 4096  # maximum number of waiting examples
    megabytes: float = 20.0  # maximum size of a request
    seconds: float = 30.0  # maximum seconds to receive a request, and to answer it


TAKEN = {"features": ["features"], "tokens": ["tokens", "texts"], "text": ["texts"], "image": ["images"]}
"""The fields of a request, by the kind of training data."""

PAUSES = 8
"""Maximum number of waits for a batch to fill."""

DRAINED = 16
"""A body of up to this many times the maximum is read and discarded before the connection is closed."""


class RequestError(Exception):
    """A failed request, with its status code and a one-line reason."""

    def __init__(self, status: int, reason: str):
        super().__init__(reason)
        self.status, self.reason = status, reason


class Batcher:
    """Collect the inputs of requests, compute them together in a thread, and return each request its results.

    Equivalent to `compute(inputs)` for each request, with fewer calls.
    """

    def __init__(self, compute: Callable[[Tensor], list[Any]], limits: Limits):
        self.compute, self.limits = compute, limits
        self.waiting: deque[tuple[Tensor, asyncio.Future[list[Any]]]] = deque()
        self.arrived = asyncio.Event()
        self.queued = self.batches = self.examples = 0

    async def __call__(self, inputs: Tensor) -> list[Any]:
        """Return the n results of inputs [n, ...] within the time limit."""
        if self.queued + len(inputs) > self.limits.queue:
            raise RequestError(503, f"{self.queued:,} examples are waiting already; try again later")
        future: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self.waiting.append((inputs, future))
        self.queued += len(inputs)
        self.arrived.set()
        try:
            return await asyncio.wait_for(future, self.limits.seconds)
        except asyncio.TimeoutError:
            raise RequestError(503, f"no answer within {self.limits.seconds:g} seconds; try again later") from None

    async def run(self) -> None:
        """Compute batches until cancelled."""
        while True:
            await self.arrived.wait()
            await self._gather()
            batch = self._take()
            if batch:
                await self._answer(batch)
            if not self.waiting:
                self.arrived.clear()

    async def _gather(self) -> None:
        """Wait while requests arrive, `PAUSES` times at most, so that concurrent requests share a batch."""
        queued = 0
        for _ in range(PAUSES):
            if not queued < self.queued < self.limits.batch:
                break
            queued = self.queued
            await asyncio.sleep(self.limits.wait)

    def _take(self) -> list[tuple[Tensor, "asyncio.Future[list[Any]]"]]:
        """Return the requests of the next batch, except those whose client has disconnected."""
        batch, count = [], 0
        while self.waiting and (not batch or count + len(self.waiting[0][0]) <= self.limits.batch):
            inputs, future = self.waiting.popleft()
            self.queued -= len(inputs)
            if not future.done():
                batch.append((inputs, future))
                count += len(inputs)
        return batch

    async def _answer(self, batch: list[tuple[Tensor, "asyncio.Future[list[Any]]"]]) -> None:
        try:
            inputs = joined([part for part, _ in batch])
            results = await asyncio.to_thread(self.compute, inputs)
        except Exception as error:  # a failed batch must not stop the server
            for _, future in batch:
                if not future.done():
                    future.set_exception(RequestError(500, f"{type(error).__name__}: {error}"))
            return
        self.batches, self.examples, start = self.batches + 1, self.examples + len(inputs), 0
        for part, future in batch:
            if not future.done():
                future.set_result(results[start : start + len(part)])
            start += len(part)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Return the inputs of several requests as one batch; texts are padded to the longest."""
    width = max(part.shape[-1] for part in parts)
    return torch.cat([F.pad(part, (0, width - part.shape[-1]), value=PADDING) for part in parts])


class Answers:
    """Turn inputs [n, ...] of a run into records, with similar training examples if available."""

    def __init__(self, predictor: Predictor, neighbours: "SimilarExamples | None" = None):
        self.predictor, self.neighbours = predictor, neighbours

    @torch.no_grad()
    def __call__(self, inputs: Tensor) -> list[dict[str, Any]]:
        """Return a record for each input; the caller numbers the rows of a request."""
        predictor = self.predictor
        features = predictor.trained.model.backbone(inputs.to(predictor.device)).float()
        records = predictor.records(features, np.arange(len(inputs)), [None] * len(inputs))
        if self.neighbours is not None:
            for record, nearest in zip(records, self.neighbours.nearest(features), strict=True):
                record["nearest"] = nearest
        return records


def features_tensor(values: Sequence[Any], spec: InputSpec, limits: Limits) -> Tensor:
    """Return the numbers of a request as input of a run, [n, ...]: features float32 or tokens int64."""
    name, dtype = ("tokens", np.int64) if spec.kind == "tokens" else ("features", np.float32)
    check_rows(len(values), limits)
    try:
        array = np.asarray(values, dtype=np.float64)
    except (ValueError, TypeError, OverflowError):
        raise RequestError(422, f"{name} must be a list of rows of numbers, all of one length") from None
    if array.shape[1:] != tuple(spec.shape):
        expected = ", ".join(map(str, ("n", *spec.shape)))
        raise RequestError(422, f"{name} must have shape [{expected}], found {list(array.shape)}")
    with np.errstate(over="ignore"):
        converted = array.astype(dtype) if spec.kind != "tokens" or np.isfinite(array).all() else np.full(1, -1)
    if spec.kind == "tokens" and not ((converted >= 0) & (converted < spec.vocabulary)).all():
        raise RequestError(422, f"tokens must be from 0 to {spec.vocabulary - 1}")
    if not np.isfinite(converted).all():
        row = int((~np.isfinite(converted)).reshape(len(converted), -1).any(1).argmax())
        raise RequestError(422, f"features must be finite in float32, row {row} is not")
    return torch.from_numpy(converted)


def images_tensor(images: Sequence[bytes], spec: InputSpec, limits: Limits) -> Tensor:
    """Return images from the contents of their files as input of a run, [n, C, H, W]."""
    check_rows(len(images), limits)
    fetched = open_encoded(images, spec).fetch(np.arange(len(images)))
    if fetched.unreadable:
        first = fetched.unreadable[0]
        raise RequestError(422, f"{first.path} could not be read: {first.reason}")
    return fetched.inputs


def check_rows(count: int, limits: Limits) -> None:
    """Raise for requests without examples, or with too many."""
    if not 1 <= count <= limits.rows:
        raise RequestError(422, f"a request must have 1 to {limits.rows:,} examples, found {count:,}")


def texts_tensor(texts: Sequence[str], predictor: Predictor, limits: Limits) -> Tensor:
    """Return texts as input of a run, token ids [n, L]."""
    check_rows(len(texts), limits)
    assert predictor.encode is not None
    return predictor.encode(texts)


def decoded(images: Sequence[str]) -> list[bytes]:
    """Decode base64 images, with or without a data: prefix."""
    try:
        return [base64.b64decode(text.partition(",")[2] or text, validate=True) for text in images]
    except (binascii.Error, ValueError):
        raise RequestError(422, "images must be image files encoded in base64") from None


class Traffic:
    """Counters for the endpoint /metrics."""

    def __init__(self, batcher: Batcher):
        self.batcher, self.seconds = batcher, 0.0
        self.requests: Counter[int] = Counter()

    def text(self) -> str:
        """Return the counters in the format of Prometheus."""
        lines = ["# TYPE hetxl_requests_total counter"]
        lines += [
            f'hetxl_requests_total{{status="{status}"}} {count}' for status, count in sorted(self.requests.items())
        ]
        values = {
            "hetxl_request_seconds_total counter": f"{self.seconds:.6f}",
            "hetxl_examples_total counter": self.batcher.examples,
            "hetxl_batches_total counter": self.batcher.batches,
            "hetxl_queued_examples gauge": self.batcher.queued,
        }
        for name, value in values.items():
            lines += [f"# TYPE {name}", f"{name.partition(' ')[0]} {value}"]
        return "\n".join(lines) + "\n"


class Guard:
    """ASGI middleware that reads the body of a request within the limits, and counts requests."""

    def __init__(self, app: Any, limits: Limits, traffic: Traffic):
        self.app, self.limits, self.traffic = app, limits, traffic
        self.most = int(limits.megabytes * 1e6)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begin, status = time.perf_counter(), 500
        messages: list[Any] = []

        async def replayed() -> Any:
            return messages.pop() if messages else await receive()

        async def noted(message: Any) -> None:
            nonlocal status
            status = message.get("status", status)
            await send(message)

        try:
            messages.append({"type": "http.request", "body": await self._body(receive)})
            await self.app(scope, replayed, noted)
        except RequestError as refused:
            await _refuse(refused, noted)
        finally:
            self.traffic.requests[status] += 1
            self.traffic.seconds += time.perf_counter() - begin

    async def _body(self, receive: Any) -> bytes:
        """Return the body of a request; raise if it is too large or takes too long."""
        parts: list[bytes] = []
        size, more, end = 0, True, time.monotonic() + self.limits.seconds
        while more:
            try:
                message = await asyncio.wait_for(receive(), end - time.monotonic())
            except asyncio.TimeoutError:
                raise RequestError(408, f"the request did not arrive within {self.limits.seconds:g} seconds") from None
            more, part = message.get("more_body", False), message.get("body", b"")
            size += len(part)
            # A client does not read the answer while it sends, so a slightly too large body is read to its end.
            if size > DRAINED * self.most:
                break
            if size <= self.most:
                parts.append(part)
        if size > self.most:
            raise RequestError(413, f"a request must have at most {self.limits.megabytes:g} MB")
        return b"".join(parts)


async def _refuse(refused: RequestError, send: Any) -> None:
    from starlette.responses import JSONResponse

    async def nothing() -> Any:
        return {"type": "http.disconnect"}

    response = JSONResponse({"detail": refused.reason}, refused.status, headers={"connection": "close"})
    await response({"type": "http"}, nothing, send)


def build_app(
    predictor: Predictor,
    limits: Limits | None = None,
    *,
    demo: bool = False,
    neighbours: "SimilarExamples | None" = None,
) -> "FastAPI":
    """Return the ASGI application of a run; with `demo` its front page is the page of `hetxl demo`."""
    with needing("serving needs FastAPI and uvicorn", "'hetxl[serve]'"):
        from fastapi import FastAPI, Request
        from fastapi.responses import HTMLResponse, JSONResponse, PlainTextResponse
        from pydantic import BaseModel, ConfigDict

    limits = limits or Limits()
    predictor.skip_invalid = True  # an input that gives NaN must not fail the others of its batch
    trained, spec = predictor.trained, predictor.trained.spec
    taken = TAKEN[spec.kind]
    batcher = Batcher(Answers(predictor, neighbours), limits)
    traffic = Traffic(batcher)

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        task = asyncio.create_task(batcher.run())
        yield
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task

    app = FastAPI(title="hetxl", description=f"Predictions of {trained.run.path.name}", lifespan=lifespan)

    class Inputs(BaseModel):
        """One of the lists, of the kind of the training data."""

        model_config = ConfigDict(extra="forbid")
        features: list[list[float]] | None = None
        tokens: list[list[int]] | None = None
        texts: list[str] | None = None
        images: list[str] | None = None  # image files encoded in base64

    class Record(BaseModel):
        """The record that `hetxl predict` writes for an example; `--coverage` and `--risk` add entries."""

        row: int
        top: list[tuple[str, float]]  # classes with their probabilities, most probable first
        entropy: float  # in nats
        from_noise: float  # the part of it that the noise explains
        confused_with: str | None
        correlation: float | None  # of the noise of the first two classes

    class Predictions(BaseModel):
        """A record for each example."""

        predictions: list[Record]

    reasons = {408: "did not arrive in time", 413: "is too large", 422: "is malformed", 503: "was not answered in time"}
    documented: dict[str, Any] = {
        "response_model": Predictions,
        "responses": {status: {"description": f"The request {reason}"} for status, reason in reasons.items()},
    }

    async def answer(inputs: Tensor) -> JSONResponse:
        """Return the records unchanged; the models above are only documentation, which avoids a second pass."""
        records = await batcher(inputs)
        invalid = [str(row) for row, record in enumerate(records) if record["top"][0][0] is None]
        if invalid:
            raise RequestError(422, f"features or probabilities of row {', '.join(invalid[:5])} are NaN or infinite")
        return JSONResponse({"predictions": [record | {"row": row} for row, record in enumerate(records)]})

    @app.exception_handler(RequestError)
    async def refuse(_: Any, error: RequestError) -> JSONResponse:
        return JSONResponse({"detail": error.reason}, error.status)

    @app.post("/predict", **documented)
    async def predict(inputs: Inputs) -> JSONResponse:
        """Predict the examples of a list."""
        name, *others = inputs.model_fields_set or [""]
        values = getattr(inputs, name, None)
        if values is None or others or name not in taken:
            sent = " or ".join(f'{{"{field}": […]}}' for field in taken)
            raise RequestError(422, f"the run takes {' or '.join(taken)}: send {sent} and nothing else")
        if name == "texts":
            return await answer(await asyncio.to_thread(texts_tensor, values, predictor, limits))
        if name != "images":
            return await answer(features_tensor(values, spec, limits))
        check_rows(len(values), limits)
        return await answer(await asyncio.to_thread(images_tensor, decoded(values), spec, limits))

    binary = {"content": {"image/*": {"schema": {"type": "string", "format": "binary"}}}, "required": True}

    @app.post("/predict/image", **documented, openapi_extra={"requestBody": binary})
    async def predict_image(request: Request) -> JSONResponse:
        """Predict one image: the request's body is the content of its file."""
        if spec.kind != "image":
            raise RequestError(422, f"the run takes {' or '.join(taken)}, not images: use /predict")
        return await answer(await asyncio.to_thread(images_tensor, [await request.body()], spec, limits))

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/metrics", response_class=PlainTextResponse)
    def metrics() -> str:
        return traffic.text()

    @app.get("/model")
    def model() -> dict[str, Any]:
        config = trained.run.config
        about = {"run": trained.run.path.name, "head": config.head, "data": config.data, "link": trained.link}
        about |= {"input": {"kind": spec.kind, "shape": list(spec.shape)}, "classes": len(trained.class_names)}
        return about | {"calibrated": predictor.calibration is not None}

    if demo:
        page = demo_page(predictor)

        @app.get("/", response_class=HTMLResponse, include_in_schema=False)
        def front() -> str:
            return page

    app.add_middleware(Guard, limits=limits, traffic=traffic)
    return app


def demo_page(predictor: Predictor) -> str:
    """Return the demo page of a run."""
    from hetxl_train.report.render import read_script, render

    trained = predictor.trained
    facts = [
        f"{trained.run.config.head.upper()} head",
        f"{len(trained.class_names):,} classes",
        trained.run.config.data,
    ]
    kind, count = trained.spec.kind, trained.spec.shape[0]
    asked = {"tokens": "The text before the token to predict", "text": "A text"}
    asked["features"] = f"{count:,} features, separated by commas or spaces"
    about = {"title": trained.run.path.name, "facts": facts, "kind": kind, "asked": asked.get(kind)}
    return render("demo.html", **about, **read_script("demo.js"))


def serve(
    run: str | Path, *, host: str = "127.0.0.1", port: int = 8000, limits: Limits | None = None, demo: bool = False,
    ready: Callable[[str], None] = print, **options: Any,
) -> None:  # fmt: skip
    """Serve a run until interrupted.

    Args:
        demo: also serve the demo page, and search similar training examples.
        ready: function that is called with the address when the server listens.
        **options: options of `Predictor`.
    """
    predictor, neighbours = Predictor(run, **options), None
    if demo:
        from hetxl_train.similar_examples import SimilarExamples

        neighbours = SimilarExamples.of_run(predictor)
    app = build_app(predictor, limits, demo=demo, neighbours=neighbours)
    import uvicorn

    class Server(uvicorn.Server):
        async def startup(self, sockets: Any = None) -> None:
            await super().startup(sockets)
            if self.servers:
                ready(f"http://{host}:{self.servers[0].sockets[0].getsockname()[1]}")

    Server(uvicorn.Config(app, host=host, port=port, log_level="warning", timeout_keep_alive=5)).run()
