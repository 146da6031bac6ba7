"""Each check yields its rows as they are measured."""

import copy
import itertools
import math
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.gpu.machine import MODELS, PRECISIONS, Machine, Row, at_most, failed, holds

KERNELS = ("auto", "math", "sdpa", "triton")
# Relative errors of the loss and of all gradients together, against float64 on the processor.
LIMITS = {"32-true": (1e-5, 1e-4), "bf16-mixed": (2e-3, 3e-2), "16-mixed": (3e-4, 4e-3)}
TRAINED = ("contractive_l2", "causal_bounded", "dot_product")
FLOAT16_SCALE = 2.0**12  # of the loss, as a gradient scaler would have it


def gradients(model: nn.Module, text: torch.Tensor, precision: str) -> tuple[float, torch.Tensor]:
    """Loss and all gradients in one vector, both in float64 on the processor."""
    model.zero_grad(set_to_none=True)
    dtype, device = PRECISIONS[precision], text.device.type
    with torch.autocast(device, dtype, enabled=dtype != torch.float32):
        logits = model(text[:, :-1])
    loss = F.cross_entropy(
        logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1),
        text[:, 1:].flatten(),
    )
    scale = FLOAT16_SCALE if dtype == torch.float16 else 1.0
    (scale * loss).backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    return loss.item(), torch.cat([g.double().flatten().cpu() for g in found]) / scale


def arithmetic(machine: Machine) -> Iterator[Row]:
    """Loss and gradients of every model, precision and kernel against float64."""
    from invformer.kernels.attention import only

    for name in MODELS:
        model, text = machine.model(name)
        with only("math"):
            loss, wanted = gradients(copy.deepcopy(model).double(), text, "32-true")
        model, text = model.to(machine.device), text.to(machine.device)
        for precision, (of_loss, of_gradients) in LIMITS.items():
            for kernel in KERNELS:
                case = f"{name}, {precision}, {kernel}"
                try:
                    with machine.rules(), only(kernel):
                        got, found = gradients(model, text, precision)
                except Exception as error:
                    yield failed("gradients", case, error)
                    continue
                error = ((found - wanted).norm() / wanted.norm()).item()
                wrong = abs(got / loss - 1)
                worst = error if wrong <= of_loss else math.nan
                yield at_most(
                    "gradients", case, worst, of_gradients, f"error of the loss {wrong:.0e}"
                )


def compiled(machine: Machine) -> Iterator[Row]:
    """Gradients under bfloat16 autocast of blocks that are compiled, each as one graph."""
    from invformer.kernels.attention import only
    from invformer.kernels.host import compiler_complaint
    from invformer.weights.spectral import set_manual_refresh

    why = compiler_complaint(machine.device) if machine.is_gpu else "needs a GPU: takes minutes"
    if why is not None:
        yield Row("compiled blocks", "all", verdict="not run", note=f"{why:.200}")
        return
    for name in TRAINED:
        model, text = machine.model(name)
        with only("math"):
            _, wanted = gradients(copy.deepcopy(model).double(), text, "32-true")
        model, text = model.to(machine.device), text.to(machine.device)
        set_manual_refresh(model)  # as in training
        for block in model.stack.blocks:
            block.compile(fullgraph=True)
        try:
            _, found = gradients(model, text, "bf16-mixed")
        except Exception as error:
            yield failed("compiled blocks", name, error)
            continue
        error = ((found - wanted).norm() / wanted.norm()).item()
        yield at_most("compiled blocks", name, error, LIMITS["bf16-mixed"][1])


@torch.no_grad()
def inversion(machine: Machine) -> Iterator[Row]:
    """The certificate of every invertible model, and a round trip in two precisions."""
    from invformer.nn import certify

    for name in MODELS[:5]:
        model, text = machine.model(name)
        model = model.double().eval()
        wanted = certify(model)
        with machine.rules():
            there = copy.deepcopy(model).to(machine.device)
            found, of_text = certify(there), text[:, :-1].to(machine.device)
            errors = [abs(found.per_branch[n] / b - 1) for n, b in wanted.per_branch.items()]
            yield at_most("certificate", name, max(errors), 1e-10)
            for dtype, limit in ((torch.float64, 1e-8), (torch.float32, 1e-3)):
                there = there.to(dtype)
                x = there.embedding(of_text)
                solution = there.stack.inverse(there.stack(x), throw=False)
                case, error = f"{name}, {dtype}".replace("torch.", ""), (solution.value - x).norm()
                yield at_most("inverse", case, (error / x.norm()).item(), limit)


def skipped_step(machine: Machine) -> Iterator[Row]:
    """An update that is not finite changes neither weights nor the optimiser's memory."""
    from invformer.config.schema import OptimConfig
    from invformer.training.guard import UpdateGuard
    from invformer.training.optimizers import build_optimizer

    for name in ("adamw", "muon"):
        model, text = machine.model("contractive_l2")
        model, text = model.to(machine.device), text.to(machine.device)
        how = OptimConfig(name=name, lr=1e-3, muon_lr=1e-2)
        optimizer, guard = build_optimizer(model, how), UpdateGuard()
        kept: list[torch.Tensor] = []
        for step in range(3):
            gradients(model, text, "32-true")
            present = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
            if step == 2:
                kept = [p.detach().clone() for p in model.parameters()]
                next(iter(present.values())).view(-1)[0] = torch.nan
            guard.inspect(step, torch.zeros((), device=machine.device), present)
            optimizer.found_inf = guard.lost
            optimizer.step()
        same = all(torch.equal(p, k) for p, k in zip(model.parameters(), kept, strict=True))
        culprit = guard.culprit()
        yield holds("step that is not finite is skipped", name, same)
        yield holds("and named", name, culprit is not None and culprit[0] == 2)


def training(machine: Machine, name: str, *words: str) -> Any:
    """A run of train.py on the text that ships with Python, in a folder of its own."""
    from invformer.training.build import build_run

    sizes = ["model.d_model=32", "model.num_heads=2", "model.num_layers=2", "data.seq_len=32"]
    how = [
        "trainer.progress=false", "trainer.sample_length=0", "logger.name=none",
        "data.max_characters=20000", "trainer.max_steps=24", "trainer.val_every=12",
        f"trainer.accelerator={'gpu' if machine.is_gpu else 'cpu'}", "monitor.flush_every=100",
    ]  # fmt: skip
    where = [f"run.root={machine.folder / 'runs'}", f"run.name={name}"]
    return build_run(machine.config(*sizes, *how, *where, *words))


def weights_after(run: Any, callback: Any = None) -> list[torch.Tensor]:
    """Train, and the weights that it ends with."""
    from invformer.training.fit import train

    if callback is not None:
        run.trainer.callbacks.insert(0, callback)
    try:
        train(run)
    finally:
        torch.use_deterministic_algorithms(False)
    return [p.detach().cpu() for p in run.module.model.parameters()]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """To the bit."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


class Stopped(Exception):
    """What ends a run early here."""


def runs(machine: Machine) -> Iterator[Row]:
    """Twenty steps wait for nothing; a run continues to the same bits, watched or not."""
    import lightning as L

    from tests.support.small_runs import Waits

    class Stop(L.Callback):
        """Ends a run after a step that nothing was saved at."""

        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            if trainer.global_step == 17:
                raise Stopped

    every = list(itertools.product(TRAINED, ("32-true", "bf16-mixed")))
    for model, precision in every if machine.is_gpu else every[1:3]:
        words, case = [f"model={model}", f"trainer.precision={precision}"], f"{model}, {precision}"
        name = f"{model}-{precision}"
        if model == "dot_product":
            words, case = [*words, "model.dropout=0.1"], f"{case}, dropout"
        with machine.rules():
            watch = Waits(machine.device)
            long = ["trainer.max_steps=21", "trainer.val_every=21"]
            weights_after(training(machine, f"{name}-waits", *words, *long), watch)
            found = [wait for step in watch.steps[:20] for wait in step]
            yield at_most("waits in 20 steps", case, len(found), 0, ", ".join(set(found)))
            whole = weights_after(training(machine, name, *words))
            with suppress(Stopped):
                weights_after(training(machine, f"{name}-cut", *words), Stop())
            cut = training(machine, f"{name}-cut", *words)
            continued = cut.resume is not None and same(weights_after(cut), whole)
            yield holds("continued to the bit", case, continued)
            off = training(machine, f"{name}-off", *words, "monitor.enabled=false")
            yield holds("weights equal without monitor", case, same(weights_after(off), whole))


def distributed(machine: Machine) -> Iterator[Row]:
    """A process group of one: DDP has the gradients of the plain model."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    backend = "nccl" if machine.is_gpu else "gloo"
    store = f"file://{machine.folder.resolve() / 'store'}"
    dist.init_process_group(backend, init_method=store, rank=0, world_size=1)
    try:
        for name in ("contractive_l2", "dot_product"):
            model, text = machine.model(name)
            model, text = model.to(machine.device), text.to(machine.device)
            _, wanted = gradients(model, text, "32-true")
            case, copied = f"{name}, {backend}, DDP", copy.deepcopy(model)
            try:
                copied = DistributedDataParallel(copied)
                with machine.rules():
                    _, found = gradients(copied, text, "32-true")
            except Exception as error:
                yield failed("distributed", case, error)
                continue
            error = (found - wanted).norm() / wanted.norm()
            yield at_most("distributed", case, error.item(), 1e-5)
    finally:
        dist.destroy_process_group()
