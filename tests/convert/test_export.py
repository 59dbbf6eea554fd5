"""Out and in again: `dstk export` and `dstk import` of Hugging Face models, bit for bit, and what they refuse."""

import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoint import save_tiny, tensors_of
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.cli.main import main
from toolkit.convert.adapters import load_adapted
from toolkit.convert.export_model import export_checkpoint
from toolkit.convert.model_comparison import compare_models
from toolkit.errors import CheckpointError

Run = Callable[..., tuple[int, str, str]]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}
WIDE = {"num_key_value_heads": 2, "intermediate_size": 48, "head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "gpt_neox": {"intermediate_size": 48},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "bloom": {},
    "falcon": {},
    "llama": WIDE,
    "qwen3": WIDE | {"tie_word_embeddings": True},
    "gemma3_text": WIDE,
    "mixtral": WIDE | {"num_local_experts": 4},
}


def build(family: str, folder: Path, *, dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family], pad_token_id=0, bos_token_id=1, eos_token_id=2)
    AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)
    return folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return build("llama", tmp_path / "llama")


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs a command line; gives exit code, stdout and stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capfd.readouterr()  # what fixtures printed
        with pytest.raises(SystemExit) as stopped:
            main([*map(str, arguments)])
        out, err = capfd.readouterr()
        assert isinstance(stopped.value.code, int)
        return stopped.value.code, out, err

    return run


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def config(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = AutoConfig.from_pretrained(folder).to_dict()
    return content | {"_name_or_path": ""}


@pytest.mark.parametrize("family", FAMILIES)
def test_import_and_export_change_no_bit_and_no_logit(run: Run, tmp_path: Path, family: str) -> None:
    source = build(family, tmp_path / "source")
    assert run("import", source, "-o", tmp_path / "in")[0] == 0
    code, out, _ = run("export", tmp_path / "in", "-o", tmp_path / "out", "--verify")
    assert code == 0
    assert "all logits are the same, and the greedy text is the same" in out
    before, after = stored(source), stored(tmp_path / "out")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert config(tmp_path / "out") == config(source)


@pytest.mark.parametrize(("short", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_a_lower_precision_differs_by_rounding_only(
    run: Run, llama: Path, tmp_path: Path, short: str, dtype: torch.dtype
) -> None:
    code, out, err = run("export", llama, "-o", tmp_path / "out", "--dtype", short, "--verify")
    assert (code, err) == (0, "")
    assert f"rounding to {str(dtype).removeprefix('torch.')} explains all of the difference" in out
    before = stored(llama)
    assert all(torch.equal(value, before[name].to(dtype)) for name, value in stored(tmp_path / "out").items())
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == str(dtype).removeprefix("torch.")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").dtype == dtype


def adapters(base: Path, folder: Path, **options: Any) -> Path:
    """Adapters that change the model in `base`, as peft saves them."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=3, lora_alpha=7, target_modules="all-linear", task_type="CAUSAL_LM", **options)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("flags", [[], ["--merge"]], ids=["adapters", "merged"])
@pytest.mark.parametrize(("family", "options"), [("llama", {"use_rslora": True}), ("gpt2", {"use_dora": True})])
def test_exports_of_adapters_are_verified(
    run: Run, tmp_path: Path, family: str, options: dict[str, Any], flags: list[str], dtype: str
) -> None:
    source = adapters(build(family, tmp_path / "base"), tmp_path / "adapters", **options)
    code, out, err = run("export", source, "-o", tmp_path / "out", "--verify", "--dtype", dtype, *flags)
    assert (code, err) == (0, "")
    if dtype == "fp32" and not flags:
        assert "all logits are the same" in out
    else:
        assert re.search(r"logits differ by .* at most \(the largest logit is .*\); the greedy text is", out)
        assert "explains all of the difference" in out


def test_loading_adapters_warns_of_nothing(llama: Path, tmp_path: Path) -> None:
    source = adapters(llama, tmp_path / "adapters")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "lora" in str(load_adapted(source, llama))


@pytest.mark.parametrize("merge", [False, True])
def test_verify_finds_a_wrong_adapter(llama: Path, tmp_path: Path, merge: bool) -> None:
    source = adapters(llama, tmp_path / "adapters")
    export_checkpoint(source, tmp_path / "out", merge=merge)
    (file,) = (tmp_path / "out").glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in sorted(tensors) if "down_proj" in name and ("lora_B" in name or merge))
    tensors[name] = tensors[name].roll(1)
    save_file(tensors, file, metadata={"format": "pt"})
    found = compare_models(source, tmp_path / "out", dtype=torch.float32)
    assert not found.is_explained
    assert found.unexplained_difference > 1e-3


def test_verify_finds_an_adapter_that_is_missing(llama: Path, tmp_path: Path) -> None:
    source = adapters(llama, tmp_path / "adapters")
    export_checkpoint(source, tmp_path / "out")
    (file,) = (tmp_path / "out").glob("*.safetensors")
    tensors = load_file(file)
    name = max(tensors)
    del tensors[name]
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=re.escape(name)):
        compare_models(source, tmp_path / "out", dtype=torch.float32)


def test_verifying_adapters_without_peft_writes_nothing(
    run: Run, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = adapters(llama, tmp_path / "adapters")
    monkeypatch.setattr("toolkit.convert.adapters.find_spec", lambda name: None)
    code, _, err = run("export", source, "-o", tmp_path / "out", "--verify")
    assert code == 2
    assert "peft is not installed" in err
    assert not (tmp_path / "out").exists()


def test_verify_finds_what_rounding_does_not_explain(llama: Path, tmp_path: Path) -> None:
    export_checkpoint(llama, tmp_path / "out", dtype=torch.bfloat16)
    (file,) = (tmp_path / "out").glob("*.safetensors")
    tensors = load_file(file)
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name].roll(1)
    save_file(tensors, file, metadata={"format": "pt"})
    found = compare_models(llama, tmp_path / "out", dtype=torch.bfloat16)
    assert not found.is_explained
    assert found.unexplained_difference > 1e-3


def test_shards_have_all_tensors_and_transformers_loads_them(llama: Path, tmp_path: Path) -> None:
    done = export_checkpoint(llama, tmp_path / "out", max_shard_bytes=20_000)
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) == done.written.files > 1
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == files
    assert compare_models(llama, tmp_path / "out", dtype=torch.float32).logit_difference == 0


def test_a_run_exports_its_newest_complete_checkpoint_without_the_optimizer(run: Run, tmp_path: Path) -> None:
    for step in (5, 10):
        save_tiny(tmp_path / "run", step)
    victim = tmp_path / "run" / "step-00000010" / "trainer_state.json"
    victim.write_bytes(victim.read_bytes().replace(b"x", b"y"))
    code, out, err = run("export", tmp_path / "run", "-o", tmp_path / "out")
    assert code == 0
    assert "step-00000005" in out
    assert err.startswith("note: step-00000010 is damaged: trainer_state.json")
    wanted = tensors_of(5)["model"]
    found = stored(tmp_path / "out")
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
    assert not {"manifest.json", "trainer_state.json", "optimizer"} & {
        path.name for path in (tmp_path / "out").iterdir()
    }


def test_a_run_without_checkpoints_exports_its_model(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    shutil.copytree(llama, tmp_path / "run" / "model")
    assert export_checkpoint(tmp_path / "run", tmp_path / "out").source == tmp_path / "run" / "model"


def test_integers_keep_their_dtype(tmp_path: Path) -> None:
    save_tiny(tmp_path / "run", 5)
    export_checkpoint(tmp_path / "run", tmp_path / "out", dtype=torch.float16)
    found = stored(tmp_path / "out")
    assert found["wte.weight"].dtype == found["h.0.half"].dtype == torch.float16
    assert (found["h.0.mask"].dtype, found["h.1.ids"].dtype) == (torch.bool, torch.int64)


def test_values_that_fp16_cannot_represent_are_named_and_nothing_is_left(llama: Path, tmp_path: Path) -> None:
    (file,) = llama.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.norm.weight"][3] = 1e5
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has values up to 1e\+05, more than fp16"):
        export_checkpoint(llama, tmp_path / "out", dtype=torch.float16)
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


@pytest.mark.parametrize("command", ["export", "import"])
def test_a_directory_that_is_not_empty_is_never_changed(run: Run, llama: Path, tmp_path: Path, command: str) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.tex").write_text("years of work")
    code, _, err = run(command, llama, "-o", tmp_path / "out")
    assert code == 2
    assert err == f"error: {tmp_path / 'out'}: it is not empty, and nothing is replaced. Name a new directory.\n"
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("command", ["export", "import"])
def test_an_empty_directory_is_filled(run: Run, llama: Path, tmp_path: Path, command: str) -> None:
    (tmp_path / "out").mkdir()
    assert run(command, llama, "-o", tmp_path / "out")[0] == 0
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_pickled_weights_are_rejected(run: Run, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text('{"model_type": "gpt2"}')
    (source / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/pwned'\ntR.")
    code, _, err = run("import", source, "-o", tmp_path / "out")
    assert code == 2
    assert err.startswith(f"error: {source}: its weights are pickled (pytorch_model.bin)")
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_a_model_with_custom_code_is_rejected(run: Run, llama: Path, tmp_path: Path) -> None:
    config = json.loads((llama / "config.json").read_text()) | {"auto_map": {"AutoModel": "evil.Model"}}
    (llama / "config.json").write_text(json.dumps(config))
    code, _, err = run("import", llama, "-o", tmp_path / "out")
    assert code == 2
    assert "custom code (auto_map in config.json)" in err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.gguf", b"not one", "it does not begin with GGUF"),
        ("nowhere.gguf", None, "cannot be read (No such file or directory)"),
        ("nowhere", None, "no such directory"),
        ("model.safetensors", b"x", "a file, and not a directory. Name a directory in Hugging Face format"),
    ],
)
def test_an_invalid_source_is_named(run: Run, tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    code, _, err = run("import", tmp_path / name, "-o", tmp_path / "out")
    assert code == 2
    assert message in err
    assert err.count("\n") == 1


def test_gguf_without_its_package_says_what_to_install(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    _, _, err = run("import", tmp_path / "model.gguf", "-o", tmp_path / "out")
    assert err.endswith("reading GGUF needs the package gguf. Install it: pip install 'gguf>=0.19'.\n")


@pytest.mark.parametrize("size", ["5XB", "-1", "0", "GB", "1e400GB"])
def test_an_invalid_size_is_rejected(run: Run, llama: Path, tmp_path: Path, size: str) -> None:
    code, _, err = run("export", llama, "-o", tmp_path / "out", "--max-shard-size", size)
    assert code == 2
    assert f"{size!r} is not a size. Give one such as 5GB" in err
