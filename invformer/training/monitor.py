"""Local Lipschitz estimates during training, within a budget of the step time."""

from typing import Any

import lightning as L
import torch
from jaxtyping import Integer
from torch import Tensor

from invformer.errors import CheckpointError
from invformer.evaluation.lipschitz import Row, lipschitz_row, local_bound_row
from invformer.lipschitz.branch_jacobians import branch_jacobians
from invformer.lipschitz.probe import OWN_TOKEN, LipschitzProbe
from invformer.numerics.linear_map import LinearMap
from invformer.runs.run_log import RunLog
from invformer.training.callbacks import is_last_step, is_step_boundary
from invformer.training.module import CharLanguageModel
from invformer.training.probe_budget import (
    AIM,
    Choice,
    Clock,
    Ledger,
    Price,
    Size,
    choose,
    could_be_better,
    is_due,
    probe_sizes,
)

# Step 0 allocates and compiles; the next ones are timed, then the probe is chosen.
CALIBRATE_AT = 6
# Power iteration steps of one look, where optimiser steps are left out: four of them every fourteen
# cost as much as one every seven, and came at least eight times as near (docs/log.md).
MOST_POWER_STEPS = 4
# Optimiser steps between two looks at what the chosen probe really costs.
RECHECK_EVERY = 200
MOST_STEPS = 10**9  # between two looks, far above any choice


class LipschitzMonitor(L.Callback):
    """Local Lipschitz estimates of every branch after every optimiser step, or after every few.

    Reads the weights, writes only metrics and its own vectors: training with and without it is
    bit-identical. What is left open of ``sequences``, ``length`` and ``every`` is chosen by timing,
    so that estimates take no more than ``budget`` of a step: at every step if that is possible, at
    as many characters as possible; otherwise at the shortest probe, less often. The choice is
    printed, recorded and kept in checkpoints; with all three given nothing is timed to decide, and
    the estimates repeat bit for bit. What is measured before validations counts, but is never left
    out.

    Args:
        tokens: the probe text, (sequences, N), of which a part may be used; fixed for the run.
        run_log: where estimates go.
        norms: in which norms.
        budget: largest share of the rest of a step that estimates and local bounds may take.
        every: optimiser steps between estimates; from ``local_every`` on, those before validations
            are all there are.
        sequences: sequences to measure at.
        length: characters of each sequence to measure at.
        local_every: optimiser steps between local bounds: the steps that validation follows, since
            a local bound waits for the device. The last step of a run is one of them.
        num_steps: power iteration steps per estimate; None is one for every optimiser step since
            the last estimate, up to four.
        seed: of the start vectors.
    """

    def __init__(
        self,
        tokens: Integer[Tensor, "sequences tokens"],
        run_log: RunLog,
        *,
        norms: tuple = ("token_max", "frobenius"),
        budget: float = 0.05,
        every: int | None = None,
        sequences: int | None = None,
        length: int | None = None,
        local_every: int = 250,
        num_steps: int | None = None,
        seed: int = 0,
    ) -> None:
        self.tokens = tokens
        self.run_log = run_log
        self.budget = budget
        self.every = every
        self.sizes = probe_sizes(tokens.shape[0], tokens.shape[1], sequences, length)
        self.local_every = local_every
        self.num_steps = num_steps
        self.options = {"norms": norms, "seed": seed}
        self.choice = Choice(self.sizes[0], every or 1)
        self.is_settled = every is not None and len(self.sizes) == 1
        self.ledger: Ledger | None = None
        self.probe: LipschitzProbe | None = None
        self._restored: dict[str, Any] = {}
        self._batch_started: Any = None
        self._steps = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Bind to the model on its device."""
        assert isinstance(pl_module, CharLanguageModel)
        self.ledger = Ledger(Clock(pl_module.device))
        self.probe = self.new_probe(pl_module, self.choice, first_steps=self.choice.size.length)
        if vectors := self._restored.get("vectors"):
            self.probe.load_state_dict(vectors)
            pl_module.gather()
            refuse_other_vectors(self.probe)

    def new_probe(
        self, module: CharLanguageModel, choice: Choice, first_steps: int
    ) -> LipschitzProbe:
        """What that measures; as many first steps as tokens let it visit every token."""
        tokens = self.tokens[: choice.size.sequences, : choice.size.length].to(module.device)
        return LipschitzProbe(
            module.model, tokens, num_steps=self.power_steps(choice.every),
            first_steps=first_steps, **self.options,
        )  # fmt: skip

    def power_steps(self, every: int) -> int:
        """Power iteration steps of a look, if there is one every so many steps."""
        return min(every, MOST_POWER_STEPS) if self.num_steps is None else self.num_steps

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Note when the step began, with accumulation its first batch."""
        assert self.ledger is not None
        if self._batch_started is None:
            self._batch_started = self.ledger.clock.mark()

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Estimate, and record next to the bounds of the same norm."""
        if not is_step_boundary(trainer):
            return
        assert isinstance(pl_module, CharLanguageModel)
        assert self.ledger is not None
        assert self.probe is not None
        began = self.ledger.clock.mark()
        if self._steps > 0:
            self.ledger.add_step(self._batch_started, began)
        self._batch_started = None
        self._steps += 1
        step = trainer.global_step - 1
        self.keep_budget(trainer, pl_module)
        precedes_validation = (step + 1) % self.local_every == 0 or is_last_step(trainer)
        if not (precedes_validation or is_due(step, self.choice.every, self.local_every)):
            return
        began = self.ledger.clock.mark()
        row = lipschitz_row(self.probe)
        ended = self.ledger.clock.mark()
        self.ledger.add_look(began, ended)
        if precedes_validation:
            row |= local_bound_row(self.probe.model, self.probe.tokens)
            self.ledger.add_local(ended, self.ledger.clock.mark())
        self.run_log.record(step, row | self.performance())

    def performance(self) -> Row:
        """What is measured how often, and which share of the rest of a step all of it takes.

        On average between validations: their looks and local bounds count, timing sizes does not.
        """
        assert self.ledger is not None
        self.ledger.settle()
        share = self.ledger.share(self.choice.every, self.local_every)
        row: Row = {
            "perf/monitor_probe_tokens": self.choice.size.tokens,
            "perf/monitor_every": self.choice.every,
            "perf/monitor_power_steps": self.power_steps(self.choice.every),
        }
        return row if share is None else row | {"perf/monitor_overhead": share}

    @property
    def aim(self) -> float:
        """The share of a step that a choice is made for."""
        return AIM * self.budget

    def keep_budget(self, trainer: L.Trainer, module: CharLanguageModel) -> None:
        """Choose after the first few steps; now and then see whether that was right."""
        assert self.ledger is not None
        if len(self.sizes) == 1 and self.every is not None:
            return
        if not self.is_settled:
            if self._steps == CALIBRATE_AT:
                self.calibrate(trainer, module)
        elif self._steps % RECHECK_EVERY == 0:
            self.ledger.settle()
            share = self.ledger.share(self.choice.every, self.local_every)
            known = self.ledger.price(), self.ledger.rest_of_step(), share
            price, rest, share = trainer.strategy.broadcast(known)
            if share is not None and could_be_better(
                self.choice, share, self.budget, self.sizes, self.local_every, self.every
            ):
                self.calibrate(trainer, module)
            elif price is not None and rest is not None and self.every is None:
                # The same probe as often as fits by what it took lately: nothing has to be timed.
                # Less often only if it did take too much.
                size = self.choice.size
                choice = choose({size: price}, rest, self.aim, self.local_every)
                too_much = share is not None and share > self.budget
                if choice.every < self.choice.every or too_much:
                    self.adopt(module, choice, price, rest)
            self.ledger.forget()

    def calibrate(self, trainer: L.Trainer, module: CharLanguageModel) -> None:
        """Time one size after the other, choose, and say so if that is news.

        The device is waited for here and nowhere else: once a run, unless a choice proves wrong.
        """
        assert self.ledger is not None
        if module.device.type == "cuda":
            torch.cuda.synchronize()
        self.ledger.settle()
        rest = self.ledger.rest_of_step()
        assert rest is not None
        prices: dict[Size, Price] = {}
        for size in self.sizes:
            price = self.time_look(module, Choice(size, self.every or 1))
            is_dear = price.per_step(self.every or 1, self.local_every) > self.aim * rest
            if is_dear and not prices and self.every is None:  # it will leave out steps
                price = self.time_look(module, Choice(size, MOST_POWER_STEPS))
            prices[size] = price
            if is_dear:
                break
        prices, rest = trainer.strategy.broadcast((prices, rest))
        choice = choose(prices, rest, self.aim, self.local_every, self.every)
        price = prices[choice.size]
        if choice.size != self.choice.size:
            self.probe = self.new_probe(module, choice, first_steps=choice.size.length)
        self.adopt(module, choice, price, rest)
        self.ledger.forget()
        self.ledger.local.clear()  # of another probe
        self.ledger.local.append(price.local)

    def adopt(self, module: CharLanguageModel, choice: Choice, price: Price, rest: float) -> None:
        """Measure that from now on, and say so if that is news."""
        assert self.probe is not None
        steps = self.probe.num_steps = self.power_steps(choice.every)
        if choice != self.choice or not self.is_settled:
            each = "" if steps == 1 else f" ({steps} power iteration steps each)"
            module.print(
                f"monitor: {choice.describe()}{each}, "
                f"{price.per_step(choice.every, self.local_every) / rest:.1%} of a step "
                f"(monitor.budget={self.budget})"
            )
        self.choice = choice
        self.is_settled = True

    def time_look(self, module: CharLanguageModel, choice: Choice) -> Price:
        """Seconds that a look and local bounds take, once they run."""
        assert self.ledger is not None
        probe = self.new_probe(module, choice, first_steps=self.power_steps(choice.every))
        ledger = Ledger(self.ledger.clock)
        for repetition in range(4):
            began = ledger.clock.mark()
            lipschitz_row(probe)
            looked = ledger.clock.mark()
            local_bound_row(probe.model, probe.tokens)
            if repetition:  # the first one allocates and compiles
                ledger.add_look(began, looked)
                ledger.add_local(looked, ledger.clock.mark())
        if probe.tokens.is_cuda:
            torch.cuda.synchronize()
        ledger.settle()
        price = ledger.price()
        assert price is not None
        return price

    def state_dict(self) -> dict[str, Any]:
        """The choice and the warm-started vectors: a resumed run continues its estimates."""
        if self.probe is None:
            return self._restored
        return {
            "choice": self.choice.to_dict(),
            "is_settled": self.is_settled,
            "vectors": self.probe.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue with a checkpoint's choice and vectors.

        Raises:
            CheckpointError: this monitor could not have chosen that.
        """
        choice, is_settled = state_dict["choice"], state_dict["is_settled"]
        plain = all(type(number) is int for number in choice.values())
        self.choice = Choice.from_dict(choice)
        every = self.choice.every
        if (
            not plain
            or self.choice.to_dict() != choice
            or type(is_settled) is not bool
            or self.choice.size not in self.sizes
            or not (1 <= every <= MOST_STEPS if self.every is None else every == self.every)
        ):
            raise CheckpointError(f"the Lipschitz monitor never chose {choice!r:.80}")
        self._restored, self.is_settled = state_dict, is_settled


@torch.no_grad()
def refuse_other_vectors(probe: LipschitzProbe) -> None:
    """Whether restored vectors are those that following the model's branches takes.

    Raises:
        CheckpointError: naming what does not fit.
    """
    wanted: dict[str, LinearMap] = {}
    for group in branch_jacobians(probe.model, probe.tokens):
        wanted[group.names[0]] = group.jacobian
        if group.own_token is not None and probe.follows_apart(group):
            wanted[group.names[0] + OWN_TOKEN] = group.own_token
    if differing := wanted.keys() ^ probe.trackers.keys():
        raise CheckpointError(f"vectors of {min(differing):.60} are missing or unknown")
    for key, jacobian in wanted.items():
        tracker, shape = probe.trackers[key], jacobian.shape
        vectors = (tracker.tokens, tracker.lengths, tracker.whole)
        fit = [v.shape for v in vectors] == [shape, shape[:-1], shape]
        if (
            not fit
            or any(v.dtype != jacobian.dtype for v in vectors)
            or not 0 <= tracker.turn < shape[-2]
        ):
            raise CheckpointError(f"the vectors of {key} do not fit the model")
