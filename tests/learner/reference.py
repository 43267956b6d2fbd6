"""TD3 in float64 numpy, written from the paper and apart from the package: slow, plain and with explicit sums.

A network is a list of layers, a layer a dictionary: ``weight`` [out, in], ``bias`` [out], and with LayerNorm ``scale``
and ``shift`` [out]. Every gradient below is derived by hand; the derivation stands beside it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Net = list[dict[str, Array]]

NORM_EPSILON = 1e-5


def forward(net: Net, x: Array) -> tuple[Array, list[dict[str, Array]]]:
    """The output [B, out], and per layer what its gradient needs."""
    memory = []
    for index, layer in enumerate(net):
        step = {"x": x}
        z = x @ layer["weight"].T + layer["bias"]
        if "scale" in layer:
            mean, variance = z.mean(1, keepdims=True), z.var(1, keepdims=True)
            step["deviation"] = np.sqrt(variance + NORM_EPSILON)
            step["normal"] = (z - mean) / step["deviation"]
            z = layer["scale"] * step["normal"] + layer["shift"]
        step["z"] = z
        x = np.maximum(z, 0) if index < len(net) - 1 else z
        memory.append(step)
    return x, memory


def backward(net: Net, memory: list[dict[str, Array]], d: Array) -> tuple[Net, Array]:
    """From dL/doutput: dL/dparameters, and dL/dinput."""
    gradients: Net = []
    for index in range(len(net) - 1, -1, -1):
        layer, step = net[index], memory[index]
        gradient = {}
        if index < len(net) - 1:
            d = d * (step["z"] > 0)  # d relu(z)/dz = [z > 0]
        if "scale" in layer:
            # y_j = g_j n_j + s_j with n_j = (z_j - m) / σ; m, σ² the mean and variance over the N features of a row.
            # dL/dg_j = Σ_b d_j n_j, dL/ds_j = Σ_b d_j. With e_j = d_j g_j = dL/dn_j, dm/dz_k = 1/N, dσ/dz_k = n_k/N:
            # dn_j/dz_k = ([j = k] - 1/N - n_j n_k / N) / σ, so dL/dz_k = (e_k - mean(e) - n_k mean(e n)) / σ.
            n = step["normal"]
            gradient["scale"], gradient["shift"] = (d * n).sum(0), d.sum(0)
            e = d * layer["scale"]
            d = (e - e.mean(1, keepdims=True) - n * (e * n).mean(1, keepdims=True)) / step["deviation"]
        # z_bo = Σ_i w_oi x_bi + b_o: dL/dw_oi = Σ_b d_bo x_bi, dL/db_o = Σ_b d_bo, dL/dx_bi = Σ_o d_bo w_oi.
        gradient["weight"], gradient["bias"] = d.T @ step["x"], d.sum(0)
        d = d @ layer["weight"]
        gradients.insert(0, gradient)
    return gradients, d


class Adam:
    """Kingma and Ba 2015, algorithm 1, β₁ = 0.9, β₂ = 0.999, ε = 1e-8."""

    def __init__(self, net: Net, rate: float) -> None:
        self.rate, self.count = rate, 0
        self.mean = [{key: np.zeros_like(value) for key, value in layer.items()} for layer in net]
        self.square = [{key: np.zeros_like(value) for key, value in layer.items()} for layer in net]

    def step(self, net: Net, gradients: Net) -> None:
        self.count += 1
        for layer, gradient, mean, square in zip(net, gradients, self.mean, self.square, strict=True):
            for key, g in gradient.items():
                mean[key] = 0.9 * mean[key] + 0.1 * g
                square[key] = 0.999 * square[key] + 0.001 * g * g
                mean_hat = mean[key] / (1 - 0.9**self.count)
                square_hat = square[key] / (1 - 0.999**self.count)
                layer[key] = layer[key] - self.rate * mean_hat / (np.sqrt(square_hat) + 1e-8)


class ReferenceTD3:
    """Algorithm 1 of the paper, on normalised actions.

    ``nets`` has ``actor``, ``critic1`` and (not for DDPG) ``critic2``; the targets start as copies. ``constants`` are
    the fields of LearnerConfig.
    """

    def __init__(self, nets: dict[str, Net], constants: Any) -> None:
        self.nets = nets
        self.targets = {name: [dict(layer) for layer in net] for name, net in nets.items()}
        self.adams = {name: Adam(net, constants.learning_rate) for name, net in nets.items()}
        self.constants = constants
        self.critics = sorted(name for name in nets if name.startswith("critic"))
        self.updates = 0
        self.norms: dict[str, float] = {}  # of each network's newest gradient, before it was clipped
        self.critic_loss = self.actor_loss = self.q_mean = self.q_target_mean = 0.0

    def update(self, s: Array, a: Array, r: Array, s2: Array, discount: Array, noise: Array) -> Array:
        """One step of lines 5 to 15; ``noise`` is standard normal [B, A], ``r`` and ``discount`` are [B].

        Returns each critic's errors before the step, [critics, B].
        """
        c, count = self.constants, len(s)
        noise = np.clip(noise * c.target_noise, -c.target_noise_clip, c.target_noise_clip)
        a2 = np.clip(np.tanh(forward(self.targets["actor"], s2)[0]) + noise, -1, 1)
        q_next = [forward(self.targets[name], np.hstack((s2, a2)))[0][:, 0] for name in self.critics]
        y = np.array([r[i] + discount[i] * min(q[i] for q in q_next) for i in range(count)])
        self.critic_loss = 0.0
        errors = []
        for name in self.critics:
            q, memory = forward(self.nets[name], np.hstack((s, a)))
            error = q[:, 0] - y
            errors.append(error)
            if c.critic_loss == "mse":
                # L = Σ_b (q_b - y_b)² / B, so dL/dq_b = 2 (q_b - y_b) / B; y is a constant
                losses, slope = error**2, 2 * error
            else:
                # Huber 1964: e²/2 with the derivative e for |e| ≤ 1, |e| - 1/2 with the derivative ±1 beyond
                losses = np.array([e * e / 2 if abs(e) <= 1 else abs(e) - 0.5 for e in error])
                slope = np.array([e if abs(e) <= 1 else np.sign(e) for e in error])
            self.critic_loss += np.mean(losses)
            if name == "critic1":
                self.q_mean = float(q.mean())
            gradients, _ = backward(self.nets[name], memory, (slope / count)[:, None])
            self.step(name, gradients)
        self.q_target_mean = float(y.mean())
        self.updates += 1
        if self.updates % c.policy_delay:
            return np.array(errors)
        output, actor_memory = forward(self.nets["actor"], s)
        pi = np.tanh(output)
        q, memory = forward(self.nets["critic1"], np.hstack((s, pi)))
        self.actor_loss = -float(q.mean())
        # L = -Σ_b Q1(s_b, π_b) / B: dL/dq_b = -1/B, through the critic to the action, and d tanh(u)/du = 1 - tanh(u)²
        _, d_input = backward(self.nets["critic1"], memory, np.full((count, 1), -1 / count))
        gradients, _ = backward(self.nets["actor"], actor_memory, d_input[:, s.shape[1] :] * (1 - pi**2))
        self.step("actor", gradients)
        for name, target in self.targets.items():
            for layer, moving in zip(self.nets[name], target, strict=True):
                for key in layer:
                    moving[key] = (1 - c.polyak) * moving[key] + c.polyak * layer[key]
        return np.array(errors)

    def step(self, name: str, gradients: Net) -> None:
        """Adam, after the gradient of this network has been scaled to a norm of at most ``gradient_clip``."""
        norm = np.sqrt(sum(float((value**2).sum()) for layer in gradients for value in layer.values()))
        self.norms[name] = float(norm)
        if self.constants.gradient_clip is not None and norm > self.constants.gradient_clip:
            scale = self.constants.gradient_clip / norm
            gradients = [{key: scale * value for key, value in layer.items()} for layer in gradients]
        self.adams[name].step(self.nets[name], gradients)
