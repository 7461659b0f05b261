"""Linear probes: what a linear map can read from features (Alain & Bengio 2016; Radford et al. 2021, appendix A.3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from ..config import InputError

PENALTY = 1e-3  # weight of the squared norm of the weights beside the mean cross entropy
STEPS = 200  # of L-BFGS; some tens suffice


def linear_probe(features: Tensor, labels: Sequence[str], queries: Tensor) -> list[str]:
    """The labels of ``queries`` [M, D] by logistic regression on ``features`` [N, D] with N labels.

    Features are standardized by the mean and standard deviation of ``features``; a constant one counts for nothing. All
    in float64, by L-BFGS from zero weights: the same inputs give the same labels. InputError for no labels, and for
    other numbers of labels than features.
    """
    if len(labels) != len(features) or not len(labels):
        raise InputError(f"a probe got {len(labels)} labels for {len(features)} features: give one for each")
    classes = sorted(set(labels))
    targets = torch.tensor([classes.index(label) for label in labels])
    known, asked = features.detach().double().cpu(), queries.detach().double().cpu()
    mean, std = known.mean(0), known.std(0, unbiased=False)
    known, asked = ((x - mean) / std.where(std > 0, torch.inf) for x in (known, asked))
    weight = torch.zeros(known.shape[1], len(classes), dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(len(classes), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([weight, bias], max_iter=STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(known @ weight + bias, targets) + PENALTY * weight.square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    with torch.no_grad():
        return [classes[i] for i in (asked @ weight + bias).argmax(1).tolist()]
