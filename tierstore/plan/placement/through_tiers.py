"""The planner's model of tierstore's tiers, as the strategy "ssd" asks for it."""

from ..host import Host
from ..prediction import Prediction, Setup
from ..workload import Workload
from .plan import StoreModel

__all__ = ["planned_store"]


def planned_store(policy: str = "auto") -> StoreModel:
    """``predict`` with the demand that follows from the workload alone."""

    def model(workload: Workload, host: Host, *, hosts: int, ddr_bytes: float, hbm_bytes: float) -> Prediction:
        from ..demand import Demand
        from ..model import predict

        setup = Setup(
            workload=workload, host=host, hosts=hosts, ddr_bytes=ddr_bytes, hbm_bytes=hbm_bytes, policy=policy,
            threads=host.processor.cores,
        )  # fmt: skip
        return predict(setup, Demand.analytic(workload, policy))

    return model
