"""`hetxl serve` and `hetxl demo`."""

from typing import Annotated, Any

import typer

from hetxl_train.cli.commands import optional
from hetxl_train.cli.run import Device, Method, RunArgument, Samples, Target

Host = Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: all network interfaces.")]
Port = Annotated[int, typer.Option(help="Port to listen on; 0: any free port.", min=0, max=65535)]
TopK = Annotated[int, typer.Option(help="Number of classes for each input.", min=1)]
Coverage = Annotated[float | None, optional("Add prediction sets, calibrated by hetxl calibrate --coverage.")]
Risk = Annotated[float | None, optional("Add answers, calibrated by hetxl calibrate --risk.")]


def serve(
    run: RunArgument,
    *,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    top_k: TopK = 5,
    method: Method = "mc",
    num_samples: Samples = None,
    target: Target = "observed",
    coverage: Coverage = None,
    risk: Risk = None,
    max_batch: Annotated[int, typer.Option(help="Maximum number of examples in a batch.", min=1)] = 64,
    max_wait: Annotated[float, typer.Option(help="Milliseconds to wait for a batch to fill.", min=0)] = 2.0,
    max_rows: Annotated[int, typer.Option(help="Maximum number of examples in a request.", min=1)] = 256,
    max_size: Annotated[float, typer.Option(help="Maximum size of a request in megabytes.", min=0.001)] = 20.0,
    timeout: Annotated[
        float, typer.Option(help="Maximum seconds to receive a request, and to answer it.", min=0.1)
    ] = 30.0,
    device: Device = "auto",
) -> None:
    """Serve predictions of a run over HTTP.

    POST /predict takes JSON: {"features": [[…]]}, {"texts": ["…"]} or {"images": ["base64"]}. POST /predict/image takes
    the content of an image file. GET /health, /metrics (Prometheus), /model and /docs (OpenAPI) describe the server.
    Requires pip install 'hetxl[serve]'.
    """
    from hetxl_train.serve import Limits

    limits = Limits(batch=max_batch, wait=max_wait / 1000, rows=max_rows, megabytes=max_size, seconds=timeout)
    predicted = {"top_k": top_k, "method": method, "num_samples": num_samples, "target": target, "device": device}
    _serve(run, host=host, port=port, limits=limits, coverage=coverage, risk=risk, **predicted)


def demo(
    run: RunArgument,
    *,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    top_k: TopK = 5,
    target: Target = "observed",
    coverage: Coverage = None,
    risk: Risk = None,
    device: Device = "auto",
) -> None:
    """Try a run on a local page in the browser.

    Drop an image, or type a text or features. The page shows the prediction, its uncertainty, the class that it is
    confused with, and the nearest training examples. Requires pip install 'hetxl[serve]'.
    """
    predicted = {"top_k": top_k, "target": target, "coverage": coverage, "risk": risk, "device": device}
    _serve(run, host=host, port=port, demo=True, **predicted)


def _serve(run: str, **options: Any) -> None:
    from hetxl_train.serve import serve as run_server

    run_server(run, ready=lambda address: typer.echo(f"Serving {run} on {address} (Ctrl-C to stop)"), **options)
