"""Sharded networks train as whole ones do, and every rank holds its share only."""

import pytest
from marks import slow
from ranks import run_ranks_of

TRAINING = """
from diff_dalle.recipes.planning.cost import shapes_of
from diff_dalle.recipes.planning.step import share_of

def main():
    alone = World(SINGLE, torch.device("cpu"))
    one = Trainee(make_task(make_network()), SLOW, "fp32", alone)
    expected = world.broadcast(train(one, alone, {steps}) if world.is_main else None)
    whole = world.broadcast(held(one))
    whole_here = Trainee(make_task(build_shared(make_network, world)), SLOW, "fp32", world)
    check(world, "ddp", train(whole_here, world, {steps}), expected, [held(whole_here) / whole])
    for settings, share in {cases!r}:
        sharded = Trainee(make_task(make_sharded(make_network, world, **settings)), SLOW, "fp32", world)
        with mock.patch.object(torch, "_fused_adamw_", of_shards(torch._fused_adamw_)):
            rows = train(sharded, world, {steps})
        shares = world.gather(held(sharded) / whole)
        check(world, settings.get("mode", "fsdp"), rows, expected, shares)
        assert max(shares) <= share, (settings, shares)
        config = ShardingConfig(**{{"parallel": settings.pop("mode", "fsdp"), **settings}})
        found = share_of(shapes_of(make_network()), config, len(config.groups(world)[0]), 2)
        planned = 16 * found.parameters  # weights, two moments and one average; gradients are free by now
        steps_kept = 4 * len(list(sharded.task.model.parameters()))
        assert held(sharded) <= planned + steps_kept and (world.rank or held(sharded) == planned + steps_kept)
    world.print("fine")

def of_shards(kernel):
    # Sharded tensors themselves would take seconds in the first update.
    def checked(parameters, *rest, **named):
        assert not any(map(is_sharded, parameters))
        return kernel(parameters, *rest, **named)
    return checked

def check(world, mode, found, expected, shares):
    error = (found - expected).abs().amax(0).tolist()
    world.print(f"| {{mode}} | {{world.size}} | {{error[0]:.1e}} | {{error[1]:.1e}} | {{max(shares):.3f}} |")
    assert max(error) <= 1e-5, (found, expected)

main()
"""


@pytest.mark.parametrize(
    ("size", "steps", "cases"),
    [
        slow(2, 4, [({}, 0.6)]),
        (
            4,
            3,
            [
                ({"forward_prefetch": 2, "backward_prefetch": 2}, 0.35),
                ({"mode": "hsdp", "shard_processes": 2, "reshard_after_forward": False}, 0.6),
            ],
        ),
    ],
)
def test_losses_are_those_of_one_process_and_memory_is_a_share(size, steps, cases):
    """Steps in fp32 of two micro-batches, with activation checkpointing and dropout: losses and gradient norms; and
    the bytes of parameters, averages and optimizer on each rank, relative to those of DDP. Prints a table: the largest
    differences from one process, and the largest share."""
    out = run_ranks_of(size, TRAINING.format(steps=steps, cases=cases))
    print("\n| parallel | processes | loss | gradient norm | share |\n| --- | --- | --- | --- | --- |")
    print(out)
    assert "fine" in out


COMPILED = """
from torch._dynamo.testing import CompileCounterWithBackend
from diff_dalle.models.units import compile_training

def compiled(network):
    compile_training(network, counter)
    return network

torch._dynamo.reset()
counter = CompileCounterWithBackend("aot_eager")
alone = World(SINGLE, torch.device("cpu"))
one = Trainee(make_task(make_network()), SLOW, "fp32", alone)
expected = world.broadcast(train(one, alone, 3) if world.is_main else None)
for network in (build_shared(make_network, world), make_sharded(make_network, world)):
    found = train(Trainee(make_task(compiled(network)), SLOW, "fp32", world), world, 3)
    error = (found - expected).abs().max()
    world.print(counter.frame_count, f"{error:.1e}", error <= 1e-5)
"""


@pytest.mark.slow
def test_compiled_blocks_compute_the_same_whole_and_sharded():
    """With activation checkpointing and dropout. Sharded blocks are captured with their gathered weights."""
    out = run_ranks_of(2, COMPILED)
    print(out)
    counts = [int(line.split()[0]) for line in out.splitlines() if line[:1].isdigit()]
    assert out.count("True") == 2 and 0 < counts[0] < counts[1] <= 3 * counts[0]


NETWORKS = """
from clip_making import make_clip
from decoder_making import TEXT_LENGTH, TEXT_UNET, TEXT_WIDTH, WIDTH, make_decoder
from decoder_making import make_network as make_decoder_unet
from latent_making import B, C, own_text
from latent_making import make as make_latent
from diff_dalle.diffusion.resample import ContrastiveConfig
from diff_dalle.tasks.contrastive import ContrastiveTask
from diff_dalle.training.loop import evaluating
from diff_dalle.training.task import Task

class Pull(Task):
    # Towards random targets, with random conditions of all kinds; the text may be encoded by itself, as in sampling.
    def __init__(self, model, size, cond, apart):
        super().__init__()
        self.model, self.size, self.cond, self.apart = model, size, cond, apart

    def losses(self, batch, draw):
        cond = self.cond(draw, len(batch))
        cond = self.model.encode_text(cond) if self.apart else cond
        out = self.model(draw.normal("x", self.size), draw.uniform("t"), cond)
        return {{"loss": (out - draw.normal("target", out.shape[1:])).square().flatten(1).mean(1)}}

def captions(draw, n):
    tokens = torch.stack([(draw.uniform(f"token {{i}}") * 40).long() for i in range(5)], 1)
    return {{"tokens": tokens, "mask": torch.ones(n, 5, dtype=torch.bool)}}

def of_b(draw, n):
    maps = {{"semantic": draw.normal("semantic", (3, 3, 2)), "low_res": draw.normal("low", (2, 4, 6))}}
    return Conditioning(**captions(draw, n), **maps, extra={{"sca": draw.uniform("sca")}})

def of_c(draw, n):
    return Conditioning(**captions(draw, n), image_embedding=draw.normal("image", (6,)))

def of_decoder(draw, n):
    mask = torch.ones(n, TEXT_LENGTH, dtype=torch.bool)
    states = draw.normal("text", (TEXT_LENGTH, TEXT_WIDTH))
    return Conditioning(image_embedding=draw.normal("image", (WIDTH,)), text_states=states, mask=mask)

def contrastive(model, world):
    process = create_gaussian_diffusion(DiffusionConfig(50, "cosine"))
    return ContrastiveTask(model, process, ContrastiveConfig(), world)

def denoising(model, world):
    return make_task(model)

def decoder():
    return make_decoder_unet(make_decoder(unet=dataclasses.replace(TEXT_UNET, checkpoint_during_training=True)))

def pieces(world, step):
    index = torch.arange(world.rank, 8, world.size) + 100 * step
    draw = Draw(9, index)
    cond = Conditioning(**captions(draw, len(index)))
    batch = Batch(draw.normal("image", (3, 8, 8)).tanh(), cond, index)
    return [(piece, Draw(0, piece.index)) for piece in batch.split(4 // world.size)]

B, C = own_text(B), own_text(C)
CASES = {{
    "generator": (make_network, denoising),
    "classifier": (make_clip, contrastive),
    "decoder": (decoder, lambda model, world: Pull(model, (3, 8, 8), of_decoder, True)),
    "stage b": (lambda: make_latent(B), lambda model, world: Pull(model, (4, 8, 12), of_b, False)),
    "stage c": (lambda: make_latent(C), lambda model, world: Pull(model, (4, 8, 12), of_c, True)),
}}

def steps(trainee, world, name):
    rows = []
    for step in range(2):
        generator = name == "generator"
        given = make_pieces(range(world.rank, 8, world.size), step, 4 // world.size)
        trainee.update(given if generator else pieces(world, step), step)
        found = trainee.scalars()
        with evaluating([trainee]):  # with other weights, which must not be used in the next step
            batch, draw = (make_pieces(range(4), 0, 4) if generator else pieces(World(SINGLE, world.device), 0))[0]
            values = trainee.task.held_out(batch, draw)["loss"]
        rows.append((found["loss"], found["grad_norm"], values.mean().item()))
    return torch.tensor(rows, dtype=torch.float64)

def compare(name, world, other, precision, first=1e-5, later=1e-5, **settings):
    # With whole weights in the world ``other``.
    build, task = CASES[name]
    one = Trainee(task(build_shared(build, other), other), SLOW, precision, other)
    model = make_sharded(build, world, precision=precision, **settings)
    used = {{}}
    for key, layer in model.named_modules():
        if list(layer.parameters(recurse=False)):
            layer.register_forward_pre_hook(
                lambda layer, _, key=key: used.update({{key: next(layer.parameters(recurse=False)).dtype}})
            )
    sharded = Trainee(task(model, world), SLOW, precision, world)
    found = steps(sharded, world, name)
    expected = world.broadcast(steps(one, other, name) if other is world or world.is_main else None)
    errors = ((found - expected) / expected).abs()
    compared = errors if precision == "fp32" else errors[:, :1]  # AdamW turns rounding of small gradients into steps
    assert errors[0, :2].max() <= first and compared.max() <= later, (name, errors)
    assert max(world.gather(held(sharded))) <= 0.6 * world.broadcast(held(one)), name
    return model, used

def main():
    alone = World(SINGLE, torch.device("cpu"))
    {body}
    world.print("fine")
main()
"""


def test_every_network_trains_as_on_one_process():
    """Cached gradients and a parameter that cannot be divided, blocks that run several times, weights that are used
    without a call of their layer, text that is encoded apart."""
    body = """
        for name in CASES:
            model, _ = compare(name, world, alone, "fp32", reshard_after_forward=name != "classifier")
            whole = [key for key, each in model.named_parameters() if not is_sharded(each)]
            assert whole == (["scale_logit"] if name == "classifier" else []), (name, whole)
    """
    assert "fine" in run_ranks_of(2, NETWORKS.format(body=body.strip()))


@pytest.mark.slow
def test_half_precision_gathers_what_autocast_halves():
    """The results of two processes with whole weights; norms and layers that compute in fp32 have theirs in fp32."""
    body = """
        for name in ("generator", "stage c"):
            _, used = compare(name, world, world, "bf16", first=1e-4, later=5e-3)
            half = {key for key, dtype in used.items() if dtype is torch.bfloat16}
            full = {key.rpartition(".")[2] for key in used.keys() - half}
            assert len(half) >= 10 and not any("norm" in key or "mappers" in key for key in half), half
            assert {"out_conv", "token_emb", "norm"} <= full, full
    """
    assert "fine" in run_ranks_of(2, NETWORKS.format(body=body.strip()))
