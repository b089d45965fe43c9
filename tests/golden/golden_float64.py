# Copyright 2026 The ExpertMesh Authors
# SPDX-License-Identifier: Apache-2.0
"""MoE layers and router rules in float64, to measure how exact a block is."""

import numpy as np
import torch


def f64(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().to(torch.float64).numpy()


def activate(gate: np.ndarray, up: np.ndarray, activation: str) -> np.ndarray:
    if activation == "silu":
        return gate / (1.0 + np.exp(-gate)) * up
    assert activation == "clamped_swiglu", activation
    gate = np.minimum(gate, 7.0)
    up = np.clip(up, -7.0, 7.0)
    return gate / (1.0 + np.exp(-1.702 * gate)) * (up + 1.0)


def ffn(tensors: dict, names: dict, x: np.ndarray, activation: str, expert: int | None):
    """One expert (or the shared one) on rows x, read from the saved tensors by their saved layout."""

    def get(key):
        name = names[key].replace("{expert}", str(expert))
        value = f64(tensors[name])
        return value[expert] if names["layout"] == "fused" else value

    if names["layout"] == "per_expert":
        gate, up = x @ get("gate").T, x @ get("up").T
    else:
        w = get("gate_up")
        both = x @ (w if names["transposed"] else w.T)
        if "gate_up_bias" in names:
            both = both + get("gate_up_bias")
        if names["interleaved"]:
            gate, up = both[:, 0::2], both[:, 1::2]
        else:
            gate, up = np.split(both, 2, axis=1)
    w = get("down")
    out = activate(gate, up, activation) @ (w if names.get("transposed") else w.T)
    return out + get("down_bias") if "down_bias" in names else out


def shared_ffn(tensors: dict, names: dict, x: np.ndarray, activation: str):
    if "gate_up" in names:
        gate, up = np.split(x @ f64(tensors[names["gate_up"]]).T, 2, axis=1)
    else:
        gate, up = x @ f64(tensors[names["gate"]]).T, x @ f64(tensors[names["up"]]).T
    out = activate(gate, up, activation) @ f64(tensors[names["down"]]).T
    if "output_gate" in names:
        out = out / (1.0 + np.exp(-(x @ f64(tensors[names["output_gate"]]).T)))
    return out


def routed_f64(tensors: dict, layer: dict, x: np.ndarray, ids: np.ndarray, weights: np.ndarray):
    out = np.zeros_like(x)
    for e in range(layer["num_experts"]):
        token, k = np.nonzero(ids == e)
        if token.size == 0:
            continue
        w = weights[token, k][:, None]
        if layer["apply_router_weight_on_input"]:
            rows = ffn(tensors, layer["experts"], x[token] * w, layer["activation"], e)
        else:
            rows = w * ffn(tensors, layer["experts"], x[token], layer["activation"], e)
        np.add.at(out, token, rows)
    return out


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def top(scores: np.ndarray, k: int) -> np.ndarray:
    return np.argsort(-scores, axis=-1, kind="stable")[:, :k]


def sparse_mixer(logits: np.ndarray, jitter: float):
    ids, weights, masked = [], [], logits.copy()
    rows = np.arange(len(logits))
    for _ in range(2):
        best = masked.argmax(axis=1)
        peak = logits[rows, best][:, None]
        far = (peak - logits) / np.maximum(np.abs(logits), peak) > 2 * jitter
        weights.append(softmax(np.where(far, -np.inf, masked))[rows, best])
        ids.append(best)
        masked[rows, best] = -np.inf
    return np.stack(ids, axis=1), np.stack(weights, axis=1)


def route_f64(rule: dict, topk: int, logits: np.ndarray, bias: np.ndarray | None):
    if rule["score"] == "sparse_mixer":
        return sparse_mixer(logits, rule["sparse_mixer_jitter"])
    scores = logits
    if rule["score"] == "softmax":
        scores = softmax(logits)
    elif rule["score"] == "sigmoid":
        scores = 1.0 / (1.0 + np.exp(-logits))
    choice = scores if bias is None else scores + bias
    if rule["num_groups"] > 1:
        grouped = np.sort(choice.reshape(len(choice), rule["num_groups"], -1), axis=-1)
        value = grouped[..., -1] if rule["group_score"] == "max" else grouped[..., -2:].sum(-1)
        keep = np.zeros_like(value)
        np.put_along_axis(keep, top(value, rule["topk_groups"]), 1.0, axis=-1)
        keep = np.repeat(keep, choice.shape[1] // rule["num_groups"], axis=1)
        choice = np.where(keep > 0, choice, 0.0)
    ids = top(choice, topk)
    weights = np.take_along_axis(scores, ids, axis=1)
    if rule["score"] == "softmax_over_topk":
        weights = softmax(weights)
    elif rule["score"] == "sigmoid_of_topk":
        weights = 1.0 / (1.0 + np.exp(-weights))
    if rule["renormalize"]:
        total = weights.sum(-1, keepdims=True) + rule["renormalize_epsilon"]
        weights = weights / np.maximum(total, rule["renormalize_min"])
    return ids, weights * rule["scaling_factor"]


def weights_by_expert(ids: np.ndarray, weights: np.ndarray, num_experts: int) -> np.ndarray:
    out = np.full((len(ids), num_experts), np.nan)
    np.put_along_axis(out, ids, weights, axis=1)
    return out
