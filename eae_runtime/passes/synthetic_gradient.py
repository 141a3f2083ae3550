"""SyntheticGradientPass: a small network that learns to predict adjoints (paper, 2.4.1)."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ..adjoint import AdjointState
from ..errors import PassError
from .base import Context, EAEPass

__all__ = ["SyntheticGradientPass"]


class SyntheticGradientPass(EAEPass):
    """Trains a two-layer network to reproduce the adjoints that it sees, and can put its output in their place.

    An adjoint (B, ...) is seen as B rows of `feature_dim` numbers; one with a single dimension is one row.

    feature_dim    numbers in a row
    hidden_dim     inner width of the network
    lr             learning rate of its Adam optimizer
    warmup_steps   adjoints that pass unchanged before any is replaced
    use_synthetic  whether adjoints are replaced at all
    device         where the network lives; None is the CPU
    """

    name = "SyntheticGradientPass"
    stateful = True

    def __init__(
        self,
        feature_dim: int,
        hidden_dim: int = 64,
        lr: float = 1e-3,
        warmup_steps: int = 0,
        use_synthetic: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        self.feature_dim = feature_dim
        self.synthesizer = nn.Sequential(
            nn.Linear(feature_dim, hidden_dim), nn.ReLU(), nn.Linear(hidden_dim, feature_dim)
        )
        if device is not None:
            self.synthesizer.to(device)
        self.optimizer = torch.optim.Adam(self.synthesizer.parameters(), lr=lr)
        self.warmup_steps = warmup_steps
        self.use_synthetic = use_synthetic
        self._step = 0
        self._loss: torch.Tensor | None = None

    @property
    def last_loss(self) -> float | None:
        """The prediction's mean squared error at the last adjoint. Reading it waits for the device."""
        return None if self._loss is None else self._loss.item()

    def process(self, adjoint: AdjointState, context: Context | None = None) -> AdjointState:
        new = adjoint.clone()
        given = adjoint.tensor.detach()
        rows = (given.flatten(1) if given.dim() > 1 else given.reshape(1, -1)).float()
        if rows.shape[1] != self.feature_dim:
            raise PassError(
                f"pass {self.name} at boundary {adjoint.layer_id}: an adjoint of shape {tuple(given.shape)} "
                f"has rows of {rows.shape[1]} numbers, feature_dim is {self.feature_dim}"
            )
        self._learn(rows)
        if self.use_synthetic and self._step > self.warmup_steps:
            with torch.no_grad():
                new.tensor = self.synthesizer(rows).to(given.dtype).reshape(given.shape)
            new.metadata["synthetic_gradient_loss"] = self.last_loss
        return new

    def _learn(self, rows: torch.Tensor) -> None:
        with torch.enable_grad():
            loss = F.mse_loss(self.synthesizer(rows), rows)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        self._loss = loss.detach()
        self._step += 1

    def state(self) -> dict[str, Any]:
        """A copy of the network, its optimizer and the step count."""
        return copy.deepcopy(
            {
                "synthesizer": self.synthesizer.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "step": self._step,
                "loss": self._loss,
            }
        )

    def load_state(self, state: dict[str, Any]) -> None:
        self.synthesizer.load_state_dict(state["synthesizer"])
        # The optimizer keeps the tensors that it is given.
        self.optimizer.load_state_dict(copy.deepcopy(state["optimizer"]))
        self._step = state["step"]
        self._loss = state["loss"]
