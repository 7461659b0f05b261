"""Sample images from a generator's checkpoint."""

import functools

import help_without_torch  # noqa: F401

from diff_dalle import storage
from diff_dalle.checkpoints.run_folder import choose_logdir
from diff_dalle.commands.command_line import parse
from diff_dalle.commands.sample import SampleRun
from diff_dalle.commands.sample_inputs import read_request
from diff_dalle.commands.sample_outputs import write_results
from diff_dalle.distributed.launch import launch, run_script
from diff_dalle.sampling.pipeline import load


def main():
    run = parse(SampleRun, description=__doc__)
    what = run.what
    with launch(run.distributed) as world:
        if world.is_main:
            logdir = choose_logdir(what.logdir)
            storage.make_dirs(logdir)  # raises now, not after sampling, if the folder cannot be written
        request = read_request(what, run.edit, run.steering)
        paths = run.upsamplers.upsampler_paths
        pipeline = load(
            what.model_path,
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
        if run.classifier.classifier_path:  # only checked here; its stage loads it for its part of the work
            adapters = what.lora, what.accept_changed_base
            run.classifier.load(world.device, what.precision, what.bpe_path, *adapters).check(run.classifier_model)
        sweep, say = {}, functools.cache(functools.partial(print, flush=True))
        for scale in run.classifier.scales:
            images = pipeline.sample_stages(request, run.settings(pipeline, scale), world=world, tell=say)[-1]
            sweep[f"classifier_scale_{scale:g}"] = images
        if world.is_main:
            print(write_results(logdir, request, sweep))


if __name__ == "__main__":
    run_script(main)
