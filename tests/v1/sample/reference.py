"""What the sampler must do, written plainly in numpy and float64."""

import numpy as np


def falling_order(logits: np.ndarray) -> np.ndarray:  # [vocab_size] → [vocab_size]
    """Return ids by falling logit, ties by id."""
    return np.lexsort((np.arange(len(logits)), -np.asarray(logits, np.float64)))


def log_softmax(logits: np.ndarray) -> np.ndarray:  # [vocab_size]
    logits = np.asarray(logits, np.float64)
    largest = logits.max()
    return logits - largest - np.log(np.exp(logits - largest).sum())


def ranks_of(logits: np.ndarray) -> np.ndarray:  # [vocab_size]
    order = falling_order(logits)
    ranks = np.empty(len(order), np.int64)
    ranks[order] = np.arange(1, len(order) + 1)
    return ranks


def count_kept(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> int:
    """Return how long a prefix of the falling order stays: min-p, then top-k, then top-p on what is left."""
    values = np.asarray(logits, np.float64)[falling_order(logits)] / temperature
    weights = np.exp(values - values[0])
    limit = len(values)
    if min_p > 0:
        limit = min(limit, int((weights >= min_p).sum()))
    if top_k > 0:
        limit = min(limit, top_k)
    if top_p < 1:
        shares = np.cumsum(weights[:limit]) / weights[:limit].sum()
        limit = min(limit, 1 + int((shares < top_p).sum()))
    return max(1, limit)


def filtered_probabilities(
    logits: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """Return the distribution that a draw must follow."""
    kept = falling_order(logits)[: count_kept(logits, temperature, top_k, top_p, min_p)]
    probabilities = np.zeros(len(logits))
    probabilities[kept] = np.exp(log_softmax(np.asarray(logits, np.float64)[kept] / temperature))
    return probabilities


def penalise(
    logits: np.ndarray,
    prompt: list[int],
    generated: list[int],
    presence: float = 0.0,
    frequency: float = 0.0,
    repetition: float = 1.0,
) -> np.ndarray:
    """Apply the three penalties, token by token."""
    result = np.asarray(logits, np.float64).copy()
    for token_id in range(len(result)):
        if token_id in prompt or token_id in generated:
            result[token_id] = result[token_id] / repetition if result[token_id] > 0 else result[token_id] * repetition
        count = generated.count(token_id)
        if count:
            result[token_id] -= frequency * count + presence
    return result
