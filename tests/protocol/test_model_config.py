"""What both planes read of a model's config.json, and what they refuse by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from protocol.model_config import ModelConfig, ModelConfigError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 4,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


def read(tmp_path: Path, config: dict[str, Any], generation: dict[str, Any] | None = None) -> ModelConfig:
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return ModelConfig.from_folder(tmp_path)


def test_a_llama_is_one_group_of_full_attention(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA)
    assert (config.head_dim, config.num_kv_heads, config.eos_token_ids) == (64, 3, (2,))
    (group,) = config.cache_groups
    assert (group.sliding_window, group.layer_ids, group.num_kv_heads, group.head_dim) == (0, (0, 1, 2, 3), 3, 64)


def test_a_mistral_with_a_window_is_one_window_group(tmp_path: Path) -> None:
    config = read(tmp_path, {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 4096})
    assert config.windows == (4096,)


def test_layers_of_two_kinds_are_two_groups_full_first(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    config = read(
        tmp_path,
        {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 128, "layer_types": kinds},
    )
    assert [(group.sliding_window, group.layer_ids) for group in config.cache_groups] == [(0, (1, 3)), (128, (0, 2))]


def test_generation_config_names_the_stop_ids(tmp_path: Path) -> None:
    assert read(tmp_path, LLAMA, {"eos_token_id": [2, 7]}).eos_token_ids == (2, 7)


def test_any_other_fact_is_another_fingerprint(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"vocab_size": 49153},
        {"num_hidden_layers": 5},
        {"num_key_value_heads": 9},
        {"rope_theta": 10000},
        {"eos_token_id": 3},
        {"rms_norm_eps": 1e-6},
    ]
    fingerprints = {read(tmp_path, {**LLAMA, **change}).fingerprint for change in changes}
    assert len(fingerprints) == len(changes)
    assert read(tmp_path, LLAMA).fingerprint == read(tmp_path, LLAMA).fingerprint


def test_a_folder_without_config_is_no_model_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"holds no config\.json"):
        ModelConfig.from_folder(tmp_path)


def test_an_unsupported_architecture_is_named_with_the_supported(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match="'GPT2LMHeadModel' is not supported; supported are LlamaForCausalLM"):
        read(tmp_path, {**LLAMA, "architectures": ["GPT2LMHeadModel"]})


@pytest.mark.parametrize("field", ["vocab_size", "hidden_size", "num_hidden_layers", "rms_norm_eps"])
def test_a_missing_field_is_named(tmp_path: Path, field: str) -> None:
    config = {name: value for name, value in LLAMA.items() if name != field}
    with pytest.raises(ModelConfigError, match=f"lacks the field '{field}'"):
        read(tmp_path, config)


def test_a_file_that_is_no_json_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelConfigError, match=r"config\.json cannot be read"):
        ModelConfig.from_folder(tmp_path)
