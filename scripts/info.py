"""Say what is in a checkpoint file, or what a network with these settings costs, without allocating it."""

from diff_dalle.distributed import run_script
from diff_dalle.info_run import describe, parse_any


def main():
    print(describe(parse_any(__doc__)))


if __name__ == "__main__":
    run_script(main)
