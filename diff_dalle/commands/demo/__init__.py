"""The chapters of the demo: each trains a system at small scale, samples from it and scores the samples."""
