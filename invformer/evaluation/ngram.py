"""The baseline a language model has to beat: an interpolated Witten–Bell character n-gram."""

import torch
from jaxtyping import Float, Integer
from torch import Tensor


def witten_bell_nats(
    train_tokens: Integer[Tensor, "train_characters"],
    eval_tokens: Integer[Tensor, "eval_characters"],
    order: int = 5,
    *,
    vocab_size: int,
) -> float:
    """Mean nats per character of a text under an n-gram model of another.

    With h the last k characters, h' the last k − 1 of them, c(·) counts in the training text and
    T(h) the number of distinct characters that followed h there,

        P_k(x | h) = (c(h x) + T(h) P_{k−1}(x | h')) / (c(h) + T(h)),    P_{−1}(x) = 1 / V,

    and P_k = P_{k−1} where h never occurred. The model is P_{order−1}; it has no parameter to tune.
    Every character counts once; one with fewer than order − 1 predecessors uses those it has, the
    first none.

    Cost: ``order`` sorts of the two texts together; seconds for a million characters.

    Args:
        train_tokens: the text that is counted.
        eval_tokens: the text that is predicted, in the same vocabulary, at least one token.
        order: n, the length of the longest n-gram; order − 1 characters of context.
        vocab_size: V, the number of tokens, the unknown one included.

    Returns:
        Mean −ln P over the evaluation text.

    Source:
        Witten & Bell 1991, "The zero-frequency problem", method C; interpolated as in Chen &
        Goodman 1999, §2.
    """
    if order < 1:
        raise ValueError(f"order {order} is not at least 1")
    if len(eval_tokens) == 0:
        raise ValueError("a text without characters has no mean")
    num_train = len(train_tokens)
    text = torch.cat([train_tokens.long(), eval_tokens.long()])
    probability = torch.full((len(eval_tokens),), 1 / vocab_size, dtype=torch.float64)
    context = torch.zeros_like(text)  # a number for the k characters before each position
    for k in range(min(order, len(eval_tokens), num_train)):
        gram = compact(context * vocab_size + text)
        interpolate(probability, gram, context, num_train, k)
        context = gram.roll(1)  # wrong at the first k + 1 positions of each text: never read
    return -probability.log().mean().item()


def compact(numbers: Integer[Tensor, "n"]) -> Integer[Tensor, "n"]:
    """Equal numbers become equal indices below n, so that the next product stays within int64."""
    return numbers.unique(return_inverse=True)[1]


def interpolate(
    probability: Float[Tensor, "eval_characters"],
    gram: Integer[Tensor, "characters"],
    context: Integer[Tensor, "characters"],
    num_train: int,
    k: int,
) -> None:
    """P_{k−1} → P_k in place, for the characters that have k predecessors in their own text."""
    train_gram, train_context = gram[k:num_train], context[k:num_train]
    eval_gram, eval_context = gram[num_train + k :], context[num_train + k :]
    size = len(gram)
    first = first_occurrences(train_gram)
    gram_count = train_gram.bincount(minlength=size)[eval_gram]
    context_count = train_context.bincount(minlength=size)[eval_context]
    followers = train_context[first].bincount(minlength=size)[eval_context]
    lower = probability[k:]
    mixed = (gram_count + followers * lower) / (context_count + followers)
    probability[k:] = mixed.where(context_count > 0, lower)


def first_occurrences(numbers: Integer[Tensor, "n"]) -> Integer[Tensor, "distinct"]:
    """One position of each distinct number."""
    position = torch.full((int(numbers.max()) + 1,), -1)
    position[numbers] = torch.arange(len(numbers))
    return position[position >= 0]
