"""float32 transformers as the reference, and what it says about a text."""

import functools
import pathlib

import numpy as np
import torch
from transformers import AutoModelForCausalLM

TOLERANCE = 1e-4
TAIL_TOLERANCE = 2e-3  # for values below −15
NEIGHBOUR_GAP = 1e-4  # ranks must agree where no other value lies within this


@functools.lru_cache(maxsize=2)
def load_reference(folder: pathlib.Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.inference_mode()
def compute_reference_logprobs(folder: pathlib.Path, token_ids: list[int]) -> np.ndarray:
    """Return log-softmax rows [len(token_ids), vocab] float32; row i is the distribution after position i."""
    logits = load_reference(folder)(torch.tensor([token_ids])).logits[0].float()
    return torch.log_softmax(logits, dim=-1).numpy()


@torch.inference_mode()
def generate_reference_greedily(folder: pathlib.Path, token_ids: list[int], num_tokens: int) -> list[int]:
    model = load_reference(folder)
    ids = torch.tensor([token_ids])
    cache, made = None, []
    for _ in range(num_tokens):
        out = model(ids, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        ids = out.logits[:, -1:].argmax(-1)
        made.append(int(ids))
    return made


def assert_row_matches(position: dict, row: np.ndarray, chosen: int, num_top: int, where: str) -> None:
    """Check one position of logprobs against a reference row: order, count, values, ranks."""
    assert next(iter(position)) == chosen, f"{where}: the chosen token does not stand first"
    in_top = position[chosen].rank <= num_top
    assert len(position) == (max(num_top, 1) if in_top or num_top == 0 else num_top + 1), where
    others = [entry.logprob for token, entry in position.items() if token != chosen]
    assert others == sorted(others, reverse=True), f"{where}: the row does not fall"
    for token, entry in position.items():
        want = row[token]
        tolerance = TOLERANCE if want >= -15 else TAIL_TOLERANCE
        assert abs(entry.logprob - want) <= tolerance, f"{where}: token {token}: {entry.logprob} against {want}"
        if np.sum(np.abs(row - want) <= NEIGHBOUR_GAP) == 1:
            assert entry.rank == 1 + int(np.sum(row > want)), f"{where}: rank of token {token}"
    assert type(position[chosen].logprob) is float and type(position[chosen].rank) is int
