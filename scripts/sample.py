"""Sample images from a generator's checkpoint."""

import functools

import help_without_torch  # noqa: F401

from diff_dalle import storage
from diff_dalle.checkpoints.run_folder import choose_logdir
from diff_dalle.commands.command_line import parse
from diff_dalle.commands.sample import SampleRun
from diff_dalle.commands.sample_inputs import labeled, read_request
from diff_dalle.commands.sample_outputs import write_results
from diff_dalle.distributed.launch import launch, run_script
from diff_dalle.sampling.pipeline import load


def main():
    run = parse(SampleRun, description=__doc__)
    what = run.what
    with launch(run.distributed) as world:
        request = read_request(what, run.edit, run.steering)
        model_path, paths = run.checkpoints
        pipeline = load(
            model_path,
            world.device,
            what.precision,
            what.bpe_path,
            upsampler_paths=paths,
            stage_b=run.cascade.stage_b,
            stage_a=run.cascade.stage_a,
            semantic=run.cascade.semantic,
            clip_make=what.clip_make or "",
            clip_path=what.clip_path,
            lora=what.lora,
            accept_changed_base=what.accept_changed_base,
            controlnet=run.steering.controlnet,
        )
        pipeline.check(run.model)
        pipeline.check(run.diffusion)
        adapters = what.lora, what.accept_changed_base
        guide = run.classifier.load(world.device, what.precision, what.bpe_path, *adapters)  # its weights when used
        if guide is not None:
            guide.check(run.classifier_model)
        request = labeled(request, what, pipeline, guide if any(run.classifier.scales) else None)
        logdir = choose_logdir(what.logdir, "samples") if world.is_main else ""

        @functools.cache
        def say(line):
            """Called when everything is found right; a folder that cannot be written is told before sampling."""
            storage.make_dirs(logdir)
            print(line, flush=True)

        sweep = {}
        for scale in run.classifier.scales:
            settings = run.settings(pipeline, scale, guide)
            images = pipeline.sample_stages(request, settings, world=world, tell=say)[-1]
            sweep[f"classifier_scale_{scale:g}"] = images
        if world.is_main:
            print(write_results(logdir, request, sweep))


if __name__ == "__main__":
    run_script(main)
