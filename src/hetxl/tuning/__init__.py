"""Ways to choose the temperature τ. `hetxl.tuning.tune.tune` runs them, `recommend` says which to take."""

# No more than this: training asks for the recommendation, and `hetxl.tuning.tune` for training.
from hetxl.tuning.auto import Recommendation, recommend

__all__ = ["Recommendation", "recommend"]
