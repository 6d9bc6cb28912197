"""The parts of `train_lm.py` that know nothing of sharding: the model, the text, the report."""
