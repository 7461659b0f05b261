"""Exact solutions, exact distributions, and what is compared with them."""

import math

import exact_denoisers
import pytest
import torch

from benchmarks import solvers
from benchmarks.registry import BENCHMARKS
from diff_dalle.diffusion.samplers import SAMPLERS


def test_the_exact_solution_of_one_gaussian(monkeypatch):
    """x_T − α c is scaled by the ratio of the standard deviations."""
    center, width, alpha_bar = torch.tensor([[0.4, -0.2]], dtype=torch.float64), 0.3, 1e-3
    monkeypatch.setattr(exact_denoisers, "CENTERS", center)
    x = solvers.noise(50, 1)
    ratio = width / math.sqrt(alpha_bar * width**2 + 1 - alpha_bar)
    expected = center + ratio * (x - math.sqrt(alpha_bar) * center)
    torch.testing.assert_close(solvers.exact_solution(x, alpha_bar, width), expected, atol=1e-6, rtol=0)


def test_solvers_converge_to_the_exact_solution(monkeypatch):
    """With many steps, of each schedule's last level."""
    monkeypatch.setattr(solvers, "_ODE_STEPS", 400)
    for schedule in ("linear", "cosine", "flow"):
        x = solvers.noise(16, 0)
        found = solvers.sampled("unipc", schedule, "even", 200, x, 0.3)
        assert (found - solvers.exact_solution(x, solvers.last_level(schedule), 0.3)).square().mean().sqrt() < 1e-4


def test_the_distance_of_a_distribution():
    """0 for the quantiles themselves; the length of a shift, times √½ on average over directions."""
    generator, count = torch.Generator().manual_seed(0), 20_000
    centers = solvers.CENTERS[torch.randint(3, (count,), generator=generator)]
    data = centers + 0.3 * torch.randn(count, 2, generator=generator, dtype=torch.float64)
    assert solvers.distribution_error(data, 0.3) < 0.01
    assert solvers.distribution_error(data + torch.tensor([0.2, 0.0]), 0.3) == pytest.approx(
        0.2 / math.sqrt(2), rel=0.05
    )


def test_the_tables_hold_every_solver_and_mark_the_defaults(monkeypatch):
    monkeypatch.setattr(solvers, "EVALUATIONS", (4, 5))
    monkeypatch.setattr(solvers, "SCHEDULES", ("linear", "cosine", "flow"))
    monkeypatch.setattr(solvers, "_ODE_STEPS", 20)
    monkeypatch.setattr(solvers, "ANCESTRAL_STEPS", 6)
    text = solvers.tables(count=100)
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    marked = {(row[0], row[2]) for row in lines if row[2].endswith("*")}
    assert marked == {("linear", "log_snr*"), ("cosine", "flow*"), ("flow", "even*")}
    assert {row[1] for row in lines} >= set(SAMPLERS) - {"lcm"}
    monkeypatch.setattr(solvers, "tables", lambda: "the tables")
    assert BENCHMARKS["solvers"].text() == "the tables"


@pytest.mark.parametrize(("name", "steps"), [("unipc", 20), ("heun", 10)])
def test_the_steps_of_20_evaluations(name, steps):
    assert solvers.steps_of(name, 20) == steps
