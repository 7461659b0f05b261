"""Bundled models, a folder each: see ``checkpoints/model_folder.py``. ``diff_dalle.models()`` lists them."""
