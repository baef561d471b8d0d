"""Bayesian optimisation of τ with an optuna study on disk, which several machines can share.

Every trial of the study is a run. Several trials are suggested and run in parallel, and their results are stored in the
study. A search resumes its own trials after it was killed.
"""

import importlib.util
import json
import uuid
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from hetxl._checks import integer_at_least, needing, one_of
from hetxl._files import read_json, write_json
from hetxl._seeds import derive_seed

LOW, HIGH = 0.05, 5.0
"""The range of τ, as in the paper."""
SAMPLERS = ("auto", "gp", "tpe")
PARAMETER = "temperature"


class Asked(NamedTuple):
    """A suggested trial: its number, over all machines, and its τ."""

    number: int
    temperature: float


def require_optuna() -> Any:
    """Import optuna, or raise an error that says how to install it."""
    with needing("--method bayes needs optuna", "optuna scipy"):
        import optuna
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def open_storage(storage: str | None, default: Path) -> Any:
    """Return the storage of a study: a journal file [default: `default`], or any other storage of optuna.

    redis://… is a journal in Redis, grpc://HOST:PORT a proxy; other URLs, such as sqlite:///study.db, are databases.
    """
    optuna = require_optuna()
    text = str(default) if storage is None else storage
    if text.startswith(("redis://", "rediss://")):
        return optuna.storages.JournalStorage(optuna.storages.journal.JournalRedisBackend(text))
    if text.startswith("grpc://"):
        host, _, port = text.removeprefix("grpc://").partition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"--storage grpc://HOST:PORT expected, found {text!r}")
        return optuna.storages.GrpcStorageProxy(host=host, port=int(port))
    if "://" in text:
        try:
            return optuna.storages.RDBStorage(text)
        except Exception as error:  # databases raise different errors
            raise ValueError(f"--storage {text!r} cannot be used: {' '.join(str(error).split())[:300]}") from None
    Path(text).parent.mkdir(parents=True, exist_ok=True)
    return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(text))


class Bayes:
    """A search for the τ with the lowest validation NLL, in a storage of `open_storage`.

    Args:
        directory: directory of this machine's part of the search.
        about: options that all trials share; a study with other options raises an error.
        sampler: "gp", "tpe", or "auto", a Gaussian process if scipy is installed.
    """

    def __init__(
        self,
        directory: Path,
        name: str,
        about: Mapping[str, Any],
        *,
        storage: str | None = None,
        sampler: str = "auto",
        seed: int = 0,
    ):
        one_of("sampler", sampler, SAMPLERS)
        self.optuna = require_optuna()
        self.kind = sampler if sampler != "auto" else "gp" if importlib.util.find_spec("scipy") else "tpe"
        if self.kind == "gp" and importlib.util.find_spec("scipy") is None:
            raise ImportError("sampler = gp needs scipy; install it, or choose tpe")
        self.seed = seed
        # The identity of this search in a shared study, which a resumed search keeps.
        identity = directory / "owner.json"
        if not identity.exists():
            directory.mkdir(parents=True, exist_ok=True)
            write_json(identity, {"owner": uuid.uuid4().hex})
        self.owner = str(read_json(identity)["owner"])
        self.study = self.optuna.create_study(
            storage=open_storage(storage, directory / "study.journal"),
            study_name=name,
            direction="minimize",
            load_if_exists=True,
        )
        text = json.dumps(about, sort_keys=True)
        known = self.study.user_attrs.get("about")
        if known is None:
            self.study.set_user_attr("about", text)
        elif known != text:
            differing = differences(json.loads(known), json.loads(text))
            raise ValueError(
                f"study {name!r} in its storage has other options ({next(iter(differing), 'the same options')}); "
                "choose another --storage or --out"
            )

    def count(self) -> int:
        """Return the number of trials on all machines, including running ones."""
        return sum(PARAMETER in trial.params for trial in self.study.get_trials(deepcopy=False))

    def unfinished(self) -> list[Asked]:
        """Return the unfinished trials of this search, left by a killed process."""
        running = self.optuna.trial.TrialState.RUNNING
        return [
            Asked(trial.number, float(trial.params[PARAMETER]))
            for trial in self.study.get_trials(deepcopy=False, states=(running,))
            if trial.user_attrs.get("owner") == self.owner and PARAMETER in trial.params
        ]

    def ask(self, count: int) -> list[Asked]:
        """Suggest new values of τ."""
        integer_at_least("count", count, 1)
        # A different seed for every call, so that a resumed search does not repeat suggestions.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings about experimental samplers
            samplers = self.optuna.samplers
            kind: Callable[..., Any] = samplers.GPSampler if self.kind == "gp" else samplers.TPESampler
            self.study.sampler = kind(seed=derive_seed(self.seed, self.count()) % 2**31, n_startup_trials=count)
            suggestions = []
            for _ in range(count):
                trial = self.study.ask()
                trial.set_user_attr("owner", self.owner)
                suggestions.append(Asked(trial.number, trial.suggest_float(PARAMETER, LOW, HIGH, log=True)))
        return suggestions

    def tell(self, number: int, nll: float | None, **attributes: Any) -> None:
        """Store the NLL of a trial; None if it failed."""
        state = self.optuna.trial.TrialState
        # Stored with the study, because a resumed trial has no trial object.
        self.study.set_user_attr(f"trial {number}", attributes)
        self.study.tell(number, nll, state=state.FAIL if nll is None else state.COMPLETE, skip_if_finished=True)

    def trials(self) -> list[dict[str, Any]]:
        """Return all finished trials on all machines, sorted by number."""
        attributes = self.study.user_attrs
        return [
            {
                "number": trial.number,
                "temperature": float(trial.params[PARAMETER]),
                "nll": None if trial.value is None else float(trial.value),
                "here": trial.user_attrs.get("owner") == self.owner,
                **attributes.get(f"trial {trial.number}", {}),
            }
            for trial in self.study.get_trials(deepcopy=False)
            if trial.state.is_finished() and PARAMETER in trial.params
        ]


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Describe the options that differ."""
    return [
        f"{key} {there.get(key)!r} there, {here.get(key)!r} here"
        for key in sorted({*there, *here})
        if there.get(key) != here.get(key)
    ]


def best_of(trials: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the trial with the lowest NLL; None if all failed."""
    ended = [trial for trial in trials if trial["nll"] is not None]
    return min(ended, key=lambda trial: trial["nll"]) if ended else None


def run_steps(
    search: Bayes, total: int, parallel: int, train: Callable[[list[Asked]], list[tuple[float | None, dict[str, Any]]]]
) -> None:
    """Suggest, run and store `parallel` trials at the same time, until the study has `total` trials on all machines.

    `train` returns for each τ its NLL (None if it failed) and attributes to store.
    """
    waiting = search.unfinished()
    while True:
        missing = total - search.count()
        if waiting:
            asked, waiting = waiting[:parallel], waiting[parallel:]
        elif missing > 0:
            asked = search.ask(min(parallel, missing))
        else:
            return
        for suggestion, (nll, attributes) in zip(asked, train(asked), strict=True):
            search.tell(suggestion.number, nll, **attributes)
