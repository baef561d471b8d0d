"""Recommend a method to choose τ for the data and the budget, by one conservative rule.

τ scales all logits. The paper recommends to learn it like the other parameters, which costs nothing and needs no
validation data. But τ is a single parameter that changes fast: a model that can overfit does so through τ first. The
rule estimates whether the model can overfit:

| epochs | examples per class | steps | τ |
| --- | --- | --- | --- |
| up to `EPOCHS_UNSEEN` | any | at least `STEPS` | learned: nearly every batch is new, as good as validation data |
| up to `EPOCHS` | at least `CLASS_EXAMPLES` | at least `STEPS` | learned: as in the paper, 7 epochs of 586 |
| otherwise | | | 1, and fitted on the validation split afterwards (`posthoc`) |

With wrong training labels, the τ with the lowest training loss differs from that of clean data, so τ is 1 and fitted
afterwards. If the budget allows several runs, a search (`grid`, or with more runs `bayes`) replaces `posthoc`.

`hetxl study tau` tests the thresholds (docs/temperature.md): in 160 steps a learned τ gained nothing, in 1,600 steps (a
third of an epoch) a little, and in ten epochs of 108 examples per class it cost 0.019 nats.
"""

from dataclasses import dataclass

from hetxl._checks import integer_at_least
from hetxl_train.config import TrainConfig
from hetxl_train.data.dataset import Dataset
from hetxl_train.num_steps import steps_for

EPOCHS_UNSEEN = 1.0
EPOCHS = 10.0
CLASS_EXAMPLES = 500
STEPS = 1000
"""In fewer steps, τ stays near its initial value."""
VALIDATION_ROWS = 500
"""This many rows are enough to fit one parameter without overfitting."""
GRID_RUNS, BAYES_RUNS = 8, 30


@dataclass(frozen=True)
class Recommendation:
    """A method to choose τ."""

    method: str  # a key of `hetxl_train.temperature_methods.METHODS`; "fixed" for τ = 1
    reason: str  # in a few words

    @property
    def learned(self) -> bool:
        """Whether a run learns τ like any other parameter; otherwise τ stays at 1."""
        return self.method == "train"


def recommend_for(config: TrainConfig, dataset: Dataset, max_runs: int = 1) -> Recommendation:
    """Return the method to choose τ for a run; `max_runs` is the number of runs that the budget allows."""
    return recommend(
        rows=len(dataset.splits["train"]),
        num_classes=dataset.num_classes,
        steps=steps_for(config, dataset),
        batch_size=config.batch_size,
        validation_rows=len(dataset.splits["validation"]) if "validation" in dataset.splits else 0,
        max_runs=max_runs,
        label_noise=config.label_noise != "none",
    )


def recommend(
    *,
    rows: int,
    num_classes: int,
    steps: int,
    batch_size: int,
    validation_rows: int = 0,
    max_runs: int = 1,
    label_noise: bool = False,
) -> Recommendation:
    """Return the method to choose τ for a number of training rows and steps; the budget allows `max_runs` runs.

    `label_noise` says that training labels are known to be worse than validation labels.
    """
    sizes = {"rows": rows, "num_classes": num_classes, "steps": steps, "batch_size": batch_size, "max_runs": max_runs}
    for name, value in sizes.items():
        integer_at_least(name, value, 1)
    integer_at_least("validation_rows", validation_rows, 0)
    epochs, class_examples = steps * batch_size / rows, rows / num_classes
    enough = steps >= STEPS and not label_noise
    if enough and epochs <= EPOCHS_UNSEEN:
        return Recommendation("train", f"{epochs:.2g} epochs, so nearly every batch is new to the model")
    if enough and epochs <= EPOCHS and class_examples >= CLASS_EXAMPLES:
        return Recommendation("train", f"{class_examples:,.0f} examples per class and {epochs:.2g} epochs")
    if label_noise:
        risk = "training labels are worse than those of validation"
    elif steps < STEPS:
        risk = f"{steps:,} steps are few to learn τ"
    else:
        risk = f"{epochs:.2g} epochs of {class_examples:,.0f} examples per class may overfit"
    if validation_rows < VALIDATION_ROWS:
        return Recommendation("fixed", f"{risk}, and {validation_rows:,} validation examples are too few to fit τ on")
    for method, runs in (("bayes", BAYES_RUNS), ("grid", GRID_RUNS)):
        if max_runs >= runs:
            return Recommendation(method, f"{risk}, and there is time for {max_runs} runs")
    return Recommendation("posthoc", f"{risk}, and τ can be fitted on {validation_rows:,} validation examples")
