"""Fixtures of the training side."""

from support.training_fixtures import make_config, model_path

__all__ = ["make_config", "model_path"]
