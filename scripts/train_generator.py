"""Train a text-to-image generator (text encoder and U-Net) on shards of captioned images."""

from diff_dalle.command_line import parse
from diff_dalle.config import to_dict
from diff_dalle.diffusion.diffusion_config import create_gaussian_diffusion
from diff_dalle.distributed import launch, run_script
from diff_dalle.tasks.denoising import DenoisingTask
from diff_dalle.tasks.generator_run import GeneratorRun
from diff_dalle.tracking.tracker import Tracker
from diff_dalle.tracking.trackers import create_trackers
from diff_dalle.training.checkpoint import choose_logdir, open_run
from diff_dalle.training.loop import TrainLoop
from diff_dalle.training.trainee import Trainee


def main():
    run = parse(GeneratorRun, description=__doc__)
    with launch(run.distributed) as world:
        logdir = world.broadcast(choose_logdir(run.training.logdir) if world.is_main else None)
        world.print(f"Logs and checkpoints: {logdir}")

        tokenizer = run.build_tokenizer()
        data = run.build_loader(tokenizer, world)
        held_out = run.build_held_out(tokenizer, world)
        folder = world.broadcast(open_run(logdir, run.identity(tokenizer), GeneratorRun) if world.is_main else None)

        process = create_gaussian_diffusion(run.diffusion)
        model = run.build_model(tokenizer)
        previews = run.build_previews(tokenizer, held_out or data)
        task = DenoisingTask(model, process, run.denoising, run.model.unet.num_classes, previews)
        trainee = Trainee(task, run.optim, run.training.precision, world)

        loop = TrainLoop(run.training, [trainee], data, folder, world, held_out, run.preview.sample_interval)
        tracker = Tracker()
        if world.is_main:
            tracker = create_trackers(run.tracking, logdir, to_dict(run), loop.step, loop.total_steps)
        loop.run(tracker)
        world.print(f"Trained for {loop.step:,} steps. Logs and checkpoints: {logdir}")


if __name__ == "__main__":
    run_script(main)
