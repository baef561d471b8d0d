"""Bayesian optimisation of τ: a study of optuna on disk, which several machines may share.

Every trial of the study is a training. Some are asked for at a time and trained side by side; what is found goes back
into the study. Trials that a killed process left behind are taken up again by the search that began them.
"""

import importlib.util
import json
import uuid
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetxl.functional._checks import integer_at_least, one_of
from hetxl.training.files import read_json, write_json
from hetxl.training.order import derive

LOW, HIGH = 0.05, 5.0
"""The range of τ, as in the paper."""
SAMPLERS = ("auto", "gp", "tpe")
PARAMETER = "temperature"


@dataclass(frozen=True)
class Asked:
    """A τ that the study wants to know about.

    Attributes:
        number: of the trial, over all machines.
        temperature: τ
    """

    number: int
    temperature: float


def require_optuna() -> Any:
    """optuna, or an error that says how to get it."""
    try:
        import optuna
    except ImportError:
        raise ImportError("--method bayes needs optuna: pip install optuna scipy") from None
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def open_storage(storage: str | None, default: Path) -> Any:
    """The storage of a study: a journal file, or any other that optuna has.

    Args:
        storage: a path of a journal file; redis://… for a journal there; grpc://HOST:PORT for a proxy; another address,
            such as sqlite:///study.db or mysql://…, for a database. None for `default`.
        default: the journal file where none is given.
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
        except Exception as error:  # what a database raises depends on the database
            raise ValueError(f"--storage {text!r} cannot be used: {' '.join(str(error).split())[:300]}") from None
    Path(text).parent.mkdir(parents=True, exist_ok=True)
    return optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(text))


class Bayes:
    """A search for the τ with the lowest validation NLL.

    Args:
        directory: of this machine's part of the search.
        name: of the study within its storage.
        about: what all trials have in common; a study of something else is refused.
        storage: see `open_storage`.
        sampler: "gp", "tpe", or "auto": a Gaussian process where scipy is installed.
        seed: of the suggestions.
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
        self.owner = _owner(directory)
        opened = open_storage(storage, directory / "study.journal")
        self.study = self.optuna.create_study(
            storage=opened, study_name=name, direction="minimize", load_if_exists=True
        )
        text = json.dumps(about, sort_keys=True)
        known = self.study.user_attrs.get("about")
        if known is None:
            self.study.set_user_attr("about", text)
        elif known != text:
            raise ValueError(
                f"study {name!r} in its storage is of another training ({_first_difference(known, text)}); "
                "choose another --storage or --out"
            )

    def count(self) -> int:
        """Trials of all machines, those under way among them."""
        return sum(PARAMETER in trial.params for trial in self.study.get_trials(deepcopy=False))

    def unfinished(self) -> list[Asked]:
        """Trials that this search began and never told the end of: of a process that was killed."""
        running = self.optuna.trial.TrialState.RUNNING
        return [
            Asked(trial.number, float(trial.params[PARAMETER]))
            for trial in self.study.get_trials(deepcopy=False, states=(running,))
            if trial.user_attrs.get("owner") == self.owner and PARAMETER in trial.params
        ]

    def ask(self, count: int) -> list[Asked]:
        """New values of τ, as different from one another as the sampler makes them.

        Args:
            count: how many.
        """
        integer_at_least("count", count, 1)
        # Another seed for every call: a search that was taken up again does not repeat its draws.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # samplers say that they are experimental
            self.study.sampler = self._sampler(derive(self.seed, self.count()) % 2**31, count)
            found = []
            for _ in range(count):
                trial = self.study.ask()
                trial.set_user_attr("owner", self.owner)
                found.append(Asked(trial.number, trial.suggest_float(PARAMETER, LOW, HIGH, log=True)))
        return found

    def tell(self, number: int, nll: float | None, **attributes: Any) -> None:
        """What a trial found; None for one that failed."""
        state = self.optuna.trial.TrialState
        # With the study: a trial that was taken up again has no object that could hold them.
        self.study.set_user_attr(f"trial {number}", attributes)
        self.study.tell(number, nll, state=state.FAIL if nll is None else state.COMPLETE, skip_if_finished=True)

    def trials(self) -> list[dict[str, Any]]:
        """All trials that ended, of all machines, by their numbers."""
        more = self.study.user_attrs
        return [
            {
                "number": trial.number,
                "temperature": float(trial.params[PARAMETER]),
                "nll": None if trial.value is None else float(trial.value),
                "here": trial.user_attrs.get("owner") == self.owner,
                **more.get(f"trial {trial.number}", {}),
            }
            for trial in self.study.get_trials(deepcopy=False)
            if trial.state.is_finished() and PARAMETER in trial.params
        ]

    def _sampler(self, seed: int, startup: int) -> Any:
        samplers = self.optuna.samplers
        kind: Callable[..., Any] = samplers.GPSampler if self.kind == "gp" else samplers.TPESampler
        return kind(seed=seed, n_startup_trials=startup)


def _owner(directory: Path) -> str:
    """Who this search is among those that share a study: the same when it is taken up again."""
    path = directory / "owner.json"
    if not path.exists():
        directory.mkdir(parents=True, exist_ok=True)
        write_json(path, {"owner": uuid.uuid4().hex})
    return str(read_json(path)["owner"])


def _first_difference(known: str, text: str) -> str:
    one, other = json.loads(known), json.loads(text)
    for key in sorted({*one, *other}):
        if one.get(key) != other.get(key):
            return f"{key} {one.get(key)!r} there, {other.get(key)!r} here"
    return "the same options"


def best_of(trials: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The trial with the lowest NLL; None if all failed."""
    ended = [trial for trial in trials if trial["nll"] is not None]
    return min(ended, key=lambda trial: trial["nll"]) if ended else None


def run_steps(
    search: Bayes, total: int, parallel: int, train: Callable[[list[Asked]], list[tuple[float | None, dict[str, Any]]]]
) -> None:
    """Go on until the study has `total` trials: `parallel` are asked for, trained and told, and so on.

    Args:
        search: the study.
        total: trials over all machines.
        parallel: of one step.
        train: gives for each τ its NLL (None if it failed) and what else is worth storing.
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
        for one, (nll, attributes) in zip(asked, train(asked), strict=True):
            search.tell(one.number, nll, **attributes)
