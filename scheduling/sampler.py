"""Chooses the next tokens from logits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import pad

from .base import INVALID_TOKEN
from .sampling_params import SamplingParams


def sample(
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    positions: Sequence[int],
) -> NDArray[np.int32]:
    """Choose one token a row.

    The random number of a row comes from its seed and its position alone (by Philox,
    Salmon et al., 2011), so neither the rest of the batch nor the schedule changes it.

    Args:
        logits: Floating point `[num_rows, vocab_size]`. Negative infinity stands for a
            token that must not be chosen.
        params: Options of each row, `[num_rows]`. Without a seed, it is 0.
        positions: Position that each chosen token will take, `[num_rows]`.

    Returns:
        Token ids, int32 `[num_rows]`. Of equal logits the lower id counts as likelier.
        `INVALID_TOKEN` for a row with a NaN or a positive infinity anywhere, or with
        nothing but negative infinities, whatever its options.
    """
    tokens = logits.argmax(-1)
    # NaN counts as the highest, so this is finite for the good rows alone. It stays on
    # the device: nothing waits for it.
    is_valid = logits.gather(-1, tokens[:, None])[:, 0].isfinite()
    random_rows = [row for row, p in enumerate(params) if not p.is_greedy]
    if random_rows:
        tokens[random_rows] = _draw(
            logits[random_rows],
            [params[row] for row in random_rows],
            [_uniform(params[row].seed or 0, positions[row]) for row in random_rows],
        )
    tokens = tokens.masked_fill(~is_valid, INVALID_TOKEN)
    return tokens.to(torch.int32).cpu().numpy()


def _uniform(seed: int, position: int) -> float:
    """Return the number in `[0, 1)` that belongs to `seed` and `position`."""
    return np.random.Generator(np.random.Philox(counter=position, key=seed)).random()


def _draw(
    logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> torch.Tensor:
    """Draw from the filtered distributions by their inverse CDF, int64 `[num_rows]`."""

    def column(values: Sequence[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float64, device=logits.device)[:, None]

    # float64: in a CDF over a large vocabulary, float32 loses the rare tokens.
    ordered, token_ids = logits.double().sort(stable=True, dim=-1, descending=True)
    # The maximum goes first: dividing it by a tiny temperature would overflow.
    scaled = (ordered - ordered[:, :1]) / column([p.temperature for p in params])
    vocab_size = logits.shape[-1]
    ranks = torch.arange(vocab_size, device=logits.device)
    top_k = column([p.top_k or vocab_size for p in params])
    probs = scaled.masked_fill(ranks >= top_k, -torch.inf).softmax(-1)
    # A token stays while those before it do not add up to top_p; the first always does.
    before = pad(probs.cumsum(-1)[:, :-1], (1, 0))
    probs = probs.masked_fill(before >= column([p.top_p for p in params]), 0)
    cdf = probs.cumsum(-1)
    targets = column(uniforms) * cdf[:, -1:]
    drawn = torch.searchsorted(cdf, targets, right=True)
    # Rounding can lift a target to the end of the CDF, past the last possible token.
    # A row of NaN has none; on a GPU, index -1 would end the process.
    last = ((probs > 0).sum(-1, keepdim=True) - 1).clamp(min=0)
    return token_ids.gather(-1, drawn.minimum(last))[:, 0]
