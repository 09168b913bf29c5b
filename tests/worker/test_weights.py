"""Weights of a folder: whole, sharded, of any float type; and errors that name the tensor or file."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from protocol.model_config import ModelConfig
from tests.tiny_model import tiny_model
from worker.models import build_model
from worker.models.llama import LlamaModel
from worker.weights import DummyWeights, FolderWeights, WeightError, open_weights

TENSORS = {"a.weight": torch.arange(6.0).view(2, 3), "b.weight": torch.ones(4, dtype=torch.bfloat16)}
EXPECTED = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_file(TENSORS, tmp_path / "model.safetensors")
    return tmp_path


def shard(folder: Path) -> None:
    """Each tensor in a file of its own, with an index."""
    names = {}
    for number, (name, tensor) in enumerate(TENSORS.items()):
        names[name] = f"model-{number}.safetensors"
        save_file({name: tensor}, folder / names[name])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))


def test_tensors_come_as_stored_and_bytes_are_counted(folder: Path) -> None:
    done: list[int] = []
    source = FolderWeights(folder, on_bytes=done.append)
    source.check(EXPECTED)
    for name, tensor in TENSORS.items():
        taken = source.take(name, EXPECTED[name])
        assert taken.dtype is tensor.dtype
        assert torch.equal(taken, tensor)
    assert done == [24, 32]
    assert source.total_bytes >= 32


def test_an_index_tells_which_files_count(tmp_path: Path) -> None:
    shard(tmp_path)
    save_file({"stray": torch.ones(1)}, tmp_path / "other.safetensors")
    source = FolderWeights(tmp_path)
    source.check(EXPECTED)
    assert torch.equal(source.take("b.weight", (4,)), TENSORS["b.weight"])


def test_missing_shard_is_named(tmp_path: Path) -> None:
    shard(tmp_path)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(WeightError, match=r"model-1\.safetensors"):
        FolderWeights(tmp_path)


def test_broken_index_is_named(tmp_path: Path) -> None:
    shard(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(WeightError, match=r"index\.json"):
        FolderWeights(tmp_path)


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(WeightError, match="no weights"):
        FolderWeights(tmp_path)


def test_truncated_file_is_named(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(WeightError, match=r"model\.safetensors"):
        FolderWeights(folder)


def test_missing_tensor_is_named(folder: Path) -> None:
    with pytest.raises(WeightError, match=r"lacks c\.weight"):
        FolderWeights(folder).check(EXPECTED | {"c.weight": (1,)})


def test_unexpected_tensor_is_named(folder: Path) -> None:
    with pytest.raises(WeightError, match=r"has not: b\.weight"):
        FolderWeights(folder).check({"a.weight": (2, 3)})


def test_wrong_shape_is_named_with_both_shapes(folder: Path) -> None:
    with pytest.raises(WeightError, match=r"a\.weight .*\(2, 3\), expected \(3, 2\)"):
        FolderWeights(folder).check(EXPECTED | {"a.weight": (3, 2)})


def test_quantised_weights_are_refused(tmp_path: Path) -> None:
    save_file({"q.weight": torch.ones(2, dtype=torch.int8)}, tmp_path / "model.safetensors")
    with pytest.raises(WeightError, match=r"q\.weight .*int8"):
        FolderWeights(tmp_path).take("q.weight", (2,))


def test_buffers_of_old_checkpoints_and_a_tied_head_do_not_disturb(tmp_path: Path) -> None:
    embedding = torch.ones(3, 2)
    save_file(
        {
            "model.embed_tokens.weight": embedding,
            "lm_head.weight": embedding.clone(),
            "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(2),
        },
        tmp_path / "model.safetensors",
    )
    FolderWeights(tmp_path).check({"model.embed_tokens.weight": (3, 2)})


def test_dummy_weights_depend_on_seed_and_name_not_on_order() -> None:
    one, two = DummyWeights(1), DummyWeights(1)
    first, second = one.take("x", (3, 3)), one.take("y", (3, 3))
    assert torch.equal(two.take("y", (3, 3)), second)
    assert torch.equal(two.take("x", (3, 3)), first)
    assert not torch.equal(first, second)
    assert not torch.equal(DummyWeights(2).take("x", (3, 3)), first)
    assert torch.equal(one.take("model.norm.weight", (2,)), torch.ones(2, dtype=torch.bfloat16))


def test_large_dummy_weights_have_rows_of_their_own() -> None:
    weight = DummyWeights(1).take("x", (1200, 1024))
    assert len({tuple(row[:8].tolist()) for row in weight}) == 1200
    assert weight.float().std().item() == pytest.approx(0.02, rel=0.01)


def test_unknown_load_format_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="'magic'"):
        open_weights(folder, load_format="magic")


def test_model_with_a_missing_layer_is_refused_before_anything_is_read() -> None:
    folder = tiny_model("llama")
    config = ModelConfig.from_folder(folder)
    deeper = msgspec.structs.replace(config, num_layers=3, layer_windows=(0, 0, 0))
    read: list[int] = []
    with pytest.raises(WeightError, match=r"model\.layers\.2\..* more"):
        build_model(deeper, open_weights(folder, on_bytes=read.append), torch.float32, "cpu")
    assert read == []


def test_expected_tensors_are_those_of_the_files() -> None:
    for kind in ("llama", "llama-tied", "llama-bias", "qwen2", "qwen3"):
        folder = tiny_model(kind)
        open_weights(folder).check(LlamaModel.tensor_shapes(ModelConfig.from_folder(folder)))
