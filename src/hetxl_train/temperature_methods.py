"""The methods to choose the temperature τ, in a table for the configuration, the search, the command and the lab."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Method:
    """A method to choose τ."""

    title: str  # title in tables, from the paper if possible
    search: bool = False  # whether it needs many runs with different τ
    learned: bool = False  # whether the loop learns τ; the name is then a value of `temperature_method`
    follows: bool = False  # whether the loop learns τ on a validation loss, possibly of a share of each batch
    validation: bool = False  # whether it needs validation rows
    options: tuple[str, ...] = ()  # options of a search that only this method has


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
