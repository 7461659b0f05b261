"""The loss of stages B and C over log-SNR: the means of training in its bins, and the plots of them."""

import math

import numpy as np
import pytest
import torch
from test_latent_task import draw_of, make_batch, stage_b, stage_c
from waiting import reads

from diff_dalle.diffusion.log_snr_config import LogSnrConfig
from diff_dalle.evaluation import plots


@pytest.fixture
def drawn(monkeypatch):
    """The series of the plots that are drawn."""
    found = []

    def record(series, *arguments, **options):
        found.append(series)
        return np.zeros((1, 1, 3), np.uint8)

    monkeypatch.setattr("diff_dalle.tasks.timesteps.line_plot", record)
    return found


def observed(log_snr, mse) -> dict[str, torch.Tensor]:
    return {"log_snr": torch.tensor(log_snr), "observed_mse": torch.tensor(mse)}


def test_a_plot_has_the_loss_and_the_weight(drawn):
    text, figures = stage_c().findings({"loss_log_snr_-9": 0.5, "loss_log_snr_1": 0.25, "loss_log_snr_3": math.nan})
    assert text == "" and list(figures) == ["loss_by_log_snr"]
    assert drawn[0]["loss"] == [(-9.0, 0.5), (1.0, 0.25)]
    assert [center for center, _ in drawn[0]["weight"]] == [-9.0, 1.0]
    weights = [weight for _, weight in drawn[0]["weight"]]
    assert weights == pytest.approx([1 / (1 + np.exp(-9)), 1 / (1 + np.e)], rel=1e-5)


def test_without_matplotlib_the_extra_is_named_once(monkeypatch):
    """Whichever of the two plots comes first."""

    def missing(*arguments, **options):
        raise plots.MissingMatplotlib(f"plots require matplotlib: {plots.INSTALL}")

    monkeypatch.setattr("diff_dalle.tasks.timesteps.line_plot", missing)
    task = stage_c()
    assert task.training_findings() == ("", {})  # there is nothing to draw yet
    task.observe(observed([0.0], [1.0]))
    text, figures = task.training_findings()
    assert (
        "loss_by_log_snr.png is omitted: plots require matplotlib" in text
        and "'diff_dalle[plot]'" in text
        and figures == {}
    )
    task.observe(observed([0.0], [1.0]))
    assert task.training_findings() == task.findings({"loss_log_snr_1": 0.5}) == ("", {})


@pytest.mark.parametrize("weighting", ["p2", "adaptive"])
def test_the_points_are_the_means_of_the_bins_since_the_last_plot(drawn, weighting):
    task, random = stage_b(LogSnrConfig(loss_weighting=(weighting,))), np.random.default_rng(0)
    for steps in (3, 1):
        log_snr, mse = random.uniform(-13, 13, (steps, 50)), random.uniform(0.1, 2, (steps, 50))
        mse[0, :3] = [math.nan, math.inf, -math.inf]
        for row in range(steps):
            task.observe(observed(log_snr[row].astype(np.float32), mse[row].astype(np.float32)))
        text, figures = task.training_findings()
        assert text == "" and list(figures) == ["training_loss_by_log_snr"]
        expected = []
        for center in range(-9, 10, 2):
            low, high = (-math.inf if center == -9 else center - 1), (math.inf if center == 9 else center + 1)
            inside = (log_snr >= low) & (log_snr < high) & np.isfinite(mse)
            expected.append((center, mse[inside].mean()))
        np.testing.assert_allclose(drawn.pop()["loss"], expected, rtol=1e-6)
    assert task.training_findings() == ("", {}) and not drawn


def test_collecting_neither_waits_for_the_device_nor_is_state(drawn):
    """Only a plot reads the sums. What is unweighted is collected."""
    task, batch = stage_c(LogSnrConfig(loss_weighting=("snr",))), make_batch()
    with torch.no_grad():
        named = task.losses(batch, draw_of(batch))
    assert torch.equal(named["observed_mse"], named["mse"]) and not torch.allclose(named["loss"], named["mse"])
    task.observe({name: named[name] for name in task.observed})
    with reads() as found:
        task.observe({name: named[name] for name in task.observed})
    assert found == [] and task.extra_state() == {}
    task.training_findings()
    points, bins = dict(drawn[0]["loss"]), torch.floor(named["log_snr"] / 2) * 2 + 1
    assert sorted(points) == sorted(set(bins.tolist()))
    for center, mean in points.items():
        assert mean == pytest.approx(named["mse"][bins == center].mean().item())
