"""The methods to choose the temperature τ: one table for the configuration, the search, the command and the lab."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Method:
    """A way to choose τ."""

    title: str  # in tables; the paper's, if it is in the paper
    search: bool = False  # whether it needs many runs, each with another τ
    learned: bool = False  # whether the loop moves τ; the name is then a value of the option `temperature_method`
    follows: bool = False  # whether the loop moves τ by a validation loss, which may be that of a share of each batch
    validation: bool = False  # whether it needs validation rows
    options: tuple[str, ...] = ()  # of a search that only this method reads


METHODS = {
    "grid": Method("Grid search", search=True, validation=True, options=("grid",)),
    "bayes": Method(
        "Bayesian optimization", search=True, validation=True, options=("trials", "parallel", "sampler", "storage")
    ),
    "bilevel": Method("Luketina et al.", learned=True, follows=True, validation=True),
    "gradient": Method("Simple gradient", learned=True, follows=True, validation=True),
    "train": Method("Simple training", learned=True),
    "posthoc": Method("Fitted afterwards", validation=True),
    "fixed": Method("τ = 1"),  # the baseline of all others
}
SEARCHES = tuple(name for name, method in METHODS.items() if method.search)
LEARNED = tuple(name for name, method in METHODS.items() if method.learned)
FOLLOWING = tuple(name for name, method in METHODS.items() if method.follows)
