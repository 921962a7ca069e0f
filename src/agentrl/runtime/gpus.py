"""The GPUs of this machine, as `nvidia-smi` names them; torch is not imported.

Input: the system, and `CUDA_VISIBLE_DEVICES`, which may show this process only some of them.
"""

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

VISIBLE = "CUDA_VISIBLE_DEVICES"
_QUERY = ["--query-gpu=name,memory.total,memory.used", "--format=csv,noheader,nounits"]
_TIMEOUT_SECONDS = 10.0
_DEVICE_FILE = re.compile(r"nvidia\d+")


@dataclass(frozen=True)
class Gpu:
    """One GPU; its memory is unknown where only its device file was found."""

    name: str
    total_mib: int | None = None
    used_mib: int | None = None


@dataclass(frozen=True)
class GpuModel:
    """The properties of a GPU model."""

    name: str
    memory_mib: int
    """As reported by nvidia-smi."""
    tflops: float
    """Dense bfloat16 peak."""


GPU_MODELS = (
    GpuModel("B200", 183_359, 2250),
    GpuModel("H200", 143_771, 989),
    GpuModel("H100 PCIe", 81_559, 756),
    GpuModel("H100 NVL", 95_830, 835),
    GpuModel("H100", 81_559, 989),
    GpuModel("A100", 81_920, 312),
    GpuModel("L40S", 46_068, 362),
    GpuModel("RTX 4090", 24_564, 165),
)
"""From the vendor's data sheets. The first whose name is in the device's name wins, so variants precede
the plain name."""


def gpu_model(device_name: str) -> GpuModel | None:
    """Return the model of a device, or None if it is unknown."""
    name = device_name.lower()
    return next((model for model in GPU_MODELS if model.name.lower() in name), None)


def machine_gpus() -> list[Gpu]:
    """Return all GPUs of the machine in the order of `nvidia-smi` (by PCI bus)."""
    program = shutil.which("nvidia-smi")
    if program is not None:
        try:
            result = subprocess.run(
                [program, *_QUERY],
                capture_output=True,
                text=True,
                timeout=_TIMEOUT_SECONDS,
                check=False,
            )
        except (subprocess.TimeoutExpired, OSError):
            return []
        if result.returncode != 0:
            return []
        return [_gpu(line) for line in result.stdout.splitlines() if line.strip()]
    # Containers may lack the program.
    devices = [path for path in Path("/dev").glob("nvidia*") if _DEVICE_FILE.fullmatch(path.name)]
    return [Gpu("GPU") for _ in devices]


def smallest_gpu_bytes() -> int | None:
    """Return the memory of the smallest GPU, which decides because all ranks hold equal shares.

    Returns:
        The bytes; None if `nvidia-smi` names none.
    """
    sizes = [gpu.total_mib << 20 for gpu in machine_gpus() if gpu.total_mib]
    return min(sizes, default=None)


def visible_gpus(count: int | None = None) -> tuple[str, ...]:
    """Return the GPUs that this process may use, by their names in CUDA_VISIBLE_DEVICES."""
    value = os.environ.get(VISIBLE)
    names = None if value is None else _visible_names(value)
    if count is not None:
        # A user who plans for another machine may request more GPUs than this one has.
        return names[:count] if names and len(names) >= count else _indices(count)
    return _indices(len(machine_gpus())) if names is None else names


def seen_gpus() -> list[Gpu]:
    """Return the GPUs that `CUDA_VISIBLE_DEVICES` shows; none if it names them by anything but index."""
    gpus, names = machine_gpus(), visible_gpus()
    if not all(name.isdecimal() and int(name) < len(gpus) for name in names):
        return []
    return [gpus[int(name)] for name in names]


def _visible_names(value: str) -> tuple[str, ...]:
    """Return the names before the first one that CUDA treats as the end (`-1`, or empty)."""
    names = [name.strip() for name in value.split(",")]
    ends = [number for number, name in enumerate(names) if name.startswith("-") or not name]
    return tuple(names[: ends[0]] if ends else names)


def _indices(count: int) -> tuple[str, ...]:
    return tuple(str(number) for number in range(count))


def _gpu(line: str) -> Gpu:
    name, *memory = (part.strip() for part in line.rsplit(",", 2))
    total, used = (int(part) if part.isdecimal() else None for part in [*memory, "", ""][:2])
    return Gpu(name, total, used)
