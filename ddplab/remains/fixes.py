"""What each kind of fault is called, and what to do about it."""

from __future__ import annotations

TITLES = {
    "skipped_collective": "A collective was skipped",
    "rank_gone": "A rank is gone",
    "unequal_batches": "Unequal numbers of batches",
    "unused_parameter": "A parameter without a gradient",
    "slow_rank": "A slow rank",
    "wrong_order": "Collectives in different orders",
    "mismatched_shapes": "Shapes or dtypes that do not match",
    "one_rank_only": "A collective on some ranks only",
    "exception": "An exception ended a rank",
    "mismatch": "Ranks call different collectives, and no majority says who is wrong",
    "no_show": "A rank did not come, and nothing tells why",
    "stuck": "All ranks wait in the same collective",
}

FIXES = {
    "skipped_collective": "let every rank call it, in every iteration. Look for continue, return, a lost exception "
    "or a condition on the rank's own data before it; decide together, by an all-reduce of the condition.",
    "rank_gone": "ask the machine why the process ended: the logs of kernel (out of memory) and scheduler, Xid errors. "
    "Then resume from a checkpoint, by torchrun with --max-restarts.",
    "unequal_batches": "give every rank the same number of batches (drop_last=True, a DistributedSampler), or let the "
    "others go on without it: Join of torch.distributed.algorithms.join, or dl.accumulate(..., uneven=...).",
    "unused_parameter": "let every parameter take part in the loss on every rank, or pass find_unused_parameters=True "
    "to DistributedDataParallel.",
    "slow_rank": "look at what this rank does before that collective: its input, evaluation, checkpoints, a garbage "
    "collection, a throttled or busy machine. Raising the timeout hides it.",
    "wrong_order": "start collectives in one order on all ranks: sort the names, do not loop over a set, start them "
    "from one thread only.",
    "mismatched_shapes": "make the tensors equal before the call: drop_last=True, padding to the longest, or an "
    "all-gather of the lengths first.",
    "one_rank_only": "move the collective out of the condition: let rank 0 save or evaluate inside `if rank == 0`, and "
    "all ranks call the collective after it.",
    "exception": "repair the exception; that the other ranks lost their peer or timed out is its consequence.",
    "mismatch": "compare the two places in the program. With TORCH_DISTRIBUTED_DEBUG=DETAIL torch checks every call "
    "before it begins.",
    "no_show": "look at that rank's log and stack (py-spy dump, or a watchdog with faulthandler): nothing here says "
    "where it was.",
    "stuck": "the program is consistent, so look below it: links, the network interface that NCCL chose, NCCL RAS, "
    "firewalls.",
}
