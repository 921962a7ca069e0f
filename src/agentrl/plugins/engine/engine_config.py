"""Settings of the embedded engine."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, SecretStr


class EngineConfig(BaseModel):
    """Settings that an engine starts with; their docstrings are the help of its flags."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    model_path: str
    """Hugging Face directory: config, safetensors weights and, for text, tokenizer.json."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=30000, ge=0, le=65535)
    """0 chooses a free port and logs it."""
    device: Literal["cpu", "cuda"] | None = None
    """Where the model runs; if not given, on a GPU if this process sees one."""
    dtype: Literal["float32", "bfloat16", "float64"] | None = None
    """Precision of weights and cache; logits and sampling use at least float32. If not given,
    bfloat16 on a GPU and float32 on a CPU.
    """
    weight_version: str = "0"
    """Label of the initial weights."""
    max_running_requests: int = Field(default=64, ge=1)
    """Sequences decoded at the same time."""
    max_queued_requests: int = Field(default=4096, ge=1)
    """Requests that may be queued; more are refused with status 503."""
    context_length: int | None = Field(default=None, ge=2)
    """Longest sequence, prompt and output together; the model's own limit if not given."""
    prefill_tokens_per_step: int | None = Field(default=None, ge=1)
    """Prompt tokens computed per step, which keeps long prompts from delaying decoding. If not given,
    1024, and on a CPU as many of them as take about a second.
    """
    kv_cache_bytes: int = Field(default=2 << 30, ge=1 << 20)
    """Memory for the keys and values of running sequences. One sequence is always admitted."""
    prefix_cache_bytes: int = Field(default=1 << 29, ge=0)
    """Memory for the keys and values of ended sequences, whose prefixes are reused."""
    num_threads: int | None = Field(default=None, ge=1)
    """CPU threads of torch; if not given, one for a tiny model, torch's default otherwise."""
    log_requests: Path | None = None
    """File to which a line with the token ids of every request is written, for comparisons."""
    weight_roots: tuple[Path, ...] = ()
    """Directory below which new weights and adapters may lie; repeatable. None means anywhere."""
    seed: int = 0
    """Seed of requests without their own."""
    api_key: SecretStr | None = None
    """Bearer key of the data routes (and of the control routes without an admin key)."""
    admin_api_key: SecretStr | None = None
    """Bearer key of the control routes."""
