"""Metrics of generated images that several processes have made."""

from ranks import run_ranks_of

BODY = """
from eval_making import EVERY, N, chunks, pair
from diff_dalle.config import from_dict
from diff_dalle.distributed.world import ALONE
from diff_dalle.config import InputError
from diff_dalle.evaluation.generated import GeneratedMetrics
from diff_dalle.evaluation.generated_config import GeneratedMetricsConfig

config = from_dict(GeneratedMetricsConfig, {"n_evaluation_samples": N, **EVERY})
parts = chunks(*pair(), 8)
expected = GeneratedMetrics(config, ALONE).measure(parts, N)
for mine in (parts[world.rank :: 2], parts[:-1] if world.rank else parts[1:], [] if world.rank else parts):
    found = GeneratedMetrics(config, world).measure(mine, N)
    assert found == expected, (found, expected)
broken = [(parts[0][0], parts[0][1] / torch.zeros(1), parts[0][2])]
try:
    GeneratedMetrics(config, world).measure(broken if world.rank else parts, N)
    raise SystemExit("no error")
except InputError as error:
    assert "8 generated images of 8 have values that are not finite" in str(error), error
"""


def test_values_of_two_processes_are_those_of_one():
    """Of unequal numbers of chunks, of chunks that both have, and of a process that has none: equal to the last bit.
    What one cannot measure is an error of both."""
    run_ranks_of(2, BODY)
