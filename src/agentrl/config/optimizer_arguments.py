"""`--optim_args`: AdamW's betas and eps, parsed from the flag's text."""

from dataclasses import dataclass

from agentrl.errors import ConfigError


@dataclass(frozen=True)
class OptimizerArguments:
    """The values of `--optim_args`."""

    beta1: float = 0.9
    beta2: float = 0.98
    eps: float = 1e-8


def parse_optim_args(text: str) -> OptimizerArguments:
    """Parse `beta1=0.9,beta2=0.98,eps=1e-8`; omitted values keep their defaults."""
    values: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = (piece.strip() for piece in part.partition("="))
        # Hugging Face spells them adam_beta1, adam_beta2 and adam_epsilon.
        name = name.removeprefix("adam_").replace("epsilon", "eps")
        if name not in OptimizerArguments.__dataclass_fields__:
            raise ConfigError(f"--optim_args: unknown name {name!r}; known: beta1, beta2, eps")
        try:
            values[name] = float(value)
        except ValueError:
            raise ConfigError(f"--optim_args: {name}={value!r} is not a number") from None
    arguments = OptimizerArguments(**values)
    if not (0 <= arguments.beta1 < 1 and 0 <= arguments.beta2 < 1 and arguments.eps > 0):
        raise ConfigError(f"--optim_args {text}: betas must lie in [0, 1) and eps above 0")
    return arguments
