"""dit: a diffusion transformer (DiT, Peebles and Xie 2023) with adaLN-zero, conditioned on time and class.

It predicts the noise of a latent image, and no variance, which the original adds to its output and we leave out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

FREQUENCIES = 256
"""Sines and cosines that a time step is embedded with."""


@dataclass
class Denoised:
    """``prediction`` of the noise, and its mean squared error."""

    loss: torch.Tensor
    prediction: torch.Tensor


class Block(nn.Module):
    """Attention and MLP, each modulated and gated by the conditioning."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        """``x`` (B, T, W) and ``condition`` (B, W) to (B, T, W)."""
        changes = self.modulation(F.silu(condition)).unsqueeze(1).chunk(6, dim=-1)
        shift1, scale1, gate1, shift2, scale2, gate2 = changes
        x = x + gate1 * self._attend(self.norm1(x) * (1 + scale1) + shift1)
        x = x + gate2 * self.down(F.gelu(self.up(self.norm2(x) * (1 + scale2) + shift2), approximate="tanh"))
        return x

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        query, key, value = parts.unbind(0)
        attended = F.scaled_dot_product_attention(query, key, value)
        mixed: torch.Tensor = self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return mixed


class DiT(nn.Module):
    """``forward(latents (B, C, S, S), timesteps (B,), labels (B,), noise like latents) -> Denoised``.

    ``latent``: S. ``labels`` up to and including ``classes``, which stands for "no class". Compute is in the dtype
    of the parameters.
    """

    def __init__(
        self,
        *,
        width: int,
        heads: int,
        depth: int,
        latent: int = 64,
        channels: int = 4,
        patch: int = 2,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        if width % (2 * heads) or latent % patch:
            raise ValueError(
                f"a DiT of width {width} with {heads} heads over latents of {latent} in patches of {patch}: the width must "
                "divide by twice the heads, the latent by the patch"
            )
        self.latent, self.channels = latent, channels
        self.patchify = nn.Conv2d(channels, width, patch, stride=patch)
        self.embed_time = nn.Sequential(nn.Linear(FREQUENCIES, width), nn.SiLU(), nn.Linear(width, width))
        self.embed_class = nn.Embedding(classes + 1, width)
        self.register_buffer("positions", _positions(latent // patch, width), persistent=False)
        blocks = [Block(width, heads) for _ in range(depth)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Linear(width, 2 * width)
        self.head = nn.Linear(width, patch * patch * channels)
        self.unpatchify = nn.PixelShuffle(patch)
        for zeroed in (self.modulation, self.head, *(block.modulation for block in blocks)):
            nn.init.zeros_(zeroed.weight)
            nn.init.zeros_(zeroed.bias)

    def forward(
        self, latents: torch.Tensor, timesteps: torch.Tensor, labels: torch.Tensor, noise: torch.Tensor
    ) -> Denoised:
        """The noise in ``latents``, and how far off it is."""
        dtype = self.head.weight.dtype
        x = self.patchify(latents.to(dtype)).flatten(2).transpose(1, 2) + self.positions.to(dtype)
        condition = self.embed_time(_frequencies(timesteps).to(dtype)) + self.embed_class(labels)
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.modulation(F.silu(condition)).unsqueeze(1).chunk(2, dim=-1)
        x = self.head(self.norm(x) * (1 + scale) + shift)
        side = math.isqrt(x.shape[1])
        prediction = self.unpatchify(x.transpose(1, 2).reshape(x.shape[0], -1, side, side))
        return Denoised(F.mse_loss(prediction, noise.to(dtype)), prediction)


def example_inputs(batch: int, latent: int, channels: int = 4) -> dict[str, torch.Tensor]:
    """Inputs of a ``DiT``, all zeros: for tracing."""
    return {
        "latents": torch.zeros(batch, channels, latent, latent),
        "timesteps": torch.zeros(batch, dtype=torch.long),
        "labels": torch.zeros(batch, dtype=torch.long),
        "noise": torch.zeros(batch, channels, latent, latent),
    }


def _frequencies(timesteps: torch.Tensor) -> torch.Tensor:
    half = FREQUENCIES // 2
    rates = torch.exp(-math.log(10000) * torch.arange(half, device=timesteps.device) / half)
    angles = timesteps[:, None].float() * rates
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def _positions(side: int, width: int) -> torch.Tensor:
    """Fixed sines and cosines of row and column (1, side * side, width)."""
    quarter = width // 4
    rates = 1.0 / 10000 ** (torch.arange(quarter) / quarter)
    angles = torch.arange(side)[:, None] * rates
    axis = torch.cat([angles.sin(), angles.cos()], dim=-1)
    rows = axis[:, None, :].expand(side, side, -1)
    columns = axis[None, :, :].expand(side, side, -1)
    table = torch.cat([rows, columns], dim=-1)
    return F.pad(table, (0, width - table.shape[-1])).reshape(1, side * side, width)
