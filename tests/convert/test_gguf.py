"""`dstk import` of GGUF: files that the package gguf writes, with the names and the row order of llama.cpp."""

from collections.abc import Collection
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig

from toolkit.cli.main import main

LAYERS = 2
HEADS = 4
KV_HEADS = 2
HIDDEN = 64
VOCABULARY = 300
OUTSIDE_LAYERS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
IN_LAYERS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def llama() -> dict[str, np.ndarray]:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return {name: value.numpy() for name, value in model.state_dict().items()}


def write_gguf(
    path: Path, weights: dict[str, np.ndarray], *, quantized: bool = False, without: Collection[str] = ()
) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(["a", "b", "ab", *(f"<{number}>" for number in range(3, VOCABULARY))])
    writer.add_token_types([gguf.TokenType.NORMAL] * VOCABULARY)
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(3)
    writer.add_eos_token_id(4)
    for name, values in weights.items():
        if name in without:
            continue
        if quantized and values.ndim == 2:
            kind = gguf.GGMLQuantizationType.Q8_0
            writer.add_tensor(
                llama_cpp_name(name), gguf.quants.quantize(rotary_pairs(name, values), kind), raw_dtype=kind
            )
        else:
            writer.add_tensor(llama_cpp_name(name), rotary_pairs(name, values))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_cpp_name(name: str) -> str:
    path = name.removesuffix(".weight")
    if path in OUTSIDE_LAYERS:
        return f"{OUTSIDE_LAYERS[path]}.weight"
    _, _, layer, module = path.split(".", 3)
    return f"blk.{layer}.{IN_LAYERS[module]}.weight"


def rotary_pairs(name: str, values: np.ndarray) -> np.ndarray:
    """Rows of queries and keys as llama.cpp has them: the two that are rotated together are neighbors."""
    if "q_proj" in name:
        heads = HEADS
    elif "k_proj" in name:
        heads = KV_HEADS
    else:
        return values
    return np.ascontiguousarray(values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape))


def run_import(source: Path, output: Path) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(["import", str(source), "-o", str(output)])
    assert isinstance(stopped.value.code, int)
    return stopped.value.code


@pytest.mark.parametrize("quantized", [False, True])
def test_weights_are_those_of_the_model_that_was_written(tmp_path: Path, quantized: bool) -> None:
    weights = llama()
    write_gguf(tmp_path / "model.gguf", weights, quantized=quantized)
    assert run_import(tmp_path / "model.gguf", tmp_path / "out") == 0
    (file,) = (tmp_path / "out").glob("*.safetensors")
    imported = load_file(file)
    assert imported.keys() == weights.keys()
    for name, values in weights.items():
        expected = torch.from_numpy(values)
        if quantized and values.ndim == 2:
            # Q8_0 rounds each 32 values to a 127th of their largest, a scale that it keeps in fp16.
            largest = expected.view(-1, 32).abs().amax(dim=1, keepdim=True)
            errors = (imported[name] - expected).view(-1, 32).abs()
            assert bool((errors <= largest * (0.5 / 127 + 2**-11)).all()), name
            assert not torch.equal(imported[name], expected), name
        else:
            assert torch.equal(imported[name], expected), name


def test_a_file_that_lacks_weights_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, llama(), without=["model.layers.1.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"])
    assert run_import(path, tmp_path / "out") == 2
    message = f"error: {path}: missing weights: model.layers.0.mlp.up_proj.weight and 1 other. Give a complete file."
    assert capfd.readouterr().err.splitlines()[-1].endswith(message)
    assert not (tmp_path / "out").exists()
