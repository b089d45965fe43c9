#!/usr/bin/env python3
# Copyright 2026 The ExpertMesh Authors
# SPDX-License-Identifier: Apache-2.0
"""Writes the golden fixtures beside this file; README.md says what they hold and how to run it.

A fixture is a tiny random model as `save_pretrained` writes it, and what the model's own MoE block
makes of given hidden states.
"""

import argparse
import json
import os
import pathlib
import platform
import re
import shutil
import zlib

os.environ.setdefault("OMP_NUM_THREADS", "1")  # one order of summation, so the same bytes each time

import numpy as np
import safetensors
import safetensors.torch
import torch
import transformers

import golden_fp8
from golden_architectures import Fixture
from golden_fixtures import FIXTURES
from golden_float64 import f64, route_f64, routed_f64, shared_ffn, weights_by_expert

ROOT = pathlib.Path(__file__).resolve().parent
NUM_TOKENS = 12
UNIT_ROUNDOFF = {torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
DTYPE_NAMES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}


def random_for(*key) -> np.random.RandomState:
    return np.random.RandomState(zlib.crc32("/".join(map(str, key)).encode()))


# ---- The model ------------------------------------------------------------------------------------


def fill(model: torch.nn.Module, fixture: Fixture) -> None:
    """Random values of a size at which routing and activations are not near-linear."""
    transposed = fixture.layout.get("transposed", False)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or "inv_freq" in name:
            continue
        random = random_for(fixture.name, name)
        values = random.standard_normal(tuple(tensor.shape))
        if "correction_bias" in name:
            values *= fixture.correction_bias_scale
        elif re.search(r"norm", name) and tensor.ndim == 1:
            values = 1.0 + 0.1 * values
        elif tensor.ndim == 1 or name.endswith("_bias"):
            values *= 0.5
        else:
            fan_in = tensor.shape[-2 if transposed and tensor.ndim == 3 else -1]
            scale = 1.0
            if re.search(r"\.(gate|router|router\.layer|gate\.wg)\.weight$", name):
                scale = 1.5  # of the logits
            elif "gate_up_proj" in name or "gate_proj" in name or name.endswith("w1.weight"):
                scale = fixture.gate_scale
            values *= scale / np.sqrt(fan_in)
        with torch.no_grad():
            tensor.copy_(torch.from_numpy(np.ascontiguousarray(values)))


def build(fixture: Fixture):
    torch.manual_seed(0)
    config = getattr(transformers, fixture.config_class)(**fixture.config)
    model = getattr(transformers, fixture.model_class)(config).eval().to(torch.float32)
    fill(model, fixture)
    quantized = golden_fp8.quantize_model(model, fixture.fp8_tensors) if fixture.fp8_tensors else {}
    model = model.to(fixture.dtype)
    if (
        fixture.float32_tensors
    ):  # kept in float32 in the published 16-bit checkpoints, from unrounded values
        float32_model = getattr(transformers, fixture.model_class)(config).eval().to(torch.float32)
        fill(float32_model, fixture)
        wanted = re.compile(fixture.float32_tensors)
        source = dict(float32_model.named_parameters()) | dict(float32_model.named_buffers())
        target = dict(model.named_parameters()) | dict(model.named_buffers())
        for name, tensor in target.items():
            if wanted.search(name):
                tensor.data = source[name].data.clone()
    return model, quantized


def module_at(model: torch.nn.Module, path: str) -> torch.nn.Module:
    return model.get_submodule(path)


# ---- One layer ------------------------------------------------------------------------------------


def draw_tokens(fixture: Fixture, layer: dict, gate: dict) -> torch.Tensor:
    """Hidden states whose routing no rounding of the logits to the model's dtype can change."""
    hidden_size, topk = layer["hidden_size"], layer["topk"]
    kept = []
    for attempt in range(20000):
        random = random_for(fixture.name, "tokens", layer["index"], attempt)
        x = torch.from_numpy(random.standard_normal((1, hidden_size))).to(fixture.dtype)
        logits = f64(x) @ gate["weight"].T + gate["bias"]
        delta = max(2.0**-9, 4 * UNIT_ROUNDOFF[fixture.dtype] * np.abs(logits).max())
        noisy = logits + delta * random.uniform(-1, 1, (256, logits.shape[1]))
        both = np.concatenate([logits, noisy])
        by_expert = weights_by_expert(
            *route_f64(layer["router"], topk, both, gate["correction_bias"]), logits.shape[1]
        )
        change = np.abs(by_expert - by_expert[:1])
        same = (np.isnan(by_expert) == np.isnan(by_expert[:1])).all()
        scale = layer["router"]["scaling_factor"]
        if same and np.nanmax(change) < 2 * delta * scale:
            kept.append(x)
            if len(kept) == NUM_TOKENS:
                return torch.cat(kept)
    raise AssertionError(f"{fixture.name}: too few tokens with unambiguous routing")


class TopkRecorder(torch.utils._python_dispatch.TorchDispatchMode):
    """Sees each torch.topk of the block: the ids that it really used."""

    def __init__(self):
        super().__init__()
        self.indices = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.topk.default:
            self.indices.append(out[1].clone())
        return out


def first_tensor(output) -> torch.Tensor:
    return output[0] if isinstance(output, tuple) else output


def run_block(fixture: Fixture, model, layer_index: int, x: torch.Tensor):
    """Returns (routed, full, logits, ids, weights) of the block itself."""
    block = module_at(model, fixture.block.format(layer=layer_index))
    shared_owner, shared_name = block, fixture.shared_module
    shared_beside = fixture.shared_beside_block
    if shared_beside:  # granitemoeshared: the decoder layer owns it
        shared_owner = module_at(model, fixture.block.format(layer=layer_index).rsplit(".", 1)[0])

    with torch.no_grad():
        logits, ids, weights = fixture.route(block, x)
        recorder = TopkRecorder()
        with recorder:
            full = first_tensor(block(x[None].clone())).reshape(x.shape)
        if recorder.indices:  # phimoe chooses by max
            used = recorder.indices[-1].reshape(ids.shape)
            assert torch.equal(used, ids), f"{fixture.name}: the block chose other experts"
        routed = full
        if shared_name and shared_beside:
            full = full + getattr(shared_owner, shared_name)(x)
        elif shared_name:
            shared = getattr(block, shared_name)
            keep = shared.forward
            shared.forward = torch.zeros_like
            routed = first_tensor(block(x[None].clone())).reshape(x.shape)
            shared.forward = keep
    return routed, full, logits, ids, weights.to(torch.float32)


def make_layer(fixture: Fixture, model, tensors: dict, layer_index: int):
    layer = fixture.describe_layer(model, layer_index)
    layer["hidden_size"] = fixture.text_config(model).hidden_size
    layer["activation"] = fixture.activation
    layer["apply_router_weight_on_input"] = fixture.apply_router_weight_on_input
    num_experts, topk = layer["num_experts"], layer["topk"]
    router = layer["router"]
    bias_name = router["correction_bias"]
    gate = {
        "weight": f64(tensors[router["gate"]]),
        "bias": f64(tensors[router["gate_bias"]]) if router["gate_bias"] else np.zeros(num_experts),
        "correction_bias": f64(tensors[bias_name]).reshape(-1) if bias_name else None,
    }
    x = draw_tokens(fixture, layer, gate)
    routed, full, logits, ids, weights = run_block(fixture, model, layer_index, x)

    exact_x, np_ids, np_weights = f64(x), ids.numpy(), f64(weights)
    exact_routed = routed_f64(tensors, layer, exact_x, np_ids, np_weights)
    shared = 0.0
    if layer["shared"]:
        shared = shared_ffn(tensors, layer["shared"], exact_x, layer["activation"])
    unit = UNIT_ROUNDOFF[fixture.dtype]

    stored = weights_by_expert(np_ids, np_weights, num_experts)
    weight_errors, router_errors = {}, []
    exact_logits = exact_x @ gate["weight"].T + gate["bias"]
    for source, values in (("logits", f64(logits)), ("gate", exact_logits)):
        r_ids, r_weights = route_f64(router, topk, values, gate["correction_bias"])
        ours = weights_by_expert(r_ids, r_weights, num_experts)
        assert (np.isnan(ours) == np.isnan(stored)).all(), f"{fixture.name}: other experts"
        weight_errors[source] = float(np.nanmax(np.abs(ours - stored)))
        router_errors.append(routed_f64(tensors, layer, exact_x, r_ids, r_weights))

    def error_and_tolerances(block_output, exact, by_router):
        largest = np.abs(exact).max()
        error = np.abs(f64(block_output) - exact).max()
        router_error = max(np.abs(f64(block_output) - y).max() for y in by_router)
        assert error < 16 * unit * largest + 2.0**-20 * largest, (fixture.name, error, largest)
        # Ours rounds once or twice itself; a float32 sum in another order moves by a few units.
        margin = (2 * unit + 2.0**-20) * largest
        return (
            float(error),
            float(2 * error + margin),
            float(2 * max(error, router_error) + margin),
        )

    e, t, r = error_and_tolerances(routed, exact_routed, router_errors)
    layer |= {"block_error_routed": e, "tolerance_routed": t, "tolerance_routed_router": r}
    e, t, r = error_and_tolerances(full, exact_routed + shared, [y + shared for y in router_errors])
    layer |= {"block_error_full": e, "tolerance_full": t, "tolerance_full_router": r}
    for source, value in weight_errors.items():
        layer[f"tolerance_weights_{source}"] = 2 * value + 2.0**-20
    layer["largest_routed"] = float(np.abs(exact_routed).max())
    layer["largest_full"] = float(np.abs(exact_routed + shared).max())
    prefix = f"layers.{layer_index}."
    cases = {
        "hidden_states": x,
        "router_logits": logits,
        "topk_ids": ids.to(torch.int32),
        "topk_weights": weights,
        "output_routed": routed,
        "output_full": full,
    }
    return layer, {prefix + k: v.contiguous().clone() for k, v in cases.items()}


# ---- One fixture ----------------------------------------------------------------------------------


def rounded(value):
    """Floats in JSON with 4 digits, tolerances only ever larger."""
    if isinstance(value, dict):
        return {
            k: (
                float(f"{v * 1.0005:.4g}")
                if isinstance(v, float) and re.match("tol|block|larg", k)
                else rounded(v)
            )
            for k, v in value.items()
        }
    return [rounded(v) for v in value] if isinstance(value, list) else value


def make(fixture: Fixture) -> int:
    folder = ROOT / fixture.name
    shutil.rmtree(folder, ignore_errors=True)
    model, quantized = build(fixture)
    model.save_pretrained(folder, max_shard_size=fixture.max_shard_size)
    (folder / "generation_config.json").unlink(missing_ok=True)
    if quantized:
        golden_fp8.put_into_checkpoint(folder, quantized)
    if fixture.config_patch:
        config_path = folder / "config.json"
        config = json.loads(config_path.read_text()) | fixture.config_patch
        config_path.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= safetensors.torch.load_file(file)
    for name in [name for name in tensors if name + "_scale_inv" in tensors]:
        tensors[name] = golden_fp8.dequantize(tensors[name], tensors[name + "_scale_inv"])

    layers, cases = [], {}
    for layer_index in fixture.moe_layers:
        layer, layer_cases = make_layer(fixture, model, tensors, layer_index)
        layers.append(layer)
        cases |= layer_cases
    safetensors.torch.save_file(cases, folder / "cases.safetensors")
    description = {
        "name": fixture.name,
        "architecture": fixture.model_class,
        "model_type": fixture.config_patch.get("model_type", model.config.model_type),
        "dtype": DTYPE_NAMES[fixture.dtype],
        "hidden_size": layers[0]["hidden_size"],
        "num_tokens": NUM_TOKENS,
        "checkpoint_files": sorted(
            p.name for p in folder.iterdir() if p.name not in ("cases.safetensors", "fixture.json")
        ),
        "layers": rounded(layers),
        "versions": {
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "safetensors": safetensors.__version__,
            "numpy": np.__version__,
            "machine": platform.machine(),
        },
    }
    (folder / "fixture.json").write_text(json.dumps(description, indent=1) + "\n")
    for file in folder.iterdir():
        file.chmod(0o644)
    return sum(file.stat().st_size for file in folder.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="fixtures to make (default: all)")
    names = parser.parse_args().names
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    known = {fixture.name: fixture for fixture in FIXTURES}
    for name in names or known:
        size = make(known[name])
        layers = json.loads((ROOT / name / "fixture.json").read_text())["layers"]
        errors = ", ".join(f"{x['block_error_routed'] / x['largest_routed']:.1e}" for x in layers)
        print(f"{name:24} {size:8} bytes, block's own relative error {errors}")


if __name__ == "__main__":
    main()
