"""Every text of small models with hostile weights is tried: no proof is false."""

from collections import Counter
from functools import partial
from itertools import product

import pytest
import torch

from invformer.nn.transformer import CharEmbedding, CharTransformer
from invformer.proofs.prefix_margins import Networks, prefix_margins
from tests.proofs.models import MODELS
from tests.support.builders import SEQ_LEN

SYMBOLS, LENGTH = 4, 4
TEXTS = torch.tensor(list(product(range(SYMBOLS), repeat=LENGTH)))


@torch.no_grad()
def hostile_model(seed: int) -> CharTransformer:
    """A model of any kind in any format; every parameter is scaled and moved at random."""
    torch.manual_seed(seed)
    model = MODELS[[*MODELS][seed % len(MODELS)]]().eval()
    embedding = model.embedding
    width, channels = model.head.in_features, embedding.token.weight.shape[1]
    model.embedding = CharEmbedding(SYMBOLS, SEQ_LEN, width, channels)
    hostility = 2 * float(torch.rand(()))
    for parameter in model.parameters():
        size = torch.exp(hostility * torch.randn(())) if torch.rand(()) < 0.5 else 1.0
        own = parameter.abs().mean() + 0.1 * torch.rand(())
        parameter.copy_(size * (parameter + 0.3 * hostility * own * torch.randn_like(parameter)))
    return model.to(torch.float32 if torch.rand(()) < 0.5 else torch.float64)


@torch.no_grad()
def tried(seed: int, count: int = 12) -> Counter[str]:
    """Proofs from damaged states of a hostile model, each held against every other text.

    ``proven`` characters, ``pairs`` of a proven beginning and a text that begins otherwise, and how
    many of these are ``false``.
    """
    model, found = hostile_model(seed), Counter[str]()
    given = model.stack(model.embedding(TEXTS)).double()
    exact = model.double().stack(model.embedding(TEXTS))
    rounding = 1e-9 * exact.abs().amax() + (given - exact).norm(dim=-1).amax()
    prove = partial(prefix_margins, Networks(model, LENGTH), unknown=None)
    for share in (0.0, 0.45, 0.55, 1.0):  # of the way to a text with another symbol
        chosen = torch.randint(len(TEXTS), (count,))
        rival = chosen ^ torch.randint(1, SYMBOLS, ()) * SYMBOLS ** torch.randint(LENGTH, ())
        moved = share * (given[rival] - given[chosen])
        damaged, lengths = given[chosen] + moved, moved.norm(dim=-1) + rounding
        step = moved.abs().amax() + rounding
        rounded, entries = (given[chosen] / step).round() * step, step / 2 + rounding
        decoded = TEXTS[(given - damaged[:, None]).square().sum((-1, -2)).argmin(-1)]
        off, off_rounded = exact - damaged[:, None], exact - rounded[:, None]
        bare = prove(decoded, damaged)
        reach = (bare.margin - bare.distance)[:, None]
        cases = (
            (bare, off.norm(dim=-1) < reach - rounding),
            (prove(decoded, damaged, fit=True, states_within=lengths),
             off.norm(dim=-1) < lengths[:, None]),
            (prove(TEXTS[chosen], rounded, entries_within=entries),
             (off_rounded.abs() < entries - rounding).all(-1)),
        )  # fmt: skip
        for evidence, near in cases:  # (proofs, texts, tokens): which texts may have these states
            same = (TEXTS[None] == evidence.tokens[:, None]).cumprod(-1).bool()
            others = evidence.proven[:, None] & ~same
            false = others & near.cumprod(-1).bool()
            counts = {"proven": evidence.proven, "pairs": others, "false": false}
            found += Counter({name: int(count.sum()) for name, count in counts.items()})
    return found


def test_no_proof_about_a_hostile_model_is_false() -> None:
    found = sum((tried(seed, count=1) for seed in range(len(MODELS))), Counter())
    assert found["false"] == 0
    assert found["proven"] > 200


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 90, 9))
def test_a_million_pairs_of_proof_and_text_hold_no_false_proof(first: int) -> None:
    found = sum((tried(seed) for seed in range(first, first + 9)), Counter())
    assert found["false"] == 0
    assert found["pairs"] > 500_000
