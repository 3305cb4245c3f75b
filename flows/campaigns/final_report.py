"""The pages of a campaign's run, its final report with pictures, kept beside the data, and the retraining after it."""

from precision_time.flows.campaigns.cell_loop import INTERRUPTED
from precision_time.flows.campaigns.summary import (
    CampaignResult,
    GridRow,
    RetrainingOutcome,
    grid_rows,
    markdown_report,
    table_rows,
)  # fmt: skip
from precision_time.flows.campaigns.terminal import log_of_run
from precision_time.flows.ground.prefect_artifacts import LiveArtifact, LiveTable, ProgressArtifact, embed_pictures
from precision_time.flows.planning.plan import CampaignPlan
from precision_time.flows.planning.spec import CampaignSpec
from precision_time.predictor.setup.hardware import HardwareSpec
from precision_time.predictor.workloads.workload import WorkloadFeatures
from precision_time.storage.errors import InputError, PrecisionTimeError
from precision_time.storage.filesystem import open_store
from precision_time.storage.timings import TimingsDataset
from precision_time.tasks.publishing.plots import CampaignPlots, draw_campaign_plots

__all__ = ["CampaignPages", "report_folder", "retrain_after"]


def report_folder(name: str) -> str:
    """The folder of the data that holds ``report.md`` and ``plots/`` of the last run of campaign ``name``."""
    return f"campaigns/v1/{name}"


class CampaignPages:
    """The table and the progress bar, which change during the run, and the report at its end.

    Their keys contain only the campaign's name, so that Prefect shows the history of a campaign over its runs.
    """

    def __init__(self, plan: CampaignPlan) -> None:
        name, gpu = plan.spec.name, plan.device.environment.gpu
        self.table = LiveTable(f"campaign-{name}", description=f"Campaign {name} on {gpu}: under way")
        self.bar = ProgressArtifact(
            f"campaign-{name}-progress", description=f"Cells of campaign {name} measured by this run"
        )
        self._report = LiveArtifact("markdown", f"campaign-{name}-report", description=f"Report of campaign {name}")
        self._plan = plan
        self._grid: list[GridRow] = []
        self._plots = CampaignPlots(pictures={}, remarks=())

    def write_report(self, result: CampaignResult, *, dataset: TimingsDataset) -> None:
        """Show the final grid, draw the pictures of its cells, and write the report."""
        measurements = dataset.measurements()
        recorded = dataset.recorded_cells()
        self._grid = grid_rows(self._plan, result.failed, measurements=measurements, recorded=recorded)
        self.table.write_rows(table_rows(self._grid), description=_describe(result))
        cell_ids = {planned.cell_id for planned in self._plan.cells}
        try:
            self._plots = draw_campaign_plots(
                [row for row in measurements if row.cell_id in cell_ids],
                name=result.name,
                workloads=[WorkloadFeatures.from_dict(card) for card in dataset.read_cards("workloads")],
                hardware=[self._plan.device.hardware, *map(HardwareSpec.from_dict, dataset.read_cards("hardware"))],
                registry=self._plan.spec.registry,
            )
        except Exception as error:
            # Pictures depend on cards, artifacts and fonts; none of these may fail a recorded campaign.
            log_of_run().warning("the pictures of the report were not drawn: %s: %s", type(error).__name__, error)
            self._plots = CampaignPlots(pictures={}, remarks=(f"Pictures are missing: {type(error).__name__}.",))
        self.rewrite_report(result)

    def rewrite_report(self, result: CampaignResult) -> None:
        """Write the report for ``result``, with the pictures drawn before, on its page and into the data folder."""
        pictures = self._plots.pictures
        report = markdown_report(result, self._grid, plots=pictures, remarks=self._plots.remarks)
        self._report.write(embed_pictures(report, pictures), description=f"Report: {_describe(result)}")
        folder = report_folder(result.name)
        try:
            store = open_store(self._plan.spec.data)
            for name, picture in pictures.items():
                store.write_bytes(f"{folder}/plots/{name}", picture)
            store.write_bytes(f"{folder}/report.md", report.encode())
        except PrecisionTimeError as error:
            log_of_run().warning("the report was not kept in the data folder: %s", error)


def _describe(result: CampaignResult) -> str:
    return f"Campaign {result.name} on {result.gpu}: {result.status}"


def retrain_after(spec: CampaignSpec, result: CampaignResult) -> RetrainingOutcome | None:
    """Retrain on the data of ``spec`` as a run inside this one; None unless ``spec`` asks for it.

    Obstacles such as too few cells are reported as a reason and raise nothing: the cells are recorded all the same.
    """
    if not spec.retrain_after or spec.registry is None:
        return None
    if not result.cells_measured or result.ended_by == INTERRUPTED:
        reason = "the run was interrupted" if result.cells_measured else "this run recorded no new cell"
        return RetrainingOutcome(status="not tried", reasons=(reason,))
    # Few campaigns need these libraries.
    from precision_time.flows.retraining.retrain import run_retraining
    from precision_time.flows.retraining.spec import RetrainSpec

    log_of_run().info("retraining on %s", spec.data)
    try:
        retrained = run_retraining(RetrainSpec(data=spec.data, registry=spec.registry))
    except InputError as error:
        return RetrainingOutcome(status="not tried", reasons=(error.message,))
    except Exception as error:
        return RetrainingOutcome(status="failed", reasons=(f"{type(error).__name__}: {error}",))
    return RetrainingOutcome(
        status=retrained.status, artifact_id=retrained.artifact_id, reasons=tuple(retrained.reasons)
    )
