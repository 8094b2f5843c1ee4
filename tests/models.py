"""Tiny real models, on the GPU if there is one, and saved to a folder as `save_pretrained` does."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM

VOCAB_SIZE = 512
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")

# matrices this small only lose by being spread over cores
torch.set_num_threads(1)


def tiny_llama(num_layers: int = 4) -> LlamaForCausalLM:
    """A Llama of hidden size 64 with random weights, always the same ones."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.2,
    )
    model = LlamaForCausalLM(config).eval()
    torch.nn.init.normal_(model.model.norm.weight, mean=1.0, std=0.3)
    return model.to(DEVICE)


def tiny_hybrid() -> Qwen3_5ForCausalLM:
    """A Gated DeltaNet hybrid of 8 layers: every fourth is full attention, the norms are zero-centred."""
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=6,
        initializer_range=0.2,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    )
    model = Qwen3_5ForCausalLM(config).eval()
    torch.nn.init.normal_(model.model.norm.weight, std=0.3)
    return model.to(DEVICE)


def constants(num_layers: int = 5) -> LlamaForCausalLM:
    """A Llama that embeds token t as t everywhere; its decoder layer k adds 1000 * (k + 1), exactly."""
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        mlp_bias=True,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.arange(VOCAB_SIZE)[:, None].expand(-1, 64))
        for k, layer in enumerate(model.model.layers):
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
            layer.mlp.down_proj.bias.fill_(1000 * (k + 1))
    return model.to(DEVICE)


def saved(model: PreTrainedModel, folder: Path) -> str:
    """Save a model; returns the folder."""
    model.save_pretrained(folder)
    return str(folder)


def no_memory_of_the_driver() -> torch.AcceleratorError:
    """What PyTorch raises when the driver, not its own allocator, is out of memory."""
    error = torch.AcceleratorError("CUDA error: out of memory")
    error.error_code = 2
    return error
