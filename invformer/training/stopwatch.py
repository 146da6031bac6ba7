"""How much of the time something takes, without waiting for the device."""

import time
from typing import Any

import torch


class Stopwatch:
    """Times what runs inside ``with watch:`` by events on a GPU, by the clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.spans: list[tuple[Any, Any]] = []

    def __enter__(self) -> None:
        self.began = self.mark()

    def __exit__(self, *error: object) -> None:
        self.spans.append((self.began, self.mark()))

    def mark(self) -> Any:
        """Now, as the device will see it."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, began: Any, ended: Any) -> float:
        """Between two marks."""
        return began.elapsed_time(ended) / 1000 if self.on_gpu else ended - began

    def share(self) -> float | None:
        """Seconds inside over seconds outside since the last call; None if not known yet."""
        spans, self.spans = self.spans, []
        if len(spans) < 2 or (self.on_gpu and not spans[-1][1].query()):
            return None
        inside = sum(self.seconds(*span) for span in spans[1:])
        outside = self.seconds(spans[0][1], spans[-1][1]) - inside
        return inside / outside if outside > 0 else None
