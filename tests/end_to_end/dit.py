"""A small diffusion transformer (DiT with adaLN-zero) that predicts the noise in a latent image."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F


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
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
        self.modulation = nn.Linear(width, 6 * width)

    def forward(self, x: torch.Tensor, condition: torch.Tensor) -> torch.Tensor:
        changes = self.modulation(F.silu(condition)).unsqueeze(1).chunk(6, dim=-1)
        shift1, scale1, gate1, shift2, scale2, gate2 = changes
        x = x + gate1 * self._attend(self.norm1(x) * (1 + scale1) + shift1)
        return x + gate2 * self.mlp(self.norm2(x) * (1 + scale2) + shift2)

    def _attend(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width))


class DiffusionTransformer(nn.Module):
    """``forward(latents (B, 4, 8, 8), timesteps (B,), noise like latents) -> Denoised``."""

    def __init__(self, *, width: int = 32, heads: int = 2, depth: int = 2, channels: int = 4, patch: int = 2) -> None:
        super().__init__()
        self.width = width
        self.patchify = nn.Conv2d(channels, width, patch, stride=patch)
        self.positions = nn.Parameter(0.02 * torch.randn(1, 16, width))
        self.embed_time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        blocks = [Block(width, heads) for _ in range(depth)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.modulation = nn.Linear(width, 2 * width)
        self.head = nn.Linear(width, patch * patch * channels)
        self.unpatchify = nn.PixelShuffle(patch)
        for modulated in (self.modulation, self.head, *(block.modulation for block in blocks)):
            # Zero in the paper; not quite here, so that gradients reach everything from the first step.
            nn.init.normal_(modulated.weight, std=0.02)

    def forward(self, latents: torch.Tensor, timesteps: torch.Tensor, noise: torch.Tensor) -> Denoised:
        dtype = self.positions.dtype
        x = self.patchify(latents.to(dtype)).flatten(2).transpose(1, 2) + self.positions
        condition = self.embed_time(self._frequencies(timesteps).to(dtype))
        for block in self.blocks:
            x = block(x, condition)
        shift, scale = self.modulation(F.silu(condition)).unsqueeze(1).chunk(2, dim=-1)
        x = self.head(self.norm(x) * (1 + scale) + shift)
        side = math.isqrt(x.shape[1])
        prediction = self.unpatchify(x.transpose(1, 2).reshape(x.shape[0], -1, side, side))
        return Denoised(F.mse_loss(prediction, noise.to(dtype)), prediction)

    def _frequencies(self, timesteps: torch.Tensor) -> torch.Tensor:
        half = self.width // 2
        rates = torch.exp(-math.log(10000) * torch.arange(half, device=timesteps.device) / half)
        angles = timesteps[:, None].float() * rates
        return torch.cat([angles.cos(), angles.sin()], dim=-1)
