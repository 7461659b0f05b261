"""What the jobs of the tests of sharding share, after the preamble of test_parallel."""

SHARDED = """
import dataclasses, hashlib, os
from toy import ListTracker
from diff_dalle.checkpoints.checkpoint import Identity
from diff_dalle.checkpoints.run_folder import open_run
from diff_dalle.checkpoints.content import numbered
from diff_dalle.distributed.parallel import is_sharded
from diff_dalle.distributed.sharding import ShardingConfig, build_sharded
from diff_dalle.models.precision import DTYPES
from diff_dalle.models.text_encoder import TextEncoderConfig
from diff_dalle.models.units import parts_of
from diff_dalle.training.loop import TrainLoop
from diff_dalle.training.settings import TrainingConfig

SLOW = dataclasses.replace(CONFIG, lr=1e-3)

def make_network():
    text = TextEncoderConfig(enc_attn_dim=12, enc_depth=1, enc_heads=3, text_length=10)
    return make_generator(text, channel_mult=(1,), attention_resolutions=(16,), use_checkpoint=True, dropout=0.1)

def make_task(model):
    process = create_gaussian_diffusion(DiffusionConfig(50, "cosine"))
    return DenoisingTask(model, process, DenoisingConfig())

def make_sharded(build, world, mode="fsdp", precision="fp32", **settings):
    config = ShardingConfig(mode, **settings)
    return build_sharded(build, lambda network: parts_of(network, DTYPES.get(precision)), world, config)

def train(trainee, world, steps):
    rows = []
    for step in range(steps):
        trainee.update(make_pieces(range(world.rank, 8, world.size), step, 4 // world.size), step)
        found = trainee.scalars()
        rows.append((found["loss"], found["grad_norm"]))
    return torch.tensor(rows, dtype=torch.float64)

def nbytes(tensors):
    return sum(tensor.numel() * tensor.element_size() for tensor in local(tensors))

def held(trainee):
    state = trainee.optimizations[""].optimizer.state.values()
    moments = [value for entry in state for value in entry.values()]
    averages = [value for ema in trainee.emas for value in ema.averages.values()]
    return nbytes([*trainee.task.model.parameters(), *averages, *moments])

class Data:
    samples = 64
    def __init__(self, world):
        self.world = world
    def batches(self, position, should_stop=None):
        while True:
            ((batch, _),) = make_pieces(range(position + self.world.rank, position + 8, self.world.size), 0, 8)
            yield batch
            position += 8

def make_loop(world, folder, mode, seed=0, consolidate=False, **settings):
    def build():
        return randomize(make_network(), seed)
    groups = {"shard_processes": 2} if mode == "hsdp" else {}
    sharded = mode != "ddp" and world.size > 1
    model = make_sharded(build, world, mode, **groups) if sharded else build_shared(build, world)
    if mode == "ddp":
        model = model.to(memory_format=torch.channels_last)
    trainee = Trainee(make_task(model), SLOW, "fp32", world)
    defaults = {"batch_size": 8 // world.size, "iterations": 3, "save_interval": 100, "precision": "fp32"}
    config = TrainingConfig(**{**defaults, **settings}, sharding=ShardingConfig(mode, consolidate=consolidate))
    run = world.broadcast(open_run(folder, Identity("toy", {}), TrainingConfig) if world.is_main else None)
    return TrainLoop(config, [trainee], Data(world), run, world)

def digest(loop):
    # Of all that a checkpoint holds, independent of memory layout.
    outline, tensors = numbered(loop.trainees[0].states())
    found = hashlib.sha256(repr(sorted(str(outline).split())).encode())
    for tensor in tensors:
        whole = tensor.full_tensor() if is_sharded(tensor) else tensor
        found.update(whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return f"{loop.step} {found.hexdigest()}"
"""
