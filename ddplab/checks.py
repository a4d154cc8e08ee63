"""Exercise checkers: run the reader's function on real ranks, say which rank, step and chunk is wrong.

Each checker hands the function a tensor that remembers its contributions, watches every message, and compares both
with a `Schedule`. The first difference, by step and then by rank, becomes one sentence. Nothing is compared with our
own run: the schedule is symbolic, the sums are exact.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddplab.schedule import Schedule, ring

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddplab.watch import Content, Report


class CheckError(AssertionError):
    """The answer of an exercise is wrong; the message says where. Notebooks show the message without a traceback."""

    def _render_traceback_(self) -> list[str]:  # IPython's hook
        return [f"Not yet: {self}"]


def check_reduce_scatter(fn: Callable, ranks: int = 4, schedule: Schedule | None = None, timeout: float = 10) -> None:
    """Check `fn(chunks, rank, ranks)`: the reduce-scatter half of `schedule` (default: `ring(ranks)`), in place.

    `chunks` is a list of `ranks` float32 tensors of equal shape. Afterwards the chunk that the schedule leaves on
    this rank must hold the sum over all ranks. Raises CheckError; prints one line if all is right.
    """
    _check(fn, "reduce_scatter", ranks, schedule, timeout)


def check_all_gather(fn: Callable, ranks: int = 4, schedule: Schedule | None = None, timeout: float = 10) -> None:
    """Check `fn(chunks, rank, ranks)`: the all-gather half. It starts where the reduce-scatter of `schedule` ends."""
    _check(fn, "all_gather", ranks, schedule, timeout)


def check_ring(fn: Callable, ranks: int = 4, schedule: Schedule | None = None, timeout: float = 10) -> None:
    """Check `fn(tensor)`: a whole ring all-reduce, in place, that leaves the *mean* over all ranks on each of them.

    Also tried on tensors whose size the ranks do not divide, with fewer elements than ranks.
    """
    _check(fn, "all_reduce", ranks, schedule, timeout)
    _check_sizes(fn, ranks, timeout)


def _check(fn: Callable, phase: str, ranks: int, schedule: Schedule | None, timeout: float) -> None:
    schedule = schedule or ring(ranks)
    if ranks < 2 or schedule.ranks != ranks:
        raise ValueError(f"the checker needs at least 2 ranks and a schedule for as many; got {ranks} and {schedule!r}")
    steps = {
        "reduce_scatter": range(schedule.reduce_steps),
        "all_gather": range(schedule.reduce_steps, schedule.steps),
        "all_reduce": range(schedule.steps),
    }[phase]
    owners = schedule.verify()
    reports = _run(ranks, timeout, _watched, fn, phase, ranks, owners, timeout)
    problem = (
        _own_error(reports)
        or _not_waited(reports)
        or _wrong_message(reports, schedule, steps)
        or _stuck(reports)
        or _wrong_count(reports, schedule, steps)
        or _wrong_result(reports, schedule, phase, owners)
    )
    if problem:
        raise CheckError(problem)
    print(f"{ranks} ranks, {len(steps)} steps: every message and every result of {fn.__name__} is right.")


def _run(ranks: int, timeout: float, worker: Callable, fn: Callable, *args: Any) -> list:
    """One result a rank of `worker(fn, *args)`; what ends the job from outside becomes a CheckError."""
    from ddplab.launch import RankError, launch

    limit = 10 * timeout + 5  # far beyond the limits on single messages, which strike first
    try:
        return launch(worker, fn, *args, ranks=ranks, timeout=limit)
    except RankError as error:
        if error.rank is None or "no answer within" in str(error):
            who = f" on rank {error.rank}" if error.rank is not None else ""
            raise CheckError(f"{fn.__name__} did not come back{who} within {limit:g} s: an endless loop?") from None
        if "died without a word" not in str(error):  # not the reader's doing: their exceptions are caught in the rank
            raise
        raise CheckError(
            f"rank {error.rank} died without a word. A receive buffer smaller than the message does that: "
            "make it with torch.empty_like(chunk), for the chunk that arrives."
        ) from error


def _watched(fn: Callable, phase: str, ranks: int, owners: list[int], timeout: float) -> Report:
    """In a rank: run `fn` once on a ledger, under watch."""
    import torch
    import torch.distributed as dist

    from ddplab.answers import where
    from ddplab.watch import Stuck, Watch, ledger, read

    rank, device = dist.get_rank(), "cuda" if dist.get_backend() == "nccl" else "cpu"
    tensor = ledger(rank, ranks, device)
    chunks = list(tensor.chunk(ranks))
    if phase == "all_gather":
        chunks[owners[rank]].copy_(sum(ledger(r, ranks, device).chunk(ranks)[owners[rank]] for r in range(ranks)))
    with Watch(ranks, timeout) as report:
        try:
            fn(tensor) if phase == "all_reduce" else fn(chunks, rank, ranks)
        except Stuck:
            pass
        except Exception as error:
            report.error, report.blank = where(error, fn), isinstance(error, NotImplementedError)
    if device == "cuda":
        torch.cuda.synchronize()
    read_back = [read(chunk, ranks) for chunk in tensor.chunk(ranks)]
    report.final = [content for content, _ in read_back]
    report.scaled = any(scaled for _, scaled in read_back)
    return report


def _own_error(reports: list[Report]) -> str | None:
    for report in reports:
        if report.error and report.blank:
            return report.error
        if report.error:
            return f"rank {report.rank}, step {max(0, len(report.sent) - 1)}: {report.error}"
    return None


def _wrong_message(reports: list[Report], schedule: Schedule, steps: range) -> str | None:
    states = schedule.states()
    rows = {(t.step, t.src): t for t in schedule.transfers if t.step in steps}
    sources = {(t.step, t.dst): t.src for t in schedule.transfers if t.step in steps}
    for i, step in enumerate(steps):
        for report in reports:
            rank, row = report.rank, rows[step, report.rank]
            if i < len(report.sent):
                peer, content = report.sent[i]
                should = {(r, row.chunk): 1 for r in states[step][rank][row.chunk]}
                if peer != row.dst:
                    return f"rank {rank}, step {i}: sent to rank {peer}; this ring runs rank {rank} -> rank {row.dst}."
                if content != should:
                    return f"rank {rank}, step {i}: " + _wrong_content(content, should, row.chunk, i)
            if i < len(report.received) and report.received[i] != sources[step, rank]:
                return (
                    f"rank {rank}, step {i}: receives from rank {report.received[i]}; on this ring "
                    f"rank {sources[step, rank]} sends to rank {rank}."
                )
    return None


def _wrong_content(content: Content, should: Content, chunk: int, step: int) -> str:
    expected = f"expected chunks[{chunk}] = {_letters(should)}"
    if isinstance(content, int):
        return f"sent {content} elements that are no sum of whole chunks; {expected}."
    found = {c for _, c in content}
    if not content:
        return f"sent zeros; {expected}. A buffer that was never received into?"
    if found != {chunk}:
        what = " and ".join(f"chunks[{c}]" for c in sorted(found))
        return f"sent {what} ({_letters(content)}); {expected}."
    missing = sorted(should.keys() - content.keys())
    if missing:
        names = ", ".join(_letters({m: 1}) for m in missing)
        return (
            f"sent chunks[{chunk}] = {_letters(content)}; {expected}: {names} missing. "
            f"What arrived in step {step - 1} has to be added to the rank's own part, not dropped or copied over it."
        )
    return f"sent chunks[{chunk}] = {_letters(content)}; {expected}: something was added more than once."


def _stuck(reports: list[Report]) -> str | None:
    waiting = [r for r in reports if r.stuck]
    if not waiting:
        return None
    if len(waiting) == len(reports) and all(r.stuck == "send" for r in waiting):
        return (
            f"step {len(waiting[0].sent) - 1}: all {len(reports)} ranks wait in a send and none receives, a deadlock "
            "(timeout). A send ends only when its peer receives: post it with isend, receive, then wait for it; "
            "or give both to batch_isend_irecv."
        )
    first = min(waiting, key=lambda r: len(r.sent))
    peers = first.sent if first.stuck == "send" else first.received
    peer = peers[-1][0] if first.stuck == "send" else peers[-1]
    return (
        f"rank {first.rank}, step {len(peers) - 1}: waits for a {first.stuck} with rank {peer} that never ends "
        f"(timeout). Rank {peer} posted {len(reports[peer].sent)} sends and {len(reports[peer].received)} receives."
    )


def _wrong_count(reports: list[Report], schedule: Schedule, steps: range) -> str | None:
    for report in reports:
        if len(report.sent) != len(steps):
            return (
                f"rank {report.rank}: sent {len(report.sent)} messages; it takes {len(steps)} "
                f"(N - 1 = {schedule.ranks - 1} for each half)."
            )
    return None


def _not_waited(reports: list[Report]) -> str | None:
    for report in reports:
        if report.dropped:
            return (
                f"rank {report.rank}: posted a {report.dropped} and never waited for it. Until wait() returns, "
                "a receive buffer holds anything and a sent chunk may still be read."
            )
    return None


def _wrong_result(reports: list[Report], schedule: Schedule, phase: str, owners: list[int]) -> str | None:
    for report in reports:
        for chunk in [owners[report.rank]] if phase == "reduce_scatter" else range(schedule.chunks):
            should = {(r, chunk): 1 for r in range(schedule.ranks)}
            if report.final[chunk] != should:
                got = report.final[chunk]
                held = f"{got} elements that are no sum" if isinstance(got, int) else (_letters(got) or "zeros")
                return f"rank {report.rank}, chunks[{chunk}]: holds {held} at the end; expected {_letters(should)}."
        if phase == "all_reduce" and not report.scaled:
            return f"rank {report.rank}: holds the sum. DDP wants the mean: divide by the number of ranks, once."
        if phase != "all_reduce" and report.scaled:
            return f"rank {report.rank}: the sum came divided by {schedule.ranks}; this half only adds and copies."
    return None


def _letters(content: Content) -> str:
    """{(0, 1): 1, (3, 1): 2} -> "A2+D2+D2"; a chunk's digit counts from 1, as in the pictures."""
    return "+".join("+".join([f"{chr(65 + r)}{c + 1}"] * n) for (r, c), n in sorted(content.items()))


_NEVER = "a message never arrives (timeout)"


def _check_sizes(fn: Callable, ranks: int, timeout: float) -> None:
    sizes = (3 * ranks + 1, ranks - 1)
    results = enumerate(_run(ranks, timeout, _sized, fn, sizes, ranks, timeout))
    for rank, (size, problem) in sorted(results, key=lambda item: item[1][1] == _NEVER):  # a cause before its echo
        if problem:
            raise CheckError(
                f"{size} elements on {ranks} ranks, rank {rank}: {problem}. Chunks differ in length here, and some "
                "may be empty: torch.tensor_split(tensor, ranks) always gives as many chunks as asked, torch.chunk "
                "does not."
            )
    print(f"Sizes that {ranks} ranks do not divide ({sizes[0]} and {sizes[1]} elements) are right too.")


def _sized(fn: Callable, sizes: tuple[int, ...], ranks: int, timeout: float) -> tuple[int, str | None]:
    """In a rank: run `fn` on small whole numbers; (size, what is wrong with its first wrong result, if anything)."""
    import torch
    import torch.distributed as dist

    from ddplab.answers import where
    from ddplab.watch import Stuck, Watch

    first: tuple[int, str | None] = (sizes[-1], None)
    for size in sizes:
        base = torch.arange(1.0, size + 1, device="cuda" if dist.get_backend() == "nccl" else "cpu")
        tensor = base * (dist.get_rank() + 1)
        try:
            with Watch(ranks, timeout):
                fn(tensor)
        except Stuck:
            return size, _NEVER
        except Exception as error:
            return size, where(error, fn)
        mean = base * (ranks + 1) / 2
        wrong = (~torch.isclose(tensor, mean)).nonzero().flatten().tolist()
        if wrong and first[1] is None:  # go on all the same: the other ranks need this one for the next size
            first = size, f"element {wrong[0]} is {tensor[wrong[0]]:g}, the mean is {mean[wrong[0]]:g}"
    return first
