"""A loss and how a batch is cut into microbatches for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from . import _tree
from .errors import ConfigError, LossError, TensorTypeError

__all__ = [
    "Loss",
    "Scale",
    "check_loss",
    "check_value",
    "no_gradient",
    "pass_context",
    "split_losses",
    "split_rows",
    "total_loss",
]


@dataclass
class Scale:
    """What a loss is multiplied by before its backward: a loss scaler's scale (None: 1), and 1/n of n accumulated
    calls. In the order of `scaler.scale(loss / n).backward()`."""

    scaler: Any
    accumulate: int

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss that the backward starts from."""
        loss = loss if self.accumulate == 1 else loss / self.accumulate
        return loss if self.scaler is None else self.scaler.scale(loss)

    def cotangent(self, loss: torch.Tensor) -> torch.Tensor:
        """What arrives at the unscaled loss, computed as autograd does it."""
        leaf = loss.detach().requires_grad_()
        with torch.enable_grad():
            (made,) = torch.autograd.grad(self.scaled(leaf), leaf)
        return made

    def factor(self) -> float:
        """The loss scale alone. Reading it waits for the device."""
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())


@dataclass
class Loss:
    """A loss and how it is split: `fn(output)`, or `fn(output_rows, target_rows)` with the targets of each microbatch
    and its weight."""

    fn: Callable[..., Any]
    targets: list[Any] | None = None
    weights: list[float] | None = None
    scale: Scale | None = None

    def cotangent(self, loss: torch.Tensor, weight: float) -> torch.Tensor:
        """The gradient of what is minimized by the loss of a microbatch."""
        if self.scale is None:
            return torch.full_like(loss, weight)
        made = self.scale.cotangent(loss)
        return made if weight == 1.0 else made * weight

    def __call__(self, output: Any, m: int) -> torch.Tensor:
        """The loss of microbatch m's output. Raises LossError for what is no scalar tensor."""
        return check_value(self.fn(output) if self.targets is None else self.fn(output, self.targets[m]))


def check_value(loss: Any) -> torch.Tensor:
    """The loss. Raises LossError for what is no scalar tensor."""
    if not isinstance(loss, torch.Tensor):
        raise LossError(f"the loss is {type(loss).__name__}, not a tensor; loss_fn has to return a scalar tensor")
    if loss.numel() != 1:
        raise LossError(f"the loss has shape {list(loss.shape)}; loss_fn has to return a scalar (take its mean or sum)")
    return loss


def no_gradient() -> LossError:
    """For a loss that does not depend on the output."""
    return LossError("loss_fn gives no gradient to the model's output; it has to depend on its input tensor")


def total_loss(losses: Sequence[tuple[torch.Tensor, float]]) -> torch.Tensor:
    """The loss of a batch: the microbatches' losses, each with its weight, added in their order."""
    parts = [loss if weight == 1.0 else loss * weight for loss, weight in losses]
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def pass_context(loss: Loss | None, parts: int, m: int, rows: int) -> dict[str, Any]:
    """What passes are told of microbatch m of `parts`: its number, its rows (0: unknown), the weight of its loss in the
    whole (0: unknown), and the loss scale if there is a scaler."""
    weights = loss.weights if loss is not None else None
    scale = loss.scale if loss is not None else None
    share = 1.0 if scale is None else 1.0 / scale.accumulate
    made: dict[str, Any] = {
        "microbatch": m,
        "rows": rows,
        "weight": share * (weights[m] if weights is not None else float(parts == 1)),
    }
    if scale is not None:
        made["loss_scale"] = scale.factor()
    return made


def split_rows(value: Any, parts: int) -> list[Any]:
    """Cuts every tensor of a tree along its first dimension into `parts` of ceil(rows / parts) rows, the last one
    smaller. The parts are views."""
    tensors, shape = _tree.flatten(value)
    rows = tensors[0].shape[0] if tensors and tensors[0].dim() else 0
    chunk = -(-rows // parts) if parts else rows
    return [
        _tree.unflatten([t[k * chunk : (k + 1) * chunk] for t in tensors], shape)
        for k in range(parts)
        if k == 0 or k * chunk < rows
    ]


def split_losses(
    loss_fn: Callable[..., Any],
    targets: Any,
    parts: int,
    rows: int,
    reduction: str,
    weigh: Callable[[Any], Any] | None,
) -> Loss:
    """The loss of a batch of `rows` rows in `parts` microbatches; see `EAERuntime.train_step` for the rest. Raises
    ConfigError for a reduction that is none, targets of another number of rows, and weights that add up to 0."""
    if reduction not in ("mean", "sum"):
        raise ConfigError(f"loss_reduction={reduction!r}: allowed is 'mean', 'sum'")
    if targets is None:
        if weigh is not None:
            raise ConfigError("loss_weight= needs targets=: it is called with the targets of each microbatch")
        return Loss(loss_fn)
    if parts > 1:
        found = {t.shape[0] if t.dim() else "none" for t in _tree.flatten(targets)[0]}
        if found != {rows}:
            raise ConfigError(
                f"the tensors of targets= have {', '.join(map(str, sorted(found, key=str))) or 'none'} rows and the "
                f"input {rows}; both have to have the same number of rows to be cut into microbatches"
            )
    pieces = [targets] if parts == 1 else split_rows(targets, parts)
    if reduction == "sum" or parts == 1:
        return Loss(loss_fn, pieces, [1.0] * parts)
    sizes = [float(weigh(p)) if weigh is not None else float(_tree.flatten(p)[0][0].shape[0]) for p in pieces]
    total = sum(sizes)
    if not total > 0:
        raise ConfigError(f"loss_weight gave {sizes} for the microbatches; their sum has to be above 0")
    return Loss(loss_fn, pieces, [s / total for s in sizes])


def check_loss(loss_fn: Any) -> None:
    """Raises TensorTypeError for a loss that cannot be called."""
    if not callable(loss_fn):
        raise TensorTypeError(
            f"loss_fn is {type(loss_fn).__name__}; it has to be callable: loss_fn(output) -> scalar tensor"
        )
