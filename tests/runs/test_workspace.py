"""The saved view and the sweep name what a run logs and takes, and need no network."""

import pytest
import yaml

from invformer.config.load import load_config
from invformer.config.trained import WorkspaceConfig
from invformer.runs.wandb_logger import OVERVIEW
from invformer.runs.workspace import build
from tests.support.processes import ROOT


@pytest.mark.filterwarnings("ignore")  # of the other library's models
def test_the_view_shows_the_overview_and_every_block() -> None:
    view = build(load_config(["num_layers=2", "entity=me"], WorkspaceConfig))
    panels = {section.name: section.panels for section in view.sections}
    drawn = {str(getattr(key, "name", key)) for panel in panels["Overview"] for key in panel.y}
    assert drawn == OVERVIEW
    assert len(panels["Constants"]) == 2
    keys = [str(getattr(key, "name", key)) for key in panels["Constants"][1].y]
    branch = "z/lipschitz_branches/block_01/attention"
    assert keys[:3] == [f"{branch}/{kind}" for kind in ("estimate", "local_bound", "bound")]
    assert "view/sample" in view._to_model().model_dump_json()


def test_every_value_of_the_sweep_is_taken_as_an_agent_writes_it() -> None:
    sweep = yaml.safe_load((ROOT / "configs/sweep.yaml").read_text())
    assert (ROOT / sweep["program"]).is_file()
    assert sweep["metric"]["name"] in OVERVIEW
    for key, choice in sweep["parameters"].items():
        ends = [choice[name] for name in ("min", "max", "value") if name in choice]
        for value in [*choice.get("values", ()), *ends]:
            load_config([f"--{key}={value}"])
