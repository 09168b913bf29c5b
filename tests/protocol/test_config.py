"""Settings: typed, checked, and wrong ones named."""

from __future__ import annotations

from pathlib import Path

import pytest

from protocol.config import ConfigError, EngineConfig, parse_bytes


def test_a_configuration_survives_its_file(tmp_path: Path) -> None:
    config = EngineConfig(model="/m", workers=3, block_size=8, kv_memory="512MiB", enable_prefix_caching=False)
    config.save(tmp_path / "config.json")
    assert EngineConfig.load(tmp_path / "config.json") == config


def test_flags_go_before_the_toml_file(tmp_path: Path) -> None:
    path = tmp_path / "pageplane.toml"
    path.write_text('workers = 4\nblock_size = 32\nkv_memory = "1GiB"\n')
    config = EngineConfig.from_toml(path, {"workers": 1})
    assert (config.workers, config.block_size, config.kv_memory) == (1, 32, "1GiB")


def test_an_unknown_setting_is_named_with_its_source(tmp_path: Path) -> None:
    path = tmp_path / "pageplane.toml"
    path.write_text("wrokers = 4\n")
    with pytest.raises(ConfigError, match=r"pageplane\.toml.*'wrokers'"):
        EngineConfig.from_toml(path, {})
    with pytest.raises(ConfigError, match=r"flags: unknown setting 'speed'"):
        EngineConfig.from_dict({"speed": 11})


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"block_size": 0}, "block_size must be at least 1"),
        ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
        ({"pipeline_depth": 0}, "pipeline_depth must be at least 1"),
        ({"max_waiting": 0}, "max_waiting must be at least 1"),
        ({"max_model_len": -1}, "max_model_len must be at least 0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be at least 1"),
        ({"max_step_stretch": 0.9}, "max_step_stretch must be above 1, or 0 for none"),
        ({"max_step_stretch": float("nan")}, "max_step_stretch must be above 1, or 0 for none"),
        ({"max_num_batched_tokens": 63}, r"max_num_batched_tokens \(63\) must be at least max_num_seqs \(64\)"),
        ({"watermark": 1.0}, r"watermark must be in \[0, 1\), got 1.0"),
        ({"watermark": -0.1}, "watermark"),
        ({"heartbeat_timeout_s": 0.0}, "heartbeat_timeout_s must be positive"),
        ({"kv_memory": "lots"}, "'lots' is no amount of memory"),
        ({"workers": "two"}, "workers"),
        ({"workers": 1.5}, "workers"),
        ({"device": "tpu"}, "device"),
        ({"dtype": "int4"}, "dtype"),
        ({"enable_prefix_caching": "yes"}, "enable_prefix_caching"),
    ],
)
def test_a_wrong_value_is_named(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        EngineConfig.from_dict(settings)


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b'{"workers": "x"}', b'{"unknown": 1}'])
def test_a_file_that_is_no_configuration_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        EngineConfig.load(path)


def test_a_toml_file_that_is_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("workers = = 4")
    with pytest.raises(ConfigError, match=r"bad\.toml"):
        EngineConfig.from_toml(path, {})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1000000", 1_000_000),
        ("2G", 2 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5 GiB", 3 * 2**29),
        ("10kb", 10_000),
        (" 4 KiB ", 4096),
    ],
)
def test_amounts_of_memory(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "-1", "1T", "MiB", "1 2", "0x10", "1e9", "nan"])
def test_what_is_no_amount_of_memory_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="no amount of memory"):
        parse_bytes(text)
