"""Communication hooks: what DDP may send instead of float32 gradients. One readable class for each method.

| file               | method                                              | share of the fp32 ring's bytes          |
|--------------------|-----------------------------------------------------|-----------------------------------------|
| `cast.py`          | `Fp16`, `Bf16`: divide, cast, all-reduce            | 1/2                                     |
| `int8.py`          | `Int8`: 255 steps of each chunk's largest magnitude | 1/4                                     |
| `onebit.py`        | `OneBit`: signs, and a scale for each chunk         | 1/32                                    |
| `sparse.py`        | `TopK`, `RandomK`: a few elements, with their places| by the ratio, and the number of ranks   |
| `powersgd.py`      | `PowerSGD`: two thin matrices for each matrix       | by the rank and the shapes              |
| `hierarchical.py`  | `Hierarchical`: all bytes, on two levels of links   | 1 on the inner links, less on the outer |

Below them: `base.py` (what all share), `passage.py` (how a bucket passes through), `lane.py` (the communication
thread), `wire.py` (counted collectives), `feedback.py` and `residuals.py` (error feedback, per parameter), `codec.py`
and `twophase.py` (an exchange of things that do not add), `finite.py`, `agreement.py` and `checkpoint.py` (what can go
wrong, and who hears of it).
"""
