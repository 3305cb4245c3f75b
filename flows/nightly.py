"""nightly_retrain: what a schedule runs every night, also after nights on which nothing could run."""

from prefect import flow, get_run_logger
from pydantic import BaseModel, ConfigDict

from precision_time.flows.catch_up import CatchUp, apply_catch_up
from precision_time.flows.plain_failures import fail_plainly
from precision_time.flows.retrain import retrain_predictor
from precision_time.flows.retrain_spec import NightlySpec
from precision_time.flows.summary import RetrainResult

__all__ = ["NightlyResult", "nightly_retrain"]


class NightlyResult(BaseModel):
    """What one night did: how missed runs were made up for, and the retraining; None where this run left it out."""

    model_config = ConfigDict(frozen=True)

    catch_up: CatchUp
    retraining: RetrainResult | None


@flow(name="nightly-retrain", flow_run_name="retrain {spec.name}", result_serializer="json", persist_result=False)
@fail_plainly
def nightly_retrain(spec: NightlySpec) -> NightlyResult:
    """Retrain the predictor on what was measured since, publish it if it is not worse, and watch for drift.

    A run that was missed is made up for as ``catch_up`` says. Runs beside each other are safe: the second to publish
    is judged against what the first has published. The run ends Completed whenever it could do its work, whether or
    not something was published, and Failed when storage stays away; the champion then stays in use.
    """
    catch_up = apply_catch_up(spec.catch_up)
    get_run_logger().info(catch_up.reason)
    if not catch_up.proceed:
        return NightlyResult(catch_up=catch_up, retraining=None)
    return NightlyResult(catch_up=catch_up, retraining=retrain_predictor(spec.retraining()))
