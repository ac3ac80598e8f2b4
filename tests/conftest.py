"""Tests marked `mpi(n)` run on the first n ranks of one MPI job, started when the first of them comes up.

Inside the job every rank is a pytest of its own. A rank whose test fails ends the job, since the others may
wait for it; the tests that are left go into a new one. The outer pytest reports what the ranks wrote down.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import defaultdict
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import launch

from chimera_mpi.stopping import SIGNALS

INSIDE = "CHIMERA_TEST_RESULTS"
JOB_LIMIT_S = 1500  # of a job; a test has its own limit, in setup.cfg


@pytest.fixture(autouse=True)
def _signals():
    """A run that is to be queued again leaves signals ignored, for it is the end of its process, but not of this one:
    what tests start later would ignore them too."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def ranks_of(item: pytest.Item) -> int:
    mark = item.get_closest_marker("mpi")
    return mark.args[0] if mark else 0


if INSIDE in os.environ:
    from mpi4py import MPI

    from chimera_mpi.runtime.waiting import Patience, assemble

    SITTING_OUT = Patience(spin_s=0.0, nap_s=1e-3, longest_nap_s=10.0)  # of tests that others do

    _results = open(f"{os.environ[INSIDE]}/{MPI.COMM_WORLD.rank}", "a", buffering=1)  # noqa: SIM115
    _comms: dict[int, MPI.Comm] = {}  # by the number of ranks; the others share one that nobody uses

    def pytest_collection_modifyitems(config, items):
        items[:] = [item for item in items if MPI.COMM_WORLD.rank < ranks_of(item)]

    def pytest_runtest_logstart(nodeid, location):
        _results.write(json.dumps({"nodeid": nodeid}) + "\n")

    def pytest_runtest_logreport(report):
        if report.when == "call" or report.outcome != "passed":
            row = {
                "nodeid": report.nodeid,
                "outcome": report.outcome,
                "text": report.longreprtext,
                "seconds": report.duration,
            }
            _results.write(json.dumps(row) + "\n")
            if report.failed:
                MPI.COMM_WORLD.Abort(1)

    def pytest_runtestloop():
        """All communicators at once: who comes early to a blocking call spins, on the cores of those who are late."""
        assemble(MPI.COMM_WORLD, SITTING_OUT)
        for n in range(1, MPI.COMM_WORLD.size + 1):
            _comms[n] = MPI.COMM_WORLD.Split(MPI.COMM_WORLD.rank < n)

    def pytest_sessionfinish():
        assemble(MPI.COMM_WORLD, SITTING_OUT)

    @pytest.fixture
    def comm(request):
        """The first n ranks, all of them here."""
        comm = _comms[ranks_of(request.node)]
        assemble(comm, SITTING_OUT)
        return comm

else:

    class Job:
        """Runs MPI tests ahead of their turn and remembers what came of each."""

        def __init__(self, tmp_path_factory):
            self.folder = tmp_path_factory
            self.verdicts: dict[str, str | None] = {}
            self.seconds: dict[str, float] = {}

        def run(self, items: list[pytest.Item]) -> None:
            wanted = {item.nodeid: ranks_of(item) for item in items}
            while wanted:
                folder = self.folder.mktemp("mpi")
                (folder / "arguments").write_text("\n".join(wanted))
                command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"@{folder}/arguments"]
                job = launch.run(
                    max(wanted.values()), command, JOB_LIMIT_S, items[0].config.rootpath, **{INSIDE: str(folder)}
                )
                finished = self._read(folder, wanted, (job.stdout + job.stderr)[-8000:])
                if not finished:
                    self.verdicts.update(dict.fromkeys(wanted, f"the MPI job ran no test:\n{job.stdout}{job.stderr}"))
                    return
                wanted = {nodeid: n for nodeid, n in wanted.items() if nodeid not in self.verdicts}

        def _read(self, folder: Path, wanted: dict[str, int], output: str) -> bool:
            passed, started, failed = defaultdict(int), {}, {}
            for path in folder.glob("[0-9]*"):
                for row in map(json.loads, path.read_text().splitlines()):
                    nodeid = row["nodeid"]
                    started[nodeid] = True
                    self.seconds[nodeid] = max(self.seconds.get(nodeid, 0.0), row.get("seconds", 0.0))
                    passed[nodeid] += row.get("outcome") in ("passed", "skipped")
                    if row.get("outcome") == "failed":
                        failed.setdefault(nodeid, f"on rank {path.name}:\n{row['text']}")
            whole = {nodeid for nodeid in started if passed[nodeid] == wanted[nodeid]}
            self.verdicts.update(dict.fromkeys(whole))
            self.verdicts.update(failed)
            unfinished = [nodeid for nodeid in started if nodeid not in whole and nodeid not in failed]
            if not failed:
                self.verdicts.update(dict.fromkeys(unfinished, f"the MPI job hung or died here:\n{output}"))
            return bool(whole or failed or unfinished)

    def pytest_collection_modifyitems(items):
        for item in items:
            if ranks_of(item):  # the first of them runs the whole job, which has its own limits
                item.add_marker(pytest.mark.timeout(0))

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(pyfuncitem):
        if not ranks_of(pyfuncitem):
            return None
        verdicts = pyfuncitem.session.mpi_job.verdicts
        if pyfuncitem.nodeid not in verdicts:
            pyfuncitem.session.mpi_job.run([item for item in pyfuncitem.session.items if ranks_of(item)])
        if verdicts[pyfuncitem.nodeid]:
            pytest.fail(verdicts[pyfuncitem.nodeid], pytrace=False)
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(item, call):
        report = yield
        if call.when == "call" and ranks_of(item):  # not those of the job, which are the first one's
            report.duration = item.session.mpi_job.seconds.get(item.nodeid, 0.0)
        return report

    @pytest.fixture(scope="session", autouse=True)
    def _mpi_job(request, tmp_path_factory):
        request.session.mpi_job = Job(tmp_path_factory)

    @pytest.fixture
    def comm():
        """Stands in for the communicator outside of the job, where the test's body does not run."""
