"""`agentrl export`."""

from collections.abc import Sequence
from pathlib import Path

from agentrl.config.loading import parse_flags
from agentrl.errors import ConfigError


def main(argv: Sequence[str]) -> int:
    """Write the newest checkpoint's adapter, added into its base model, as one model."""
    config = parse_flags(argv)
    from transformers.utils.logging import disable_progress_bar

    from agentrl.launcher.evaluation_run import newest_checkpoint
    from agentrl.models.adapter_files import is_adapter, read_shape
    from agentrl.models.lora import merge_adapter
    from agentrl.models.resolve import resolve_model

    disable_progress_bar()  # type: ignore[no-untyped-call]
    adapter = newest_checkpoint(config.run.output_path)
    if not is_adapter(adapter):
        raise ConfigError(f"{adapter} holds all weights already")
    is_moved = "model_name_or_path" in config.model.model_fields_set
    base = config.model.model_name_or_path if is_moved else read_shape(adapter).base
    target: Path = merge_adapter(adapter, resolve_model(base), config.run.output_path / "merged")
    print(f"{adapter} and {base} are one model in {target}")
    return 0
