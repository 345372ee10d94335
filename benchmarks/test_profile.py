"""Where each microsecond of a request goes, module by module; run with `-s`."""

from __future__ import annotations

from collections import Counter
from cProfile import Profile
from pathlib import Path
from pstats import Stats

import pytest

from .replay import CacheClock, make_cache, replay
from .workloads import few_shot


def test_where_the_time_goes(capsys: pytest.CaptureFixture[str]) -> None:
    """Shares are those under a profiler, the sum is what it takes without one."""
    workload = few_shot()
    clock = CacheClock()
    for _ in replay(workload, make_cache(workload, 16), clock):
        pass
    # Built-in functions count for whoever calls them.
    profile = Profile(builtins=False)
    requests = replay(workload, make_cache(workload, 16), CacheClock())
    profile.runcall(lambda: [None for _ in requests])

    times: Counter[str] = Counter()
    for (filename, *_), (_, _, own_time, *_) in Stats(profile).stats.items():
        path = Path(filename)
        if path.parent.name == "mem_cache":
            times[path.stem] += own_time
    us_per_request = 1e6 * clock.seconds / workload.num_requests
    with capsys.disabled():
        print(f"\n{us_per_request:.1f} us a few-shot request, page size 16")
        for module, seconds in times.most_common():
            share = seconds / times.total()
            print(f"{share * us_per_request:6.1f} us {share:6.1%}  {module}")
