"""GGUF files as checkpoints: transformers converts them to bfloat16, once, into the user's cache.

As a program, it converts a file into a directory; commands do not import torch.
"""

import hashlib
import sys
from pathlib import Path
from typing import Any

from agentrl.errors import ConfigError
from agentrl.models.checkpoints.packaged_model import made_once, model_cache, run_python


def gguf_of(path: Path, given: str) -> Path | None:
    """Return the GGUF file that `path` is or, as a directory without config.json, holds."""
    files = [path] if path.suffix == ".gguf" and path.is_file() else []
    if path.is_dir() and not (path / "config.json").is_file():
        # Others of this name hold only the image encoder of a model.
        files = sorted(file for file in path.glob("*.gguf") if not file.name.startswith("mmproj"))
    if len(files) > 1:
        raise ConfigError(f"{given}: the directory has several models; name one GGUF file")
    return files[0] if files else None


def converted(file: Path, given: str) -> Path:
    """Return the directory of a GGUF file's checkpoint, which is written at the first call."""
    file = file.absolute()
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ConfigError(f"{given}: {file.name} is not a GGUF file; download it again")
    status = file.stat()
    facts = f"{file} {status.st_size} {status.st_mtime_ns} save_pretrained"
    target = model_cache() / f"{file.stem}-{hashlib.sha256(facts.encode()).hexdigest()[:12]}"

    def make(folder: Path) -> None:
        problem = run_python("-m", "agentrl.models.checkpoints.gguf", str(file), str(folder))
        if problem is not None:
            raise ConfigError(
                f"{given}: transformers cannot convert it ({problem}); use the model's original in "
                "safetensors"
            )

    return made_once(target, f"converting {file.name} to bfloat16", make)


def _convert(file: Path, folder: Path) -> None:
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    options: dict[str, Any] = {"gguf_file": file.name}
    transformers.AutoTokenizer.from_pretrained(file.parent, **options).save_pretrained(folder)
    if hasattr(transformers, "GgufConfig"):  # earlier versions always dequantize
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    model = transformers.AutoModelForCausalLM.from_pretrained
    model(file.parent, dtype=torch.bfloat16, **options).save_pretrained(folder)


if __name__ == "__main__":
    _convert(Path(sys.argv[1]), Path(sys.argv[2]))
