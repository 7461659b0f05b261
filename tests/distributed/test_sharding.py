"""Sharded networks train as whole ones do, and every rank holds its share only."""

import textwrap

from test_parallel import PREAMBLE, run_ranks_of

SHARDED = """
import dataclasses
from diff_dalle.distributed.sharding import ShardingConfig, build_sharded
from diff_dalle.distributed.parallel import is_sharded
from diff_dalle.models.units import parts_of
from diff_dalle.models.precision import DTYPES

def make_sharded(build, world, mode="fsdp", precision="fp32", **settings):
    config = ShardingConfig(mode, **settings)
    return build_sharded(build, lambda network: parts_of(network, DTYPES.get(precision)), world, config)

def nbytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in local(tensors))

def held(trainee):
    state = trainee.optimizations[""].optimizer.state.values()
    moments = [value for entry in state for value in entry.values()]
    averages = [value for ema in trainee.emas for value in ema.averages.values()]
    return nbytes([*trainee.task.model.parameters(), *averages, *moments])
"""


def test_losses_and_memory_are_those_of_one_process_and_of_a_share(tmp_path):
    out = run_ranks_of(
        tmp_path,
        SHARDED
        + textwrap.dedent("""
        def make(model):
            process = create_gaussian_diffusion(DiffusionConfig(50, "cosine"))
            return DenoisingTask(model, process, DenoisingConfig())

        def train(trainee, world, steps=20):
            rows = []
            for step in range(steps):
                trainee.update(make_pieces(range(world.rank, 8, world.size), step), step)
                found = trainee.scalars()
                rows.append((found["loss"], found["grad_norm"]))
            return torch.tensor(rows, dtype=torch.float64)

        def main():
            with launch(DistributedConfig(device="cpu", start_timeout=120)) as world:
                alone = World(SINGLE, torch.device("cpu"))
                config = dataclasses.replace(CONFIG, lr=1e-3)
                one = Trainee(make(make_generator()), config, "fp32", alone)
                expected = train(one, alone)
                replicated = Trainee(make(build_shared(make_generator, world)), config, "fp32", world)
                sharded = Trainee(make(make_sharded(make_generator, world)), config, "fp32", world)
                for trainee in (replicated, sharded):
                    found = train(trainee, world)
                    world.print((found - expected).abs().max(0).values)
                world.print(held(sharded) / held(replicated), held(one))
        run_script(main)
        """),
        2,
    )
    print(out)
