# Copyright 2026 The ExpertMesh Authors
# SPDX-License-Identifier: Apache-2.0
"""fp8 checkpoints as DeepSeek-V3 publishes them: e4m3 with one float32 scale per 128 x 128 block."""

import json
import pathlib
import re

import safetensors.torch
import torch

BLOCK = 128
LARGEST = 448.0  # of float8_e4m3fn
QUANTIZATION_CONFIG = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [BLOCK, BLOCK],
}


def expand(scale: torch.Tensor, shape) -> torch.Tensor:
    return scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: shape[0], : shape[1]]


def quantize(weight: torch.Tensor):
    rows, cols = (-(-size // BLOCK) for size in weight.shape)
    scale = torch.empty(rows, cols)
    for r in range(rows):
        for c in range(cols):
            block = weight[r * BLOCK : (r + 1) * BLOCK, c * BLOCK : (c + 1) * BLOCK]
            scale[r, c] = block.abs().max() / LARGEST
    return (weight / expand(scale, weight.shape)).to(torch.float8_e4m3fn), scale


def dequantize(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return weight.to(torch.float64) * expand(scale.to(torch.float64), weight.shape)


def quantize_model(model: torch.nn.Module, names: str) -> dict:
    """Gives the named weights of a float32 model values that fp8 holds; returns the fp8 tensors."""
    quantized = {}
    for name, parameter in model.named_parameters():
        if re.search(names, name):
            weight, scale = quantize(parameter.data)
            quantized |= {name: weight, name + "_scale_inv": scale}
            parameter.data = dequantize(weight, scale).to(torch.float32)
    return quantized


def put_into_checkpoint(folder: pathlib.Path, quantized: dict) -> None:
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file) | quantized
    safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = QUANTIZATION_CONFIG
    (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
