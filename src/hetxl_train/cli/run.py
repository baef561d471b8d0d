"""The commands for trained runs: `evaluate`, `predict`, `calibrate`, `export`, `push`, `rescale` and `report`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from hetxl_train.cli.commands import argument, optional

RunArgument = Annotated[str, argument("Run directory.")]
Method = Annotated[
    str, typer.Option(help="How probabilities are computed: mc, deterministic, mean_field, probit or taylor.")
]
Samples = Annotated[int | None, optional("Number of Monte Carlo samples [as trained].")]
ExportSamples = Annotated[
    int | None,
    typer.Option("--num-samples", "--samples", help="Number of Monte Carlo samples [as trained].", show_default=False),
]
Target = Annotated[
    str, typer.Option(help="observed: predict labels with their errors, as in training; clean: predict the true class.")
]
Device = Annotated[str, typer.Option(help="cpu, cuda, mps, …; auto uses an accelerator if one is available.")]


def evaluate(
    run: RunArgument,
    data: Annotated[str | None, argument("Other data with labels [the run's own].")] = None,
    *,
    split: Annotated[str, typer.Option(help="Split to evaluate: train, validation or test.")] = "test",
    labels: Annotated[str | None, optional("File with the labels of DATA.")] = None,
    method: Method = "mc",
    num_samples: Samples = None,
    target: Target = "observed",
    examples: Annotated[int, typer.Option(help="Maximum number of examples; 0: all.")] = 0,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Evaluate a run on its test split, or on other data of the same classes."""
    from rich.console import Console

    from hetxl_train.evaluate_runs import evaluate_run
    from hetxl_train.report.tables import as_rich, text_table

    options = {"method": method, "num_samples": num_samples, "target": target, "limit": examples, "device": device}
    metrics = evaluate_run(run, data, split=split, labels=labels, **options)
    if as_json:
        typer.echo(json.dumps(metrics, indent=2))
        return
    rows = [(name, "–" if value is None else f"{value:,.4g}") for name, value in metrics.items()]
    Console().print(as_rich(text_table(f"{run} on {data or split}", ("metric", "value"), rows)))


def predict(
    run: RunArgument,
    inputs: Annotated[str, argument("Path to arrays, an image, a folder or a table.", metavar="INPUT")],
    *,
    out: Annotated[Path, optional("File to write: .csv, .jsonl or .parquet.")],
    top_k: Annotated[int, typer.Option(help="Number of classes for each input.")] = 5,
    method: Method = "mc",
    num_samples: Samples = None,
    target: Target = "observed",
    coverage: Annotated[
        float | None, optional("Add prediction sets, calibrated by hetxl calibrate --coverage.")
    ] = None,
    risk: Annotated[float | None, optional("Add answers, calibrated by hetxl calibrate --risk.")] = None,
    seed: Annotated[int, typer.Option(help="Seed for the noise samples.")] = 0,
    workers: Annotated[int, typer.Option(help="Number of processes that decode images.")] = 2,
    skip_invalid: Annotated[
        bool,
        typer.Option(
            "--skip-invalid", help="Write empty rows for NaN or infinite features instead of raising an error."
        ),
    ] = False,
    device: Device = "auto",
) -> None:
    """Write the most probable classes of new inputs, with their uncertainty.

    Each row has the top classes with their probabilities, the entropy, and the class that the first is confused with.
    """
    from hetxl_train.prediction import predict as run_prediction

    options = {"method": method, "num_samples": num_samples, "target": target, "seed": seed}
    options |= {"coverage": coverage, "risk": risk, "skip_invalid": skip_invalid}
    written = run_prediction(run, inputs, out, top_k=top_k, workers=workers, device=device, **options)
    typer.echo(f"Wrote {written:,} rows to {out}")


def calibrate(
    run: RunArgument,
    data: Annotated[str | None, argument("Labelled data that the run has not seen [its validation split].")] = None,
    *,
    coverage: Annotated[float | None, optional("Coverage of prediction sets, such as 0.9 [no sets].")] = None,
    score: Annotated[str, typer.Option(help="Score that ranks the classes of a set: lac, aps or raps.")] = "raps",
    grouping: Annotated[
        str, typer.Option(help="Coverage holds over all examples (marginal), per class, or per cluster (clustered).")
    ] = "marginal",
    risk: Annotated[float | None, optional("Maximum error rate of answers, such as 0.05 [no answers].")] = None,
    precision: Annotated[
        float | None, optional("Several labels per example: precision of each label [thresholds of best F1].")
    ] = None,
    labels: Annotated[str | None, optional("File with the labels of DATA.")] = None,
    device: Device = "auto",
) -> None:  # fmt: skip
    """Calibrate prediction sets and answers with a guarantee.

    Prediction sets contain the label with probability --coverage. Answers are wrong with probability --risk at most;
    other examples get no answer. Writes calibration.json into RUN, for hetxl predict --coverage and --risk.
    """
    from hetxl_train.calibration import calibrate_run

    options = {"coverage": coverage, "score": score, "grouping": grouping, "risk": risk, "precision": precision}
    about = calibrate_run(run, data, labels=labels, device=device, **options)
    typer.echo(f"Calibrated on {about['examples']:,} examples ({about['data']})")
    if test := about.get("test"):
        typer.echo(f"Test split: coverage {test['coverage']:.1%}, mean set size {test['set_size']:.2f}")
    if risk is not None:
        typer.echo(f"At risk {risk:g}, {about['answered']:.1%} of the examples get an answer")


def export(
    run: RunArgument,
    *,
    to: Annotated[
        str, typer.Option(help="Format: onnx, torch (torch.export), or head (only the head's weights).")
    ] = "onnx",
    method: Annotated[
        str | None, optional("How probabilities are computed: mc, deterministic, mean_field, probit or taylor [mc].")
    ] = None,
    num_samples: ExportSamples = None,
    top_k: Annotated[int | None, optional("Return only this many most probable classes, with their ids [all].")] = None,
    out: Annotated[Path | None, optional("File to write [model.onnx, model.pt2 or head.safetensors in RUN].")] = None,
    seed: Annotated[int | None, optional("Seed for the fixed noise samples of mc [0].")] = None,
    uncertainty: Annotated[
        bool | None,
        typer.Option(
            "--uncertainty/--no-uncertainty",
            help="Also return entropies, top classes and prediction sets [onnx: yes, torch: no].",
            show_default=False,
        ),
    ] = None,
    novelty: Annotated[
        bool, typer.Option("--novelty", help="Also return a novelty score; this reads the run's training data.")
    ] = False,
) -> None:
    """Write a trained model to one file: ONNX, torch.export, or the head alone."""
    from hetxl.profiling.parameters import format_bytes
    from hetxl_train.export_run import export_run

    options = {"method": method, "num_samples": num_samples, "top_k": top_k, "seed": seed, "uncertainty": uncertainty}
    written = export_run(run, to, out=out, novelty=novelty, **options)
    typer.echo(f"{written.path}: {format_bytes(written.size)}, {written.what}")
    if written.preprocess is not None:
        typer.echo(f"{written.preprocess}: converts an image [height, width, 3] uint8 to the model's input")
    if written.difference is None:
        typer.echo("Not verified. Run pip install onnxruntime to compare its output with that of predict.", err=True)
    else:
        how = f"differ by at most {written.difference:.0e} from" if written.difference else "are equal, to the bit, to"
        typer.echo(f"Verified: its probabilities {how} those of predict")


def push(
    run: RunArgument,
    name: Annotated[str, argument("Repository, as owner/name; or a directory, as ./name or /path/name.")],
    *,
    private: Annotated[
        bool | None, optional("Make a new repository private or public [the account's default].")
    ] = None,
    license: Annotated[str | None, optional("License for the model card, such as apache-2.0 [none].")] = None,
) -> None:
    """Save a run with a model card to the Hugging Face hub, or to a directory.

    Examples of the data, the log and the checkpoints are not uploaded. To log in, run hf auth login (huggingface_hub).
    """
    from hetxl_train.hub import push_to_hub

    typer.echo(f"Saved to {push_to_hub(run, name, private=private, license=license)}")


def rescale(
    run: RunArgument,
    *,
    validation: Annotated[str | None, optional("Labelled data to fit to [the run's validation split].")] = None,
    out: Annotated[Path | None, optional("Directory of the new run [RUN-scaled].")] = None,
    noise: Annotated[bool, typer.Option(help="Also fit the scale of the noise.")] = True,
    device: Device = "auto",
) -> None:
    """Fit τ and the noise scale of a trained run to labels that you trust, and save the result as a new run."""
    from hetxl_train.rescale import rescale_run

    typer.echo(str(rescale_run(run, out, validation=validation, noise=noise, device=device).path))


def report(
    runs: Annotated[list[str], argument("Directories of runs or comparisons.")],
    *,
    out: Annotated[Path | None, optional("File to write [report.html in the first directory].")] = None,
) -> None:
    """Write report.html: one file with all plots and tables of the runs."""
    from rich.console import Console

    from hetxl_train.formatting import printable
    from hetxl_train.report import as_rich, compare_table, find_runs, write_report

    read_runs = find_runs(runs)
    path = write_report(
        read_runs, out or Path(runs[0]) / "report.html"
    )  # first, because printing the table can fail in a terminal with a small character set
    Console().print(as_rich(compare_table(read_runs)))
    for run in read_runs:
        for problem in (problem for problem in run.problems if not problem.endswith("is missing")):
            typer.echo(printable(f"{run.path}: {problem}"), err=True)
    typer.echo(f"Report: {path}")
