"""Ways to choose the temperature τ. `hetxl.tuning.tune.tune` runs them, `recommend` says which to take."""

from hetxl.training.recommend import Recommendation, recommend

__all__ = ["Recommendation", "recommend"]
