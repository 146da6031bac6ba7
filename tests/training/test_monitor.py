"""The monitor keeps its budget, says what it chose, touches nothing, and is right."""

import copy
import re
import statistics
from collections.abc import Callable
from pathlib import Path

import lightning as L
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import invformer.training.fit as fit_module
import invformer.training.monitor as monitor_module
from invformer.assemble.run import Run, build_run
from invformer.config import load_config
from invformer.config.schema import TrainConfig
from invformer.errors import ConfigurationError
from invformer.evaluation.lipschitz import lipschitz_row
from invformer.kernels import normaliser
from invformer.lipschitz.power_iteration import power_iteration_estimate
from invformer.lipschitz.probe import LipschitzProbe
from invformer.lipschitz.tracking import Tracker
from invformer.nn.spectral import refresh_normalisers, set_manual_refresh
from invformer.numerics.linear_map import dense_jacobian
from invformer.runs.run_log import RunLog, read_rows
from invformer.training import probe_budget
from invformer.training.module import CharLanguageModel
from invformer.training.monitor import MOST_POWER_STEPS, LipschitzMonitor
from invformer.training.probe_budget import (
    Choice,
    Clock,
    Ledger,
    Price,
    Size,
    choose,
    could_be_better,
    is_due,
    looks_per_step,
    probe_sizes,
)
from tests.host_syncs import HostSyncs
from tests.nn.builders import VOCAB, contractive_model, random_tokens

ROOT = Path(__file__).parent.parent.parent
TEXT = "".join(f"{i} times {i} is {i * i}; " for i in range(600))


def test_sizes_grow_from_a_short_prefix_to_several_windows() -> None:
    sizes = [(size.sequences, size.length) for size in probe_sizes(4, 128)]
    assert sizes == [(1, 16), (1, 32), (1, 64), (1, 128), (2, 128), (4, 128)]
    assert probe_sizes(4, 10) == [Size(1, 10), Size(2, 10), Size(4, 10)]
    assert probe_sizes(4, 64, sequences=3) == [Size(3, 16), Size(3, 32), Size(3, 64)]
    assert probe_sizes(2, 64, length=20) == [Size(1, 20), Size(2, 20)]
    assert probe_sizes(1, 64, sequences=3, length=100) == [Size(1, 64)]


def test_the_probe_is_shortened_before_steps_are_left_out() -> None:
    prices = {Size(1, 16): Price(1.0), Size(1, 32): Price(2.0), Size(1, 64): Price(4.0)}
    rarely = 10**6  # validations that do not matter
    assert choose(prices, 100, 0.05, rarely) == Choice(Size(1, 64), 1)
    assert choose(prices, 50, 0.05, rarely) == Choice(Size(1, 32), 1)
    assert choose(prices, 11, 0.05, rarely) == Choice(Size(1, 16), 2)
    assert choose(prices, 11, 0.05, rarely, every=4) == Choice(Size(1, 32), 4)
    assert choose(prices, 1, 0.05, rarely, every=4) == Choice(Size(1, 16), 4)


def test_what_validations_ask_for_is_taken_from_the_budget_first() -> None:
    prices = {Size(1, 16): Price(look=1.0, local=1.0)}
    chosen = {n: choose(prices, 10, 0.05, n).every for n in (1, 2, 4, 5, 8, 20, 100)}
    # 2/n of the 0.5 seconds are gone; where that is all, there is nothing between validations.
    assert chosen == {1: 1, 2: 2, 4: 4, 5: 5, 8: 4, 20: 3, 100: 3}
    assert choose({Size(1, 16): Price(0.5)}, 10, 0.05, 3) == Choice(Size(1, 16), 1)
    assert choose({Size(1, 16): Price(0.5, 0.1)}, 10, 0.05, 3) == Choice(Size(1, 16), 2)


@given(every=st.integers(1, 30), local_every=st.integers(1, 30))
def test_looks_and_local_bounds_are_counted_as_they_come(every: int, local_every: int) -> None:
    steps = range(every * local_every)
    looks = sum(is_due(step, every, local_every) for step in steps)
    assert looks_per_step(every, local_every) == pytest.approx(looks / len(steps), rel=1e-12)
    total = 3.0 * looks + 5.0 * len(steps) / local_every
    seconds = Price(look=3.0, local=5.0).per_step(every, local_every)
    assert seconds == pytest.approx(total / len(steps), rel=1e-12)


def test_a_choice_that_is_the_least_or_the_most_there_is_cannot_be_better() -> None:
    sizes = [Size(1, 16), Size(1, 32)]
    least, most = Choice(sizes[0], 3), Choice(sizes[1], 1)

    def can(choice: Choice, share: float, local_every: int = 50, every: int | None = None) -> bool:
        return could_be_better(choice, share, 0.06, sizes, local_every, every)

    for choice in (least, most):
        assert not any(can(choice, share) for share in (0.021, 0.06, 0.071))
        assert can(choice, 0.073)  # it can be measured less often
    assert not can(least, 0.073, every=3)
    assert not can(least, 0.073, local_every=3)
    assert can(Choice(sizes[1], 3), 0.073, every=3)
    assert not can(most, 0.019)
    assert can(Choice(sizes[1], 2), 0.019)
    assert not can(Choice(sizes[1], 2), 0.019, every=2)
    assert can(least, 0.019)


def test_a_choice_survives_a_checkpoint_and_reads_as_a_sentence() -> None:
    choice = Choice(Size(2, 128), 3)
    assert Choice.from_dict(choice.to_dict()) == choice
    assert choice.describe() == "2 sequences of 128 characters every 3 steps"
    assert Choice(Size(1, 16), 1).describe() == "1 sequence of 16 characters every step"


def test_the_ledger_enters_what_the_device_has_reached_in_order() -> None:
    class SlowClock(Clock):
        reached = 0.0

        def seconds(self, start: float, end: float) -> float | None:
            return end - start if end <= self.reached else None

    clock = SlowClock(torch.device("cpu"))
    ledger = Ledger(clock)
    ledger.add_step(0.0, 10.0)
    ledger.add_look(10.0, 11.0)
    ledger.settle()
    ledger.add_local(11.0, 13.0)
    assert ledger.share() is None
    clock.reached = 11.0
    ledger.settle()
    assert ledger.share() == pytest.approx(0.1)
    assert ledger.share(every=2, local_every=4) == pytest.approx(0.1 * (1 / 2 + 1 / 4))
    clock.reached = 13.0
    ledger.settle()
    assert ledger.share(every=2, local_every=4) == pytest.approx(0.1 * (1 / 2 + 1 / 4) + 0.2 / 4)
    ledger.forget()
    assert ledger.share() is None
    ledger.add_step(20.0, 30.0)
    ledger.add_look(30.0, 31.0)
    clock.reached = 31.0
    ledger.settle()
    assert ledger.share(every=4, local_every=2) == pytest.approx((0.1 + 0.2) / 2)


def test_looking_and_recording_never_wait_for_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(normaliser, "has_answer_at_hand", lambda number: False)
    probe = LipschitzProbe(contractive_model(), random_tokens(1))
    log = RunLog([])
    probe.look()
    with HostSyncs() as syncs:
        for step in range(3):
            log.record(step, lipschitz_row(probe))
        assert syncs.found == []
        float(torch.ones(()))
    assert syncs.found == ["aten::_local_scalar_dense"]
    row = log.flush()[2]
    assert 0 < row["lipschitz/token_max/block_01/feed_forward/estimate"] <= 0.7


def test_a_row_says_the_same_as_its_estimates() -> None:
    model = contractive_model()
    probes = [LipschitzProbe(model, random_tokens(2)) for _ in range(2)]
    log = RunLog([])
    log.record(0, lipschitz_row(probes[0]))
    row, estimates = log.flush()[0], probes[1].estimate()
    for norm, branches in estimates.items():
        for name, estimate in branches.items():
            key = f"lipschitz/{norm}/{name}"
            assert row[f"{key}/estimate"] == pytest.approx(estimate.value.amax().item())
            assert row[f"{key}/bound"] <= row[f"lipschitz/{norm}/bound_max"]
        slack = min(
            row[f"lipschitz/{norm}/{name}/bound"] / row[f"lipschitz/{norm}/{name}/estimate"]
            for name in branches
        )
        assert row[f"lipschitz/{norm}/slack"] == pytest.approx(slack)


def converged(model, tokens: torch.Tensor) -> dict[tuple[str, str], float]:
    """‖J‖ of every branch: singular values; the power method for every output token, both ways."""
    values: dict[tuple[str, str], float] = {}
    x = model.embedding(tokens)
    for name, layer in model.stack.layers():
        if hasattr(layer, "branch"):
            dense = dense_jacobian(layer.branch, x[0])
            values["frobenius", name] = torch.linalg.matrix_norm(dense, 2).item()
            jacobian = layer.branch.linearise(x)
            tracker = Tracker(("token_max",), scouts=tokens.shape[1])
            for _ in range(40):
                (followed,) = tracker.look(jacobian)
            restarted = power_iteration_estimate(
                jacobian, "token_max", num_steps=30, num_restarts=4, rtol=1e-9
            )
            values["token_max", name] = max(followed.value.item(), restarted.value.item())
        x = layer(x)
    return values


@pytest.mark.parametrize(("every", "num_steps"), [(1, 1), (14, MOST_POWER_STEPS)])
def test_estimates_along_a_training_run_are_within_two_percent_of_converged_ones(
    every: int, num_steps: int
) -> None:
    """Median over branches, norms and steps; float32 against float64."""
    torch.manual_seed(1)
    model = contractive_model().float()
    set_manual_refresh(model)
    tokens = random_tokens(1, seed=99)
    probe = LipschitzProbe(model, tokens, num_steps=num_steps, first_steps=tokens.shape[1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3)
    errors = []
    for step in range(120):
        text = (torch.arange(13) * (1 + step % 5) + step) % VOCAB
        logits = model(text[None, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), text[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        refresh_normalisers(model)
        if step % every == 59 % every:
            estimates = probe.estimate()
        if step == 59 or step == 115:
            with torch.no_grad():
                true = converged(copy.deepcopy(model).double().eval(), tokens)
            for (norm, name), value in true.items():
                found = estimates[norm][name].value.item()
                assert found <= value * (1 + 1e-3)
                errors.append(1 - found / value)
    assert len(errors) == 2 * 8
    assert statistics.median(errors) < 0.02


@pytest.fixture
def text_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    torch.set_default_dtype(torch.float32)
    monkeypatch.setattr(fit_module, "plot_run", lambda *_: [])  # takes longer than the training
    path = tmp_path / "squares.txt"
    path.write_text(TEXT)
    return path


def run_with(text_file: Path, *more: str) -> Run:
    arguments = [
        "data=text_file", f"data.path={text_file}", "data.seq_len=32", "data.batch_size=4",
        "data.val_fraction=0.02", "data.test_fraction=0", "model.d_model=24", "model.num_layers=2",
        "model.num_heads=2", "trainer.max_steps=12", "trainer.val_every=6",
        "trainer.progress=false", "trainer.sample_length=0", "trainer.accelerator=cpu",
        "logger.name=none", "monitor.flush_every=4", "monitor.inversion=false",
        f"run.root={text_file.parent / 'runs'}", "run.name=a", *more,
    ]  # fmt: skip
    return build_run(load_config(arguments, TrainConfig, ROOT))


def monitor_of(run: Run) -> LipschitzMonitor:
    return next(c for c in run.trainer.callbacks if isinstance(c, LipschitzMonitor))


def rows_of(run: Run) -> list[dict]:
    return read_rows(run.directory.path / "metrics.jsonl")


def test_a_small_budget_leaves_out_steps_and_the_choice_is_printed_recorded_and_kept(
    text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_with(text_file, "monitor.budget=0.01")
    fit_module.fit(run)
    choice = monitor_of(run).choice
    assert choice.size == Size(1, 16)
    assert choice.every > 1
    assert f"monitor: {choice.describe()} (" in capsys.readouterr().out
    rows = rows_of(run)
    last = [row for row in rows if "perf/monitor_every" in row][-1]
    assert last["perf/monitor_every"] == choice.every
    assert last["perf/monitor_power_steps"] == min(choice.every, MOST_POWER_STEPS)
    assert last["perf/monitor_probe_tokens"] == choice.size.tokens
    # The steps before validations are always measured, with their local bounds.
    for step in (5, 11):
        key, row = "lipschitz/token_max/block_00/attention", rows[step]
        assert row[f"{key}/estimate"] <= row[f"{key}/local_bound"] <= row[f"{key}/bound"]
    resumed = LipschitzMonitor(torch.zeros(4, 32, dtype=torch.long), RunLog([]))
    resumed.load_state_dict(monitor_of(run).state_dict())
    assert resumed.choice == choice
    assert resumed.is_settled


class VirtualTime:
    """A clock that a step moves by a second, and what the monitor does by what is said here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, look: float, local: float = 0.0) -> None:
        self.now = 0.0
        self.step, self.look, self.local = 1.0, look, local
        self.measuring = 0.0
        monkeypatch.setattr(probe_budget.time, "thread_time", lambda: self.now)
        monkeypatch.setattr(monitor_module, "AIM", 1.0)  # prices do not move here
        for where, name, kind in (
            (CharLanguageModel, "optimizer_step", "step"),
            (monitor_module, "lipschitz_row", "look"),
            (monitor_module, "local_bound_row", "local"),
        ):
            monkeypatch.setattr(where, name, self.timed(getattr(where, name), kind))

    def timed(self, work: Callable, kind: str) -> Callable:
        def timed_work(*args: object, **kwargs: object) -> object:
            seconds = getattr(self, kind)
            self.now += seconds
            self.measuring += seconds if kind != "step" else 0.0
            return work(*args, **kwargs)

        return timed_work


def test_the_recorded_overhead_is_all_that_the_monitor_takes(
    text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = VirtualTime(monkeypatch, look=0.125, local=0.5)
    explicit = ("monitor.every=2", "monitor.num_sequences=1", "monitor.probe_length=8")
    run = run_with(text_file, *explicit, "trainer.val_every=3")
    fit_module.fit(run)
    share = rows_of(run)[-1]["perf/monitor_overhead"]
    assert share == pytest.approx(clock.measuring / 12, rel=1e-12)
    assert share == pytest.approx(0.125 * 4 / 6 + 0.5 * 2 / 6, rel=1e-12)


def test_a_choice_leaves_room_in_the_budget_for_prices_that_move(
    text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    VirtualTime(monkeypatch, look=0.25)
    monkeypatch.setattr(monitor_module, "AIM", 0.5)
    run = run_with(
        text_file, "monitor.budget=0.25", "trainer.val_every=100", "trainer.max_steps=12"
    )
    fit_module.fit(run)
    assert rows_of(run)[-1]["perf/monitor_overhead"] <= 0.5 * 0.25


def test_validations_that_take_the_budget_leave_nothing_for_the_steps_between_them(
    text_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    VirtualTime(monkeypatch, look=0.25, local=0.25)
    run = run_with(text_file, "trainer.val_every=4", "trainer.max_steps=20")
    fit_module.fit(run)
    assert monitor_of(run).choice == Choice(Size(1, 16), 4)
    assert (
        "1 sequence of 16 characters every 4 steps (4 power iteration steps each), 12.5% of a step"
        in capsys.readouterr().out
    )
    measured = [row for row in rows_of(run) if "lipschitz/token_max/estimate_max" in row]
    assert [row["step"] for row in measured] == [0, 1, 2, 3, 4, 7, 11, 15, 19]
    assert measured[-1]["perf/monitor_overhead"] == pytest.approx(0.125, rel=1e-12)


@pytest.fixture
def calibrations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps after which probe sizes were timed."""
    steps = []
    calibrate = LipschitzMonitor.calibrate

    def noted(monitor: LipschitzMonitor, trainer: L.Trainer, module: CharLanguageModel) -> None:
        steps.append(trainer.global_step)
        calibrate(monitor, trainer, module)

    monkeypatch.setattr(LipschitzMonitor, "calibrate", noted)
    return steps


@pytest.mark.parametrize(
    ("look", "every", "choice"),
    [
        pytest.param(1e-3, None, Choice(Size(4, 32), 1), id="cheap"),
        pytest.param(1e-3, 2, Choice(Size(4, 32), 2), id="cheap at every second step"),
        pytest.param(0.5, 2, Choice(Size(1, 16), 2), id="dear at every second step"),
    ],
)
def test_sizes_are_timed_and_a_choice_is_printed_once_where_there_is_no_other(
    text_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    calibrations: list[int],
    look: float,
    every: int | None,
    choice: Choice,
) -> None:
    VirtualTime(monkeypatch, look)
    monkeypatch.setattr(monitor_module, "RECHECK_EVERY", 5)
    given = "null" if every is None else every
    more = (f"monitor.every={given}", "trainer.max_steps=30", "trainer.val_every=15")
    run = run_with(text_file, *more)
    fit_module.fit(run)
    assert calibrations == [6]
    assert capsys.readouterr().out.count("monitor: ") == 1
    assert monitor_of(run).choice == choice


class ChangingLooks(L.Callback):
    """Lets looks take another time from some steps on."""

    def __init__(self, clock: VirtualTime, seconds: dict[int, float]) -> None:
        self.clock = clock
        self.seconds = seconds

    def on_train_batch_start(self, trainer: L.Trainer, *rest: object) -> None:
        self.clock.look = self.seconds.get(trainer.global_step, self.clock.look)


def fit_with_looks_that_change(
    text_file: Path, clock: VirtualTime, seconds: dict[int, float]
) -> None:
    """A run of fifty steps, with one validation."""
    run = run_with(text_file, "trainer.max_steps=50", "trainer.val_every=50")
    run.trainer.callbacks.insert(0, ChangingLooks(clock, seconds))  # type: ignore[attr-defined]
    fit_module.fit(run)


def printed_choices(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """What the monitor said it measures, without steps of a look and its price."""
    lines = [line for line in capsys.readouterr().out.splitlines() if "monitor: " in line]
    return [re.split(r",| \(", line)[0] for line in lines]


def test_a_choice_that_proves_wrong_is_made_again_and_printed_if_it_is_another(
    text_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    calibrations: list[int],
) -> None:
    monkeypatch.setattr(monitor_module, "RECHECK_EVERY", 10)
    clock = VirtualTime(monkeypatch, look=0.5)
    # One look that is slow by chance; later all of them are fast.
    fit_with_looks_that_change(text_file, clock, {13: 2.0, 14: 0.5, 21: 1e-3})
    assert calibrations == [6, 20, 30]
    assert printed_choices(capsys) == [
        f"monitor: {choice.describe()}"
        for choice in (Choice(Size(1, 16), 13), Choice(Size(4, 32), 1))
    ]


# Within what is tolerated: 2.9 and 5.6 % of 5 %.
@pytest.mark.parametrize(("seconds", "every"), [(0.3, 7), (0.58, 16)])
def test_looks_that_take_another_time_than_they_did_are_taken_as_often_as_fits(
    text_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    calibrations: list[int],
    seconds: float,
    every: int,
) -> None:
    monkeypatch.setattr(monitor_module, "RECHECK_EVERY", 10)
    clock = VirtualTime(monkeypatch, look=0.5)
    fit_with_looks_that_change(text_file, clock, {8: seconds})
    assert calibrations == [6]
    assert printed_choices(capsys) == [
        "monitor: 1 sequence of 16 characters every 13 steps",
        f"monitor: 1 sequence of 16 characters every {every} steps",
    ]


@pytest.mark.parametrize(
    ("more", "steps"),
    [
        (("monitor.every=1",), 1),
        (("monitor.every=3",), 3),
        (("monitor.every=9",), MOST_POWER_STEPS),
        (("monitor.every=9", "monitor.num_steps=2"), 2),
    ],
)
def test_a_look_takes_a_power_step_for_every_step_since_the_last_one_up_to_a_few(
    text_file: Path, more: tuple[str, ...], steps: int
) -> None:
    run = run_with(text_file, *more, "monitor.num_sequences=1", "monitor.probe_length=8")
    fit_module.fit(run)
    probe = monitor_of(run).probe
    assert probe is not None
    assert probe.num_steps == steps
    assert rows_of(run)[-1]["perf/monitor_power_steps"] == steps


def test_rare_looks_are_priced_at_the_power_steps_they_take(
    text_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = VirtualTime(monkeypatch, look=0.5)
    asked = monitor_module.lipschitz_row

    def by_power_step(probe: LipschitzProbe) -> dict:
        clock.now += 0.5 * (probe.num_steps - 1)
        return asked(probe)

    monkeypatch.setattr(monitor_module, "lipschitz_row", by_power_step)
    run = run_with(text_file, "monitor.budget=0.2", "trainer.max_steps=100", "trainer.val_every=50")
    fit_module.fit(run)
    # 2 s every 13 steps and before every 50th; one power step would have fitted in every third.
    assert monitor_of(run).choice == Choice(Size(1, 16), 13)


def test_a_large_budget_takes_several_windows(text_file: Path) -> None:
    run = run_with(text_file, "monitor.budget=10", "trainer.max_steps=7", "trainer.val_every=7")
    fit_module.fit(run)
    assert monitor_of(run).choice == Choice(Size(4, 32), 1)


def test_explicit_settings_are_kept_and_repeat_bit_for_bit_across_a_resume(
    text_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    explicit = ("monitor.every=2", "monitor.num_sequences=1", "monitor.probe_length=8")
    whole = run_with(text_file, *explicit, "run.name=whole")
    fit_module.fit(whole)
    assert "monitor:" not in capsys.readouterr().out
    measured = [row for row in rows_of(whole) if "lipschitz/frobenius/estimate_max" in row]
    assert [row["step"] for row in measured] == [0, 2, 4, 5, 6, 8, 10, 11]
    assert {row["perf/monitor_probe_tokens"] for row in measured} == {8}
    parts = run_with(text_file, *explicit, "run.name=parts")
    parts.trainer.fit_loop.epoch_loop.max_steps = 6
    fit_module.fit(parts)
    fit_module.fit(run_with(text_file, *explicit, "run.name=parts"))
    one, other = (
        [{k: v for k, v in row.items() if k.startswith("lipschitz/")} for row in rows_of(run)]
        for run in (whole, parts)
    )
    assert one == other


def test_a_probe_longer_than_the_windows_is_refused(text_file: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"monitor\.probe_length: 64 is more than"):
        run_with(text_file, "monitor.probe_length=64")
