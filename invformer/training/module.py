"""The LightningModule: likelihood training of a character-level model, and nothing else."""

import math
import os
from collections.abc import Callable, Mapping
from typing import Any, Self

import lightning as L
import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from invformer.errors import NonFiniteError
from invformer.evaluation.bits_per_character import BitsPerCharacter
from invformer.evaluation.likelihood import LN2, window_nats
from invformer.nn.stack import FoldedStackWeights, InvertibleStack
from invformer.nn.transformer import CharTransformer
from invformer.numerics.precision import at_least_single
from invformer.processes.collective import mean_of_processes
from invformer.runs.saving import METADATA
from invformer.trained.opening import configuration_of, find_checkpoint, restored
from invformer.training.guard import UpdateGuard
from invformer.training.optimizers import build_optimizer, learning_rates
from invformer.training.rows import record
from invformer.training.step_graphs import StepGraphs
from invformer.training.weight_average import WeightAverage
from invformer.weights.dropout import Dropout, sample_keys, set_sample_keys
from invformer.weights.spectral import refresh_normalisers


class CharLanguageModel(L.LightningModule):
    """Minimises nats per character.

    Right after every optimiser step it computes every σ̄ that weights are divided by, so that
    callbacks see a model that keeps its constraints. :func:`invformer.training.fit.train` therefore
    turns off their computation in forward passes.

    Args:
        model: the language model.
        make_optimizer: of the model; on a GPU one that takes ``found_inf``, such as fused AdamW.
        make_schedule: of learning rates, of the optimiser; None keeps the rate.
        metadata: a plain dict stored in every checkpoint (configuration, vocabulary, provenance).
        grad_clip: largest gradient norm, unless the trainer has a ``gradient_clip_val``; None
            leaves gradients alone.
        ema_decay: keep an average of the weights, which is what is validated, certified and saved
            for evaluation; None keeps none.
        seed: of the dropout.
        cuda_graph: on one GPU, replay every step, its estimates, and validations, as CUDA graphs.
            Batches have one shape then. Forward hooks, and Python numbers and ``requires_grad``
            that change after the first step, are without effect.
    """

    def __init__(
        self,
        model: CharTransformer,
        make_optimizer: Callable[[CharTransformer], Optimizer],
        make_schedule: Callable[[Optimizer], LRScheduler] | None = None,
        metadata: Mapping[str, Any] | None = None,
        grad_clip: float | None = 1.0,
        ema_decay: float | None = None,
        seed: int = 0,
        cuda_graph: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.make_optimizer = make_optimizer
        self.make_schedule = make_schedule
        self.metadata = metadata or {}
        self.grad_clip = grad_clip
        self.seed = seed
        self.average = WeightAverage(model, ema_decay)
        self.graphs = StepGraphs(self, cuda_graph)
        self.weights: FoldedStackWeights | None = None  # of the present step, for the monitor
        self.validated: FoldedStackWeights | None = None  # weights, while a validation runs
        self.bits_per_character = BitsPerCharacter()  # of the split that is validated
        self.guard = UpdateGuard()
        self._losses: list[Tensor] = []  # of the batches of the present step
        self.has_dropout = any(isinstance(m, Dropout) and m.p > 0 for m in model.modules())

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls, checkpoint_path: str | os.PathLike[str], map_location: Any = None, **arguments: Any
    ) -> Self:
        """A trained model of ours, from all that :func:`invformer.load` opens, without arguments.

        It has the optimiser of its training, at the full rate. A ``.ckpt`` file, which a trainer of
        your own wrote, needs ``model`` and ``make_optimizer`` as Lightning's method does.
        """
        path = os.fspath(checkpoint_path)
        if os.path.isfile(path):
            return super().load_from_checkpoint(path, map_location, **arguments)
        checkpoint = find_checkpoint(path)
        optim = configuration_of(checkpoint).optim
        given = restored(checkpoint), lambda model: build_optimizer(model, optim)
        module = cls(*given, metadata=checkpoint.metadata, grad_clip=optim.grad_clip, **arguments)
        return module if map_location is None else module.to(map_location)

    def setup(self, stage: str) -> None:
        """Forget graphs: parameters may have moved since an earlier loop that failed."""
        self.graphs.forget()
        self.weights = None

    def teardown(self, stage: str) -> None:
        """Give the memory of graphs back."""
        self.setup(stage)

    def refuses_at_once(self) -> bool:
        """True if an update that is not finite raises before it is made.

        On a GPU the host would have to wait for the answer at every step, so the device skips the
        update instead.
        """
        return self.device.type == "cpu"

    @property
    def step(self) -> int:
        """The optimiser step that metrics recorded now belong to, counted from zero."""
        return max(0, self.trainer.global_step - 1)

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits of the next symbol."""
        return self.model(tokens)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Mean nats per character of one batch of windows."""
        arguments = (*batch, *([self.keys_of(len(batch[0]))] if self.has_dropout else ()))
        loss = self.graphs.loss(*arguments)
        self._losses.append(loss.detach())
        return loss

    def loss(self, inputs: Tensor, targets: Tensor, keys: Tensor | None = None) -> Tensor:
        """Mean nats per character of windows; dropout has the masks of these keys."""
        if keys is not None:
            set_sample_keys(self.model, keys)
        self.weights = self.weights_at_once(folded=True)
        logits = at_least_single(self.model(inputs, self.weights, folded=True))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def weights_at_once(self, folded: bool = False) -> FoldedStackWeights | None:
        """The weights of the whole stack, unless its blocks compute their own or are free."""
        stack = self.model.stack
        in_blocks = isinstance(stack, InvertibleStack) and stack.blocks_compute_weights()
        return None if in_blocks else self.model.weights(folded)

    def keys_of(self, count: int) -> Tensor:
        """Keys of the batch's samples, which are numbered alike for any number of processes."""
        trainer = self.trainer
        batch = trainer.global_step * trainer.accumulate_grad_batches + len(self._losses)
        first = (batch * trainer.world_size + trainer.global_rank) * count
        keys = sample_keys(self.seed, first, count)
        if self.device.type == "cuda":  # which copies from page-locked memory without waiting
            keys = keys.pin_memory()
        return keys.to(self.device, non_blocking=True)

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Record the loss and the gradient's norm, and clip the gradient.

        Raises:
            NonFiniteError: before the update if the module :meth:`refuses_at_once`; otherwise the
                update is skipped, and :meth:`refuse_lost_update` raises later.
        """
        parameters = self.model.named_parameters()
        gradients = {n: p.grad for n, p in parameters if p.grad is not None}
        nats = mean_of_processes(torch.stack(self._losses).mean())  # what the update descends
        self._losses.clear()
        norm = self.guard.inspect(self.trainer.global_step, nats, gradients)
        row = {"train/nats": nats, "train/bpc": nats / LN2, "optim/grad_norm": norm}
        record(self.trainer, self.trainer.global_step, {**row, **learning_rates(optimizer)})
        if self.refuses_at_once():
            self.refuse_lost_update()
        else:
            assert self.guard.lost is not None
            optimizer.found_inf = self.guard.lost.float()  # type: ignore[attr-defined]
        if gradient_clip_val is not None:
            self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        elif self.grad_clip is not None:
            clip_grads_with_norm_(self.model.parameters(), self.grad_clip, norm)

    def refuse_lost_update(self) -> None:
        """Raise NonFiniteError if an update so far was not finite; waits for the device."""
        if self.guard.lost is not None:  # an update was made, so there is a trainer
            data = getattr(self.trainer, "datamodule", None)
            self.guard.refuse(getattr(data, "windows_of", None))

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        """Update the weights, then every σ̄ that they are divided by."""
        super().optimizer_step(*args, **kwargs)
        if not self.graphs.replays:
            self.weights = None
        self.average.update(self.trainer.global_step)
        self.graphs.refresh()

    def refresh(self) -> None:
        """Compute every σ̄ of the present weights."""
        refresh_normalisers(self.model)

    def on_train_start(self) -> None:
        """Normalise the weights that were loaded."""
        self._losses.clear()  # of a step that an earlier run of this module did not end
        self.average.follow()
        self.average.use(False)  # which an earlier run of this module left behind
        self.refresh()

    def on_validation_model_eval(self) -> None:
        """Validate, certify and save the average of the weights, if there is one."""
        self.average.use(True)
        super().on_validation_model_eval()

    def on_validation_end(self) -> None:
        """Go back to the weights that learn, if they are still learning."""
        self.average.use(self.trainer.state.fn != TrainerFn.FITTING)

    def on_train_end(self) -> None:
        """Leave the average behind, if there is one."""
        set_sample_keys(self.model, None)
        self.average.use(True)

    def on_validation_epoch_start(self) -> None:
        """Charge the split's first character, which has no context, at ln V nats."""
        self.validated = self.weights_at_once()
        first = math.log(self.model.head.out_features), 1
        self.bits_per_character.reset()
        self.bits_per_character.update(*(first if self.trainer.is_global_zero else (0.0, 0)))

    def validation_step(self, batch: tuple[Tensor, ...], batch_idx: int) -> None:
        """Add the code length of one batch: windows, their targets, and which of these to score."""
        inputs, targets, *mask = batch
        scored = mask[0] if mask else torch.ones_like(targets, dtype=torch.bool)
        found = self.graphs.code_length(inputs, targets, scored, self.validated)
        self.bits_per_character.update(*found)

    def code_length(
        self, inputs: Tensor, targets: Tensor, scored: Tensor, weights: FoldedStackWeights | None
    ) -> tuple[Tensor, Tensor]:
        """Nats and number of the characters of windows that are scored."""
        return window_nats(self.model(inputs, weights), targets, scored), scored.sum()

    def on_validation_epoch_end(self) -> None:
        """Log bits per character of the whole split, in the row of the last step."""
        self.validated = None
        with torch.inference_mode(False):  # gloo cannot write into the tensors of a validation
            bpc = self.bits_per_character.compute()
        if not math.isfinite(bpc.item()):
            raise NonFiniteError.at(self.step, f"validation bits per character are {bpc.item()}")
        step = torch.tensor(self.step, dtype=torch.float64)  # where Lightning looks for the step
        self.log("val/bpc", self.bits_per_character)
        self.log_dict({"val/nats": bpc * LN2, "step": step}, sync_dist=False)

    def configure_optimizers(self) -> Any:
        """The optimiser, and its schedule by optimiser steps."""
        optimizer = self.make_optimizer(self.model)
        if self.make_schedule is None:
            return optimizer
        schedule = {"scheduler": self.make_schedule(optimizer), "interval": "step"}
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Store the metadata, and the average of the weights if there is one.

        Raises:
            NonFiniteError: updates were skipped, so this is not the state it would claim to be.
        """
        self.refuse_lost_update()
        checkpoint.setdefault(METADATA, {}).update(self.metadata)
        self.average.put_into(checkpoint)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Go on with the weights that learn, not with their average."""
        self.average.take_from(checkpoint)
