"""Train a noised CLIP, which tells how well a noisy image fits a caption, on shards of captioned images."""

from diff_dalle.command_line import parse
from diff_dalle.config import to_dict
from diff_dalle.diffusion.diffusion_config import create_noise_process
from diff_dalle.distributed import launch, run_script
from diff_dalle.tasks.classifier_run import ClassifierRun
from diff_dalle.tasks.contrastive import ContrastiveTask
from diff_dalle.tracking.tracker import Tracker
from diff_dalle.tracking.trackers import create_trackers
from diff_dalle.training.checkpoint import choose_logdir, open_run
from diff_dalle.training.loop import TrainLoop
from diff_dalle.training.trainee import Trainee


def main():
    run = parse(ClassifierRun, description=__doc__)
    with launch(run.distributed) as world:
        run.check_batch(world)
        logdir = world.broadcast(choose_logdir(run.training.logdir) if world.is_main else None)
        world.print(f"Logs and checkpoints: {logdir}")

        tokenizer = run.build_tokenizer()
        data = run.build_loader(tokenizer, world)
        held_out = run.build_held_out(tokenizer, world)
        folder = world.broadcast(open_run(logdir, run.identity(tokenizer), ClassifierRun) if world.is_main else None)

        process = create_noise_process(run.diffusion)
        task = ContrastiveTask(run.build_model(tokenizer), process, run.contrastive, world)
        trainee = Trainee(task, run.optim, run.training.precision, world)

        loop = TrainLoop(run.training, [trainee], data, folder, world, held_out)
        tracker = Tracker()
        if world.is_main:
            tracker = create_trackers(run.tracking, logdir, to_dict(run), loop.step, loop.total_steps)
        loop.run(tracker)
        world.print(f"Trained for {loop.step:,} steps. Logs and checkpoints: {logdir}")


if __name__ == "__main__":
    run_script(main)
