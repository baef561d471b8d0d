"""For gradients that are computed once, and have none of their own."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A backward pass that says so when its gradients are to be differentiated.

    torch's `once_differentiable` does where the incoming gradient is differentiable; that of a loss is the number 1,
    and a penalty on the gradients of a loss would be wrong without a word.

    Args:
        backward: of an autograd function.
    """

    @wraps(backward)
    def checked(ctx: Any, *gradients: Any) -> Any:
        if torch.is_grad_enabled():  # create_graph=True
            raise RuntimeError(
                "the contrastive losses have no gradients of gradients: leave create_graph=True out, or compute the "
                "loss by hetxl.functional.contrastive"
            )
        return backward(ctx, *gradients)

    return checked
