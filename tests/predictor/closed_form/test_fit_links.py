"""Public curves of collectives: how their rows are read, the fit of the closed forms, and its errors by site."""

import dataclasses

import numpy as np
import pandas as pd
import pytest

from precision_time.predictor.closed_form import fit_links as fitting
from precision_time.predictor.closed_form.collectives import parse_links, shipped_links, time_collective
from precision_time.predictor.closed_form.fit_links import (
    evaluate_collectives,
    fit_links,
    format_links,
    time_point,
)
from precision_time.predictor.closed_form.link_curves import (
    curve_site,
    describe_curve_hardware,
    describe_curve_network,
    read_points,
)
from precision_time.predictor.rows.public_table import shipped_collectives
from precision_time.predictor.setup.hardware import find_hardware, known_hardware
from precision_time.predictor.setup.links import LINK_KINDS, LinkKind
from precision_time.storage.errors import InputError, UnknownNameError


def make_row(**changes):
    row = {
        "curve_id": "a", "source": "someone/logs a.txt@0", "collective": "all_reduce", "gpu": "A100 SXM4 80GB",
        "num_gpus": 16.0, "num_nodes": 2.0, "gpus_per_node": 8.0, "intra_link": "NVLink3+NVSwitch 300 GB/s/dir/GPU",
        "inter_link": "InfiniBand 8x200 Gb/s per node (HDR)", "bytes": 2.0**26, "seconds": 1e-3, "healthy": 1.0,
        "notes": "",
    }  # fmt: skip
    return row | changes


def test_the_node_link_and_network_of_a_row_replace_the_usual_ones():
    h800 = describe_curve_hardware(make_row(gpu="H800 SXM", intra_link="NVLink4 200 GB/s/dir/GPU", gpus_per_node=4.0))
    assert h800.link_bytes_per_s == 200e9
    assert h800.gpus_per_node == 4
    assert describe_curve_hardware(make_row()).network_bytes_per_s == 200e9
    assert describe_curve_hardware(make_row(inter_link="RoCE 200 Gb/s direct cable")).network_bytes_per_s == 25e9
    slingshot = describe_curve_hardware(make_row(inter_link="Slingshot-11 (NIC count not printed)", gpus_per_node=4.0))
    assert slingshot.network_bytes_per_s == 100e9
    bare = describe_curve_hardware(make_row(inter_link=None, intra_link=np.nan, gpus_per_node=np.nan))
    assert bare == describe_curve_hardware({"gpu": "A100 SXM4 80GB"})
    bridge = describe_curve_hardware(make_row(gpu="A100 PCIe 80GB", intra_link="NVLink3 bridge (pair)"))
    assert bridge.link == "nvlink3-switch"
    with pytest.raises(UnknownNameError):
        describe_curve_hardware(make_row(gpu="not printed"))


@pytest.mark.parametrize(
    ("inter_link", "notes", "network"),
    [
        ("InfiniBand 8x400 Gb/s per node (NDR, ConnectX-7)", "", "infiniband"),
        ("RoCE 1x400 Gb/s per node (ConnectX-7)", "", "roce"),
        ("EFA 4x100 Gb/s per node", "", "efa"),
        ("Slingshot-11 4x200 Gb/s per node", "", "slingshot"),
        ("GPUDirect-TCPX 4x200 Gb/s per node", "", "ethernet"),
        ("RoCE VF (speed not printed)", "NCCL_IB_DISABLE=1", "ethernet"),
        ("not printed", "", "common"),
        (None, None, "common"),
    ],
)
def test_the_kind_of_network_is_read_from_the_row(inter_link, notes, network):
    assert describe_curve_network(make_row(inter_link=inter_link, notes=notes)) == network


def test_repositories_that_measured_one_operator_s_machines_are_one_site():
    efa = make_row(source="someone/logs b.txt@1", inter_link="EFA 32x100 Gb/s per node")
    assert curve_site(efa) == curve_site(make_row(source="aws-samples/tests README.md@7"))
    assert curve_site(make_row(source="someone/logs b.txt@1")) == curve_site(make_row()) == "someone"
    first, second = (make_row(source=f"NVIDIA/nccl-tests issue {number}") for number in (119, 309))
    assert curve_site(first) != curve_site(second)


def test_rows_that_cannot_be_predicted_are_counted_by_reason_and_never_raise():
    rows = [
        make_row(),
        make_row(gpu="MI300X"),
        make_row(gpu="not printed"),
        make_row(gpu=None),
        make_row(collective="gather"),
        make_row(collective=np.nan),
        make_row(healthy=0.0),
        make_row(seconds=0.0),
        make_row(seconds="fast"),
        make_row(bytes=np.nan),
        make_row(bytes=True),
        make_row(num_gpus=15.0),
        make_row(num_gpus=1.0, num_nodes=1.0),
        make_row(num_nodes=0.5),
        make_row(num_nodes=np.inf),
        make_row(gpus_per_node="many", inter_link="0 Gb/s"),
    ]
    frame = pd.DataFrame(rows, dtype=object)
    result = evaluate_collectives(frame, by=("collective", "gpu", "num_nodes"))
    assert result["overall"]["n"] == 1
    assert result["refused"] == {
        "no data of AMD devices": 1, "hardware unknown": 3, "collective unknown": 2, "reported as slow or broken": 1,
        "seconds unusable": 2, "bytes unusable": 2, "num_gpus unusable": 2, "num_nodes unusable": 2,
    }  # fmt: skip
    assert result["by"]["num_nodes"] == {"2": result["overall"]}
    empty = evaluate_collectives(frame.iloc[1:], by=("gpu",))
    assert empty["overall"] == {"n": 0, "median_ape": None, "p90_ape": None}
    assert empty["by"] == {"gpu": {}}


def test_errors_are_those_of_the_predicted_times_in_every_group():
    points, _ = read_points(pd.DataFrame([make_row()]))
    point = points[0]
    exact = time_point(shipped_links(), point)
    rows = [make_row(seconds=exact, notes="exact"), make_row(seconds=exact / 2, notes="half"),
            make_row(seconds=exact / 2, notes="half")]  # fmt: skip
    result = evaluate_collectives(pd.DataFrame(rows), by=("notes", "size_band", "site"))
    assert result["overall"]["median_ape"] == pytest.approx(1.0)
    assert result["by"]["notes"]["exact"]["p90_ape"] == pytest.approx(0.0)
    assert result["by"]["notes"]["half"] == {"n": 2, "median_ape": pytest.approx(1.0), "p90_ape": pytest.approx(1.0)}
    assert result["by"]["size_band"]["1-64 MiB"]["n"] == 3
    assert result["by"]["site"]["someone"]["n"] == 3
    with pytest.raises(InputError, match="colour"):
        evaluate_collectives(pd.DataFrame(rows), by=("colour",))


def _frame_of(links, sites):
    """Curves of every site that follow ``links`` exactly."""
    rows = [
        make_row(source=f"{site}/logs a", bytes=float(size), collective=kind, num_gpus=8.0 * nodes, num_nodes=nodes)
        for site in sites
        for kind in ("all_reduce", "all_gather")
        for nodes in (1.0, 2.0)
        for size in 2.0 ** np.arange(12, 33, 2)
    ]
    frame = pd.DataFrame(rows)
    points, _ = read_points(frame)
    frame["seconds"] = [time_point(links, point) for point in points]
    return frame


def _slow_links():
    links = shipped_links()
    nvlink3 = dataclasses.replace(links.links["nvlink3-switch"], efficiency=0.55)
    infiniband = dataclasses.replace(links.networks["infiniband"], efficiency=0.5)
    return dataclasses.replace(
        links,
        links={**links.links, "nvlink3-switch": nvlink3},
        networks={**links.networks, "infiniband": infiniband},
    )


def test_a_fit_follows_its_curves():
    frame = _frame_of(_slow_links(), [f"site-{number}" for number in range(12)])
    before = evaluate_collectives(frame)["overall"]["median_ape"]
    after = evaluate_collectives(frame, links=fit_links(frame))["overall"]["median_ape"]
    assert before > 0.1
    assert after < before / 2


def test_a_new_kind_of_link_is_one_row(monkeypatch):
    kind = LinkKind(
        name="nvlink6-switch", device_bytes_per_s=126e9, family="nvlink", curves="nvlink6-switch", switch_sums=True
    )
    monkeypatch.setitem(LINK_KINDS, kind.name, kind)
    device = dataclasses.replace(find_hardware("b200"), link=kind.name)
    devices = known_hardware() | {"new": device}
    monkeypatch.setattr(fitting, "known_hardware", lambda: devices)
    monkeypatch.setattr(fitting, "_nominal_latencies", fitting._nominal_latencies.__wrapped__)
    links = parse_links(format_links(fit_links(pd.DataFrame([make_row()]))))
    assert links.links[kind.name].in_switch > 0
    assert time_collective(links, "all_reduce", 2.0**20, 16, 2, device, "common") > 0


def test_sites_that_a_fit_did_not_see_are_predicted_worse_but_still_well():
    frame = shipped_collectives()
    frame = frame[frame["num_nodes"] > 1]
    sites = pd.Series([curve_site(row) for row in frame.to_dict("records")], index=frame.index)
    errors = []
    for site in sorted(set(sites)):
        # The mesh of the DGX-1 is a constant from one site, so that site's V100 rows are not wholly unseen.
        links = fit_links(frame[sites != site])
        points, _ = read_points(frame[sites == site])
        errors += [abs(time_point(links, point) / point.seconds - 1) for point in points]
    assert len(errors) > 500
    in_sample = evaluate_collectives(frame, links=fit_links(frame))["overall"]
    assert in_sample["n"] == len(errors)
    assert in_sample["median_ape"] < np.median(errors) < 0.35


def test_nothing_to_fit_is_refused():
    with pytest.raises(InputError, match="no curve"):
        fit_links(pd.DataFrame([make_row(gpu="MI300X")]))


def test_the_shipped_constants_are_the_fit_of_the_shipped_curves_and_survive_the_file():
    fitted = fit_links(shipped_collectives())
    text = format_links(fitted)
    assert format_links(parse_links(text)) == text
    shipped, fresh = shipped_links(), parse_links(text)
    for table in ("links", "networks", "collectives"):
        for name, law in getattr(fresh, table).items():
            for field in dataclasses.fields(law):
                value, expected = getattr(law, field.name), getattr(getattr(shipped, table)[name], field.name)
                assert np.asarray(expected) == pytest.approx(np.asarray(value), rel=0.02), f"{name} {field.name}"


def test_the_shipped_constants_are_near_the_public_curves():
    result = evaluate_collectives(shipped_collectives())
    assert result["overall"]["n"] > 2000
    assert result["overall"]["median_ape"] < 0.15
    assert result["by"]["size_band"]["> 64 MiB"]["median_ape"] < 0.10
