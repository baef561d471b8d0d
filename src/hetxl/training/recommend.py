"""Which way of choosing τ is right for this data and budget: one rule, safe when in doubt.

τ scales all logits. Learned like the other parameters it costs nothing and needs no validation data, which is the
paper's recommendation; but it is one number that moves fast, and a model that can overfit does so through τ first.
Whether it can is what the rule asks:

| passes over the data | examples a class | steps | τ |
| --- | --- | --- | --- |
| up to `PASSES_UNSEEN` | any | at least `STEPS` | learned: nearly every batch is new, as good as validation data |
| up to `PASSES` | at least `EXAMPLES_A_CLASS` | at least `STEPS` | learned: as in the paper, 7 passes over 586 |
| else | | | 1, and fitted on the validation split afterwards (`posthoc`) |

Where training labels are replaced by wrong ones, the loss of training asks for another τ than clean data does: 1, and
fitted afterwards. With a budget of several trainings a search (`grid`, then `bayes`) is the safe way in the last row.

`hetxl study tau` measures what the thresholds are worth (docs/temperature.md): in 160 steps a learned τ gained nothing,
in 1,600 of a third of a pass a little, and in ten passes over 108 examples a class it cost 0.019 nats.
"""

from dataclasses import dataclass

from hetxl.data.dataset import Dataset
from hetxl.functional._checks import integer_at_least
from hetxl.training.config import TrainConfig
from hetxl.training.length import steps_of

PASSES_UNSEEN = 1.0
PASSES = 10.0
EXAMPLES_A_CLASS = 500
STEPS = 1000
"""Fewer leave τ where it began, or stop it on its way."""
VALIDATION_ROWS = 500
"""From which one number can be fitted without harm."""
GRID_TRAININGS, BAYES_TRAININGS = 8, 30


@dataclass(frozen=True)
class Recommendation:
    """A way to choose τ.

    Attributes:
        method: "train", "posthoc", "grid", "bayes", or "fixed" for τ = 1.
        reason: in a few words.
    """

    method: str
    reason: str

    @property
    def learned(self) -> bool:
        """Whether one training learns τ like any other parameter; otherwise it leaves τ at 1."""
        return self.method == "train"


def recommend_for(config: TrainConfig, dataset: Dataset, trainings: int = 1) -> Recommendation:
    """The way to choose τ in a training.

    Args:
        config: of the training.
        dataset: with a training split.
        trainings: how many the budget allows.
    """
    return recommend(
        rows=len(dataset.splits["train"]),
        num_classes=dataset.num_classes,
        steps=steps_of(config, dataset),
        batch_size=config.batch_size,
        validation_rows=len(dataset.splits["validation"]) if "validation" in dataset.splits else 0,
        trainings=trainings,
        label_noise=config.label_noise != "none",
    )


def recommend(
    *,
    rows: int,
    num_classes: int,
    steps: int,
    batch_size: int,
    validation_rows: int = 0,
    trainings: int = 1,
    label_noise: bool = False,
) -> Recommendation:
    """The way to choose τ.

    Args:
        rows: training examples.
        num_classes: K
        steps: of one training.
        batch_size: examples of a step.
        validation_rows: validation examples; 0 for none.
        trainings: how many the budget allows.
        label_noise: whether training labels are known to be worse than those of validation.
    """
    for name, value, least in (
        ("rows", rows, 1),
        ("num_classes", num_classes, 1),
        ("steps", steps, 1),
        ("batch_size", batch_size, 1),
        ("validation_rows", validation_rows, 0),
        ("trainings", trainings, 1),
    ):
        integer_at_least(name, value, least)
    passes, each = steps * batch_size / rows, rows / num_classes
    enough = steps >= STEPS and not label_noise
    if enough and passes <= PASSES_UNSEEN:
        return Recommendation("train", f"{passes:.2g} passes over the data, so nearly every batch is new to the model")
    if enough and passes <= PASSES and each >= EXAMPLES_A_CLASS:
        return Recommendation("train", f"{each:,.0f} examples a class and {passes:.2g} passes over them")
    doubt = _doubt(steps, passes, each, label_noise)
    if validation_rows < VALIDATION_ROWS:
        return Recommendation("fixed", f"{doubt}, and {validation_rows:,} validation examples are too few to fit τ on")
    if trainings >= BAYES_TRAININGS:
        return Recommendation("bayes", f"{doubt}, and there is time for {trainings} trainings")
    if trainings >= GRID_TRAININGS:
        return Recommendation("grid", f"{doubt}, and there is time for {trainings} trainings")
    return Recommendation("posthoc", f"{doubt}, and τ can be fitted on {validation_rows:,} validation examples")


def _doubt(steps: int, passes: float, each: float, label_noise: bool) -> str:
    if label_noise:
        return "training labels are worse than those of validation"
    if steps < STEPS:
        return f"{steps:,} steps are few for a τ that is learned"
    return f"{passes:.2g} passes over {each:,.0f} examples a class may overfit"
