"""The local constants of any model's submodules, step after step, for two or four products each."""

import logging
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from invformer.lipschitz.calls import is_linear
from invformer.lipschitz.measuring import measuring
from invformer.lipschitz.submodules import LocalConstants, measure_calls, random_like
from invformer.lipschitz.taps import Taps, named

# Steps of power iteration of the first estimate, which starts at random.
FIRST_STEPS = 8
# Steps of a matrix; twice as many in the measurements after it, while weights move fast.
STEPS_OF_MATRIX, EARLY = 2, 10
# Part of the submodules that mix everything which take a second step, all of them while EARLY.
RESTLESS = 0.25
# Part of ‖J‖² that is subtracted from JJᵀ; below ½ the largest singular value stays the largest.
SHIFT = 0.4
# Weight of all groups but the largest in a vector: enough to see them, and no part of its gain.
PILOT = 0.01
# What a submodule does not mix is looked for again at measurements 0, 1, 4, 16, and so on.
AGAIN = 4
# In the place of that number of dimensions: what needs no pass of the model.
MATRIX, IDENTITY = -1, -2
IDENTITIES = nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout

log = logging.getLogger(__name__)
Item = TypeVar("Item")


class SubmoduleProbe:
    """‖∂f/∂x‖₂ of every submodule f of any model at fixed inputs, while the model trains.

    The first measurement is :func:`.local_constants` with few steps. A later one starts from its
    vectors and takes one step of power iteration, a product with Jᵀ and one with J, with the
    model's present weights. Those submodules that mix all entries whose gains grew most, a quarter
    of them, take a second step, because another singular vector may have become the largest. One
    forward pass serves all submodules; those of one level of nesting share their products
    (:class:`.Taps`). A ``nn.Linear`` takes products with its matrix instead.

    If f does not mix entries, tokens or samples (:meth:`_find_groups`), each such group keeps a
    vector of its own. They are summed with small weights, and weight 1 for the largest group, so
    that another one is seen as soon as it is larger. Values are gains of unit vectors of the whole
    input, so below the constants up to rounding, whether the groups are right or not.

    Args:
        model: any module; its weights may change between measurements, its modules may not.
        inputs: what the model is called with: a tuple of arguments, a dictionary of keywords, or
            one argument.
        seed: of the start vectors.
    """

    def __init__(self, model: nn.Module, inputs: Any, seed: int = 0) -> None:
        self.model, self.seed = model, seed
        self.inputs = inputs if isinstance(inputs, tuple) else (inputs,)
        self.left: dict[str, Tensor] = {}
        self.weights: dict[str, Tensor] = {}  # of the groups in it
        self.dims: dict[str, int] = {}  # so many leading dimensions of x and f(x) count groups
        self.num_measured = 0
        self.skipped: dict[str, str] = {}
        self.notes: dict[str, str] = {}

    def measure(self) -> LocalConstants:
        """The constants now."""
        gains = self.gains()
        values = torch.stack(list(gains.values())).tolist() if gains else []
        return LocalConstants(dict(zip(gains, values, strict=True)), self.skipped, self.notes)

    @torch.no_grad()
    def gains(self) -> dict[str, Tensor]:
        """An estimate for each submodule, a scalar on its device."""
        with measuring(self.model):
            modules = dict(self.model.named_modules())
            if not self.left or not self.dims.keys() <= modules.keys():
                return self._start()
            tapped = {modules[name]: name for name, dims in self.dims.items() if dims >= 0}
            taps, found = Taps(tapped, self.model, self.inputs), {}
            if not self._fits(modules, taps):
                return self._start()
            for name, dims in self.dims.items():
                if dims == IDENTITY:
                    found[name] = torch.ones_like(self.left[name])
                elif dims == MATRIX:
                    found[name] = self._step_of_matrix(name, modules[name])
            for level in sorted(taps.levels, reverse=True):  # what is inside, first
                if self.num_measured in {0, *(AGAIN**k for k in range(12))}:
                    self._find_groups(taps, level)
                kinds = grouped(taps.levels[level], self._maps_entries)
                for names in kinds:
                    step = self._step_of_entries if self._maps_entries(names[0]) else self._step
                    found |= step(taps, level, names)
            self.num_measured += 1
            return {name: found[name] for name in self.left if name in found}

    def _maps_entries(self, name: str) -> bool:
        """Whether a submodule maps every entry on its own."""
        return self.dims[name] == self.left[name].dim()

    def _fits(self, modules: dict[str, nn.Module], taps: Taps) -> bool:
        """Whether the vectors have the shapes of this model's outputs at these inputs."""
        shapes = {name: tap.output_shape for at in taps.levels.values() for name, tap in at.items()}
        for name, dims in self.dims.items():
            if dims == MATRIX:
                weight = getattr(modules[name], "weight", torch.empty(0))
                shapes[name] = torch.Size((1, len(weight)))
        return all(self.left[name].shape == shape for name, shape in shapes.items())

    def _start(self) -> dict[str, Tensor]:
        """Measure from random vectors, check every submodule, and keep the vectors."""
        if self.left:
            log.warning("the vectors are of another model or other inputs: estimates start anew")
            self.left, self.weights, self.dims, self.num_measured = {}, {}, {}, 0
        found, gains = LocalConstants(), {}
        for name, call, jacobian, estimate in measure_calls(
            self.model, self.inputs, found, num_steps=FIRST_STEPS, rtol=1e-3, seed=self.seed
        ):
            image = jacobian.jvp(estimate.vector)
            self.dims[name] = MATRIX if is_linear(call) else 0
            if self.dims[name] == 0:
                image = image.view(call.output_shape)
            if type(call.module) in IDENTITIES and torch.equal(call.row, jacobian.value):
                self.dims[name], image = IDENTITY, image.new_ones(())
            if not image.any():  # a branch may begin at zero
                image = image + random_like(image)
            self.left[name] = image / longer_than_zero(image.norm())
            gains[name] = estimate.value.squeeze()
        self.skipped, self.notes = found.skipped, found.notes
        return gains

    def _step_of_matrix(self, name: str, module: nn.Module) -> Tensor:
        """Steps with the matrix of a ``nn.Linear``, (out, in), which are nearly free."""
        matrix, a = cast(Tensor, module.weight), self.left[name]
        gain = a.new_zeros(())
        for _ in range(STEPS_OF_MATRIX * (2 if self.num_measured < EARLY else 1)):
            w = a @ matrix
            gain = w.norm()
            image = torch.addcmul(w @ matrix.mT, gain.square(), a, value=-SHIFT)
            a = image / longer_than_zero(image.norm())
        self.left[name] = torch.where(gain.isfinite() & (gain > 0), a, self.left[name])
        return gain

    def _step(self, taps: Taps, level: int, names: list[str]) -> dict[str, Tensor]:
        """One step of power iteration for submodules of a level, and a second one for some."""
        at, found, mixing = taps.levels[level], {}, []

        def form(name: str) -> Hashable:
            y = self.left[name]
            return self.dims[name], y.shape, at[name].input_shape, y.dtype

        stacks = grouped(names, form)
        left = [torch.stack([self.left[name] for name in names]) for names in stacks]
        w, push = taps.pair(level, stacks, left)
        right = list(map(self._turned, stacks, left, w))
        images = push(named(stacks, [x for x, *_ in right]))
        for names, a, each, (x, heavy, shift), image in zip(
            stacks, left, w, right, images, strict=True
        ):
            gain, before = norms(image, 1), norms(each, 1)
            found.update(zip(names, torch.maximum(gain, before), strict=True))
            if self.dims[names[0]] == 0:
                mixing += zip(names, x, image, gain / before, strict=True)
            self._keep(names, a, image - over(shift, image) * a, heavy, gain)
        if mixing:
            found |= self._second_step(taps, level, mixing, stacks, push)
        return found

    def _step_of_entries(self, taps: Taps, level: int, names: list[str]) -> dict[str, Tensor]:
        """The gain where it was largest before, from a product that shows where it is now."""
        found = {}
        for _ in range(2 if self.num_measured < EARLY else 1):
            for name, w in taps.products(level, {n: self.left[n] for n in names}).items():
                if w is None:
                    found[name] = self.left[name].new_zeros(())
                    continue
                found[name] = w.norm()
                growth = (w / self.weights[name]).abs()
                self.weights[name] = self.left[name] = heaviest(growth[None])[0]
        return found

    def _turned(self, names: list[str], a: Tensor, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Unit vectors x of the right side for w = Jᵀa, weights of their groups, and the shifts."""
        share = torch.stack([self.weights[name] for name in names])
        lengths = longer_than_zero(norms(w, share.dim()))
        heavy = heaviest(lengths / share)
        # (JJᵀ − s) a of each group turns to its limit faster than JJᵀa.
        return w * over(heavy / lengths, w), heavy, SHIFT * lengths * heavy / share**2

    def _keep(
        self, names: list[str], a: Tensor, image: Tensor, heavy: Tensor, gain: Tensor
    ) -> None:
        """Directions for the next measurement, instead of a unless they are not finite."""
        image = image * over(heavy / longer_than_zero(norms(image, heavy.dim())), image)
        moves = over(gain.isfinite() & (gain > 0), a)
        self.left |= zip(names, torch.where(moves, image, a).unbind(), strict=True)
        self.weights |= zip(names, heavy.unbind(), strict=True)

    def _second_step(
        self,
        taps: Taps,
        level: int,
        mixing: list[tuple[str, Tensor, Tensor, Tensor]],
        stacks: list[list[str]],
        push: Callable[[dict[str, Tensor]], list[Tensor]],
    ) -> dict[str, Tensor]:
        """The largest gain in the span of x and JᵀJx, from x and Jx (Lanczos).

        Of the submodules that mix everything it takes the part whose gains grew most.
        """
        part = 1.0 if self.num_measured < EARLY else RESTLESS
        growth = torch.stack([each[-1] for each in mixing]).nan_to_num().tolist()
        order = sorted(range(len(mixing)), key=growth.__getitem__, reverse=True)
        most = [mixing[i] for i in order[: max(1, int(part * len(mixing)))]]
        groups = grouped(most, lambda each: (each[1].shape, each[2].shape, each[1].dtype))
        names = [[name for name, *_ in some] for some in groups]
        xs = [torch.stack([x for _, x, *_ in some]) for some in groups]
        images = [torch.stack([image for *_, image, _ in some]) for some in groups]
        w = taps.products(level, named(names, map(unit, images)))
        pulled = taps.stacked(level, names, images, w)
        # Twice, because what is left may be short.
        others = [across(across(each, x), x) for each, x in zip(pulled, xs, strict=True)]
        pushed = named(stacks, push(named(names, others)))
        found: dict[str, Tensor] = {}
        for some, x, o, d in zip(names, xs, images, others, strict=True):
            p = torch.stack([pushed[name] for name in some])
            angle = torch.atan2(2 * inner(o, p), inner(o, o) - inner(p, p)) / 2
            cos, sin = angle.cos(), angle.sin()
            best, image = (over(cos, a) * a + over(sin, b) * b for a, b in ((x, d), (o, p)))
            gain = norms(image, 1) / norms(best, 1)
            found.update(zip(some, gain, strict=True))
            a = torch.stack([self.left[name] for name in some])
            self._keep(some, a, image, torch.ones_like(gain), gain)
        return found

    def _find_groups(self, taps: Taps, level: int) -> None:
        """How many leading dimensions of x and f(x) count what f does not mix.

        The gradient of one half of the outputs has to be zero at the other half of the inputs, for
        a random half and its complement.
        """
        at = taps.levels[level]
        open_, before = set(at), dict(self.dims)
        generator = torch.Generator().manual_seed(self.seed)
        for back in range(3):  # entries, then rows of the last dimension, then of the last two
            trial: dict[str, tuple[int, Tensor]] = {}
            for name in sorted(open_):
                x, y = at[name].input_shape, self.left[name].shape
                dims = len(y) - back
                if dims > 0 and x[:dims] == y[:dims] and y[:dims].numel() > 1:
                    half = torch.randint(2, y[:dims], generator=generator).bool()
                    half.view(-1)[:2] = torch.tensor([True, False])
                    rest = (1,) * (len(y) - dims)
                    trial[name] = dims, half.view(*y[:dims], *rest).to(self.left[name].device)
            mixed: set[str] = set()
            for side in (True, False):
                ones = {
                    name: (half == side).to(self.left[name].dtype).expand(self.left[name].shape)
                    for name, (_, half) in trial.items()
                }
                for name, w in taps.products(level, ones).items() if ones else ():
                    dims, half = trial[name]
                    inside = norms(w, dims).flatten() if w is not None else ones[name].new_zeros(1)
                    here = (half == side).flatten()
                    if w is None or not bool(inside[~here].max() <= 1e-6 * inside[here].max()):
                        mixed.add(name)
            for name in trial.keys() - mixed:
                self.dims[name] = trial[name][0]
                open_.discard(name)
        for name in open_:
            self.dims[name] = 0
        for name in at:
            if self.dims[name] != before[name] or name not in self.weights:
                vector = self.left[name]  # the new groups' directions begin alike
                noise = torch.randn(vector.shape, generator=generator, dtype=torch.float64)
                vector = vector + 1e-3 * noise.to(vector) / noise.norm()
                lengths = norms(vector, self.dims[name])
                self.weights[name] = heaviest(lengths[None])[0]
                weights = self.weights[name] / longer_than_zero(lengths)
                self.left[name] = vector * over(weights, vector)

    def state_dict(self) -> dict[str, Any]:
        """The vectors that the next measurement starts from, and what the first one found."""
        names = ("left", "weights", "dims", "num_measured", "skipped", "notes")
        return {name: getattr(self, name) for name in names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        device = next(self.model.parameters(), torch.empty(0)).device
        for name, value in state.items():
            setattr(self, name, dict(value) if isinstance(value, Mapping) else value)
        for held in (self.left, self.weights):
            held.update({name: tensor.to(device) for name, tensor in held.items()})


def grouped(items: Iterable[Item], form: Callable[[Item], Hashable]) -> list[list[Item]]:
    """Items of one form together, in the order in which forms appear."""
    groups: dict[Hashable, list[Item]] = {}
    for item in items:
        groups.setdefault(form(item), []).append(item)
    return list(groups.values())


def unit(x: Tensor) -> Tensor:
    """Stacked vectors with length 1."""
    return x / over(longer_than_zero(norms(x, 1)), x)


def across(w: Tensor, x: Tensor) -> Tensor:
    """The unit vectors of the parts of w that are orthogonal to unit vectors x, stacked."""
    return unit(w - over(inner(w, x), x) * x)


def inner(x: Tensor, y: Tensor) -> Tensor:
    """⟨x, y⟩ of stacked vectors."""
    return (x * y).reshape(len(x), -1).sum(1)


def norms(x: Tensor, dims: int) -> Tensor:
    """‖·‖₂ of each group, one for every index of the first dimensions."""
    return x.flatten(dims).norm(dim=-1) if dims < x.dim() else x.abs()


def over(factors: Tensor, x: Tensor) -> Tensor:
    """A factor for each group, to be multiplied with x."""
    return factors.view(*factors.shape, *(1,) * (x.dim() - factors.dim()))


def heaviest(growth: Tensor) -> Tensor:
    """Weights of length 1: one for a module's largest group, PILOT for all others together."""
    if growth.dim() == 1:
        return torch.ones_like(growth)
    flat = growth.flatten(1)
    pilot = PILOT / flat.shape[1] ** 0.5
    weights = torch.full_like(flat, pilot).scatter_(1, flat.argmax(1, keepdim=True), 1.0)
    return (weights / (1 + (flat.shape[1] - 1) * pilot**2) ** 0.5).view(growth.shape)


def longer_than_zero(lengths: Tensor) -> Tensor:
    """Lengths to divide by."""
    return lengths.clamp_min(torch.finfo(lengths.dtype).tiny)
