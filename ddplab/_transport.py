"""Who carries a bucket: the backend's all-reduce, or a schedule of ours in a thread of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
import torch.distributed as dist
from torch.futures import Future

from ddplab.schedule import Schedule


class Transport:
    """Sums one flat buffer over the ranks without waiting: the backend's all-reduce, or a `Schedule` of ours.

    A schedule is many sends and receives with arithmetic between them, so somebody has to drive it while backward goes
    on: one thread, in the order in which the buckets come. It has a process group of its own, because two threads that
    share one would interleave their messages differently on each rank.
    """

    def __init__(self, group: dist.ProcessGroup, schedule: Schedule | None):
        self.group, self.schedule = group, schedule
        if schedule is None:
            return
        ranks = dist.get_process_group_ranks(group)
        if schedule.ranks != len(ranks):
            raise ValueError(f"schedule {schedule.name!r} is for {schedule.ranks} ranks, the group has {len(ranks)}")
        self.group = dist.new_group(ranks, use_local_synchronization=len(ranks) < dist.get_world_size())
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ddplab-comm")

    def all_reduce(self, buffer: torch.Tensor) -> Future:
        if self.schedule is None:
            return dist.all_reduce(buffer, group=self.group, async_op=True).get_future()
        future: Future = Future()
        filled = torch.cuda.current_stream(buffer.device).record_event() if buffer.is_cuda else None
        self.thread.submit(self._run, buffer, filled, future)
        return future

    def _run(self, buffer: torch.Tensor, filled: torch.cuda.Event | None, future: Future) -> None:
        from ddplab.execute import all_reduce

        try:
            if filled is not None:
                filled.synchronize()
            all_reduce(buffer, schedule=self.schedule, op="sum", group=self.group, check=False)
            if filled is not None:
                torch.cuda.synchronize(buffer.device)
            future.set_result(buffer)
        except Exception as problem:  # re-raised by whoever waits for this bucket
            future.set_exception(problem)
