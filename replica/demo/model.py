"""A byte-level GPT, small enough to train on two cores and with all that makes a resume hard.

Dropout draws from torch's random state in every forward pass, so that a resume which forgets the
random state cannot give the same losses.

Shapes: B sequences, T bytes each, D features, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

BYTE_VALUES = 256


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of the model; the defaults give 136,960 parameters.

    Raises:
        ValueError: a size that is not positive, or features that the heads do not divide.
    """

    context: int = 64
    """T, the bytes of one sequence."""
    features: int = 64
    """D, the width of every layer."""
    heads: int = 4
    """H, the attention heads of a layer."""
    layers: int = 2
    """Number of transformer blocks."""
    dropout: float = 0.1
    """Share of values dropped, in [0, 1)."""

    def __post_init__(self) -> None:
        """Check every field."""
        for name in ("context", "features", "heads", "layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.features % self.heads:
            raise ValueError(f"features must be a multiple of heads, got {self.features}")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must be in [0, 1), got {self.dropout}")


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind a norm and beside a residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.dropout = config.dropout
        self.attention_norm = nn.LayerNorm(config.features)
        self.attention_in = nn.Linear(config.features, 3 * config.features)
        self.attention_out = nn.Linear(config.features, config.features)
        self.mlp_norm = nn.LayerNorm(config.features)
        self.mlp_in = nn.Linear(config.features, 4 * config.features)
        self.mlp_out = nn.Linear(4 * config.features, config.features)
        self.residual_dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        """Map float[B, T, D] to float[B, T, D]."""
        x = x + self.residual_dropout(self._attend(self.attention_norm(x)))
        hidden = functional.gelu(self.mlp_in(self.mlp_norm(x)))
        return x + cast("Tensor", self.residual_dropout(self.mlp_out(hidden)))

    def _attend(self, x: Tensor) -> Tensor:
        batch, context, features = x.shape
        split = self.attention_in(x).view(batch, context, 3, self.heads, -1)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=self.dropout if self.training else 0.0, is_causal=True
        )
        joined = mixed.transpose(1, 2).reshape(batch, context, features)
        return cast("Tensor", self.attention_out(joined))


class ByteGPT(nn.Module):
    """Predicts the next byte of a text."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.byte_embedding = nn.Embedding(BYTE_VALUES, config.features)
        self.place_embedding = nn.Embedding(config.context, config.features)
        self.input_dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.final_norm = nn.LayerNorm(config.features)
        self.head = nn.Linear(config.features, BYTE_VALUES, bias=False)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross-entropy, float[], of int64[B, T] inputs and targets."""
        places = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.input_dropout(self.byte_embedding(inputs) + self.place_embedding(places))
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.final_norm(x))
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
