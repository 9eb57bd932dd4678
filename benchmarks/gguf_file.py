"""Write a checkpoint of the Qwen3 backbone as GGUF, so that llama.cpp can run the model of the same shape.

llama.cpp runs it as an auto-regressive model; tensors of the residual pathway, which such a model does not have, are
left out. No tokenizer is written: the benchmarks exchange token ids.

Source: keys and tensor names that llama.cpp's "qwen3" architecture reads (llama-cpp-python 0.3.36), gguf 0.19.0.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dlmrt.checkpoint.load import open_checkpoint
from dlmrt.checkpoint.tensorfile import encode
from dlmrt.models.layers import ADAPTER

LAYER = "model.layers."
NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def gguf_name(name: str) -> str:
    """GGUF's name of a Hugging Face tensor. Example: "model.layers.3.mlp.up_proj.weight" -> "blk.3.ffn_up.weight"."""
    if not name.startswith(LAYER):
        return NAMES[name]
    layer_idx, _, rest = name.removeprefix(LAYER).partition(".")
    return f"blk.{layer_idx}.{LAYER_NAMES[rest]}"


def write_gguf(folder: Path, target: Path) -> None:
    """Write the checkpoint in `folder` as `target`, matrices in bfloat16."""
    import gguf

    checkpoint = open_checkpoint(folder)
    config = checkpoint.config
    writer = gguf.GGUFWriter(target, "qwen3")
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_tokenizer_model("none")
    for name, tensor in checkpoint.tensors():
        if name.startswith(ADAPTER):
            continue
        if len(tensor.shape) == 1:
            writer.add_tensor(gguf_name(name), np.ascontiguousarray(encode(tensor, "float32")))
        else:
            bits = np.ascontiguousarray(encode(tensor, "bfloat16"))
            writer.add_tensor(gguf_name(name), bits.view(np.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
