"""The saved view of a project in W&B: ``invformer workspace project=NAME``."""

from typing import Any

from invformer.config.trained import WorkspaceConfig
from invformer.errors import ConfigurationError
from invformer.runs.wandb_logger import CHARTS, DEFAULTS, DETAIL, STEP, read_settings

INVERSION = (
    "inverse/reconstruction_max", f"{DETAIL}inverse/residual_max",
    f"{DETAIL}inverse/error_bound_max", f"{DETAIL}inverse/num_steps_mean",
)  # fmt: skip


def build(config: WorkspaceConfig) -> Any:
    """The view, without talking to W&B; raises ConfigurationError without wandb-workspaces."""
    try:
        import wandb_workspaces.reports.v2 as wr
        import wandb_workspaces.workspaces as ws
    except ImportError:
        raise ConfigurationError("wandb-workspaces: pip install 'invformer[workspace]'") from None

    def lines(title: str, *keys: str) -> wr.LinePlot:
        return wr.LinePlot(title=title, x=STEP, y=list(keys))

    def block(number: int) -> wr.LinePlot:
        names = ("estimate", "local_bound", "bound")
        branches = [f"block_{number:02d}/{name}" for name in ("attention", "feed_forward")]
        keys = [f"{DETAIL}lipschitz_branches/{b}/{name}" for b in branches for name in names]
        return lines(f"block {number}: estimate ≤ local bound ≤ bound", *keys)

    views = [
        f"view/{key}" for key in ("constants", "sample", "recovered", "certificate", "summary")
    ]
    sections = {
        "Overview": [lines(title, *keys) for title, keys in CHARTS.items()],
        "Constants": [block(number) for number in range(config.num_layers)],
        "Inversion": [lines(key.rpartition("/")[2], key) for key in INVERSION],
        "Samples": [wr.MediaBrowser(media_keys=[view]) for view in views],
    }
    shown = [ws.Section(name=name, panels=p, is_open=True) for name, p in sections.items()]
    return ws.Workspace(
        entity=config.entity or "", project=config.project or DEFAULTS["project"],
        name=config.name, sections=shown,
    )  # fmt: skip


def save(config: WorkspaceConfig) -> None:
    """Send the view to W&B; raises ConfigurationError if it is refused."""
    workspace = build(config)
    own = read_settings()
    workspace.project = config.project or own.get("project") or workspace.project
    workspace.entity = config.entity or own.get("entity") or ""
    try:
        if not workspace.entity:
            import wandb

            workspace.entity = wandb.Api().default_entity or ""
        workspace.save()
    except Exception as error:
        raise ConfigurationError(f"W&B: {error}"[:300]) from None
    print(workspace.url)
