import os

# Tests are many small computations: one thread each is faster, and leaves the other core to a second process.
os.environ.setdefault("OMP_NUM_THREADS", "1")
