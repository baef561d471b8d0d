"""Methods to choose the temperature τ: `hetxl_train.search.tune.tune` runs them, `recommend` recommends one."""

from hetxl_train.temperature.policy import Recommendation, recommend

__all__ = ["Recommendation", "recommend"]
