"""The command line of launch.py and what it becomes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from protocol.config import EngineConfig
from supervisor.flags import parse
from supervisor.prepare import StartFailed, complete

MODEL = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 260, "hidden_size": 8, "intermediate_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 16384, "rms_norm_eps": 1e-5,
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    model = tmp_path / "Tiny-b179c9523d0e-v1"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL))
    return model


def test_no_flags_are_the_defaults() -> None:
    assert parse([]).config == EngineConfig()


def test_every_flag_reaches_its_setting(tmp_path: Path) -> None:
    line = (
        "--model m --workers 3 --device cpu --attention-backend torch --dtype bfloat16 --block-size 32 --kv-memory 1G "
        "--max-model-len 100 --max-num-seqs 8 --max-num-batched-tokens 64 --max-step-stretch 3 "
        "--no-enable-prefix-caching --seed 5 --load-format dummy --quantization int8 --log-level debug "
        "--threads-per-worker 2 --enforce-eager --no-lend-cores "
        "--transport tcp --ready-file r --host 0.0.0.0 --port 80 --api-key k --no-gateway"
    )
    options = parse(line.split())
    assert options.ready_file == Path("r")
    assert options.config == EngineConfig(
        model="m", workers=3, device="cpu", attention_backend="torch", dtype="bfloat16", block_size=32, kv_memory="1G",
        max_model_len=100, max_num_seqs=8, max_num_batched_tokens=64, max_step_stretch=3.0,
        enable_prefix_caching=False, seed=5,
        load_format="dummy", quantization="int8", log_level="debug", threads_per_worker=2, enforce_eager=True,
        lend_cores=False,
        transport="tcp", host="0.0.0.0", port=80, api_key="k", gateway=False,
    )  # fmt: skip


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('workers = 5\nblock_size = 8\ndevice = "cpu"\n')
    config = parse(["--config", str(file), "--workers", "1"]).config
    assert (config.workers, config.block_size, config.device) == (1, 8, "cpu")


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--bogus"], "unrecognized arguments: --bogus"),
        (["--worker", "2"], "unrecognized arguments: --worker 2"),  # no abbreviations
        (["--workers", "0"], "workers must be at least 1, got 0"),
        (["--workers", "two"], "invalid int value: 'two'"),
        (["--device", "tpu"], "invalid choice: 'tpu'"),
        (["--kv-memory", "much"], "'much' is no amount of memory"),
        (["--max-num-batched-tokens", "8"], "max_num_batched_tokens (8) must be at least max_num_seqs (64)"),
        (["--config", "missing.toml"], "configuration missing.toml: "),
    ],
)
def test_wrong_flag_is_named(arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(arguments)
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err


def test_unknown_key_of_the_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("wrokers = 5\n")
    with pytest.raises(SystemExit):
        parse(["--config", str(file)])
    assert "unknown setting 'wrokers'" in capsys.readouterr().err


def test_nothing_is_left_open(folder: Path) -> None:
    config = complete(EngineConfig(), folder)
    assert (config.model, config.model_name, config.max_model_len) == (str(folder), "Tiny", 8192)
    assert config.threads_per_worker >= 1


def test_cores_are_lent_where_no_worker_has_those_of_another(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("supervisor.prepare.available_cores", lambda: 4)
    for workers, threads, lend in [
        (2, 0, True),
        (4, 0, True),
        (2, 2, True),
        (2, 3, False),
        (5, 0, False),
        (1, 0, False),
    ]:
        config = complete(EngineConfig(workers=workers, threads_per_worker=threads), folder)
        assert config.lend_cores is lend, (workers, threads)
    assert not complete(parse(["--no-lend-cores"]).config, folder).lend_cores


def test_hub_id_stays_the_name(folder: Path) -> None:
    assert complete(EngineConfig(model="org/name"), folder).model_name == "org/name"


def test_length_beyond_the_model_is_refused(folder: Path) -> None:
    assert complete(EngineConfig(max_model_len=16384), folder).max_model_len == 16384
    with pytest.raises(StartFailed, match=r"--max-model-len 16385 is more than the model can do \(16384\)"):
        complete(EngineConfig(max_model_len=16385), folder)
