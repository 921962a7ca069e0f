"""`agentrl verify merge`."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from agentrl.config.flags import canonical_name
from agentrl.config.loading import parse_flags
from agentrl.config.sections import RootConfig
from agentrl.errors import ConfigError


@dataclass
class _Options:
    """Flags of this command alone."""

    trees: int = 8
    dtype: str = "float64"
    as_json: bool = False


def main(argv: Sequence[str]) -> int:
    """Compare gradients of merged and separate turns; exit status 1 when they differ."""
    action, flags = (argv[0], argv[1:]) if argv and not argv[0].startswith("--") else ("", argv)
    options, rest = _own_options(flags)
    config = parse_flags(rest)
    if action != "merge":
        raise ConfigError(
            "say `agentrl verify merge [--seed S] [--trees N] [--dtype float64] [--json]`"
        )
    return _verify_merge(config, options)


def _own_options(flags: Sequence[str]) -> tuple[_Options, list[str]]:
    options, rest = _Options(), list[str]()
    remaining = iter(flags)
    for flag in remaining:
        typed, has_value, value = flag.partition("=")
        name = canonical_name(typed) if flag.startswith("--") else ""
        if name == "json" and not has_value:
            options.as_json = True
        elif name in ("trees", "dtype"):
            value = value if has_value else next(remaining, "")
            if name == "dtype":
                options.dtype = value
            elif value.isdecimal() and int(value) > 0:
                options.trees = int(value)
            else:
                raise ConfigError(f"--trees wants a number of at least 1, got {value!r}")
        else:
            rest.append(flag)
    if options.dtype not in ("float64", "float32"):
        raise ConfigError(f"--dtype is float64 or float32, got {options.dtype!r}")
    return options, rest


def _verify_merge(config: RootConfig, options: _Options) -> int:
    import torch
    from transformers.utils.logging import disable_progress_bar

    from agentrl.distributed import Ranks
    from agentrl.models.load import load_policy
    from agentrl.models.resolve import resolve_model
    from agentrl.trainer.learner.merge_check import check_random_trees, small_random_policies

    disable_progress_bar()  # type: ignore[no-untyped-call]
    if config.trainer.trainer_threads is not None:
        torch.set_num_threads(config.trainer.trainer_threads)
    dtype, device = getattr(torch, options.dtype), Ranks().device
    if "model_name_or_path" in config.model.model_fields_set:
        model = config.model.model_name_or_path
        path = resolve_model(model)
        trust = config.model.trust_remote_code
        policies = [load_policy(path, dtype=dtype, device=device, trust_remote_code=trust)]
    else:
        model = "random Qwen3 and Llama of two layers"
        policies = small_random_policies(dtype, device)
    found = check_random_trees(policies, seed=config.run.seed, trees=options.trees)
    report = {
        **asdict(found),
        "equal": found.is_equal,
        "dtype": options.dtype,
        "seed": config.run.seed,
        "model": model,
    }
    if options.as_json:
        print(json.dumps(report))
    else:
        print(
            f"{found.trees} random trees, {model}, {options.dtype}: "
            f"{found.tokens_separate} tokens as {found.tokens_merged}; largest relative gradient "
            f"error {found.max_relative_gradient_error:.2g}, "
            f"{'within' if found.is_equal else 'BEYOND'} {found.tolerance:g}"
        )
    return 0 if found.is_equal else 1
