"""Say what is in a checkpoint file, or what a generator with these settings costs, without allocating it."""

from diff_dalle.command_line import parse
from diff_dalle.distributed import run_script
from diff_dalle.info_run import InfoRun, describe


def main():
    print(describe(parse(InfoRun, description=__doc__)))


if __name__ == "__main__":
    run_script(main)
