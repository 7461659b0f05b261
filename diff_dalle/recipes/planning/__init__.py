"""What a training run needs on given GPUs, before it starts: ``info.py plan``."""
